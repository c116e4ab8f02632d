"""Sample the host (CPU, memory, load, pressure, disks, network, power, processes), and describe it in sys_info.json."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from accelmark.spec.errors import raising
from accelmark.spec.number_format import limit_percent, percent
from accelmark.telemetry.device import DeviceInfo, DeviceSample, SourceError
from accelmark.telemetry.sources import run_command

BUSY_CPU: Final = 0.2
"""Maximum share of busy cores before a run."""
BUSY_PRESSURE: Final = 10.0
"""Maximum percentage of time that tasks wait for the CPU, memory or disk before a run."""
POWERCAP: Final = Path("/sys/class/powercap")
_IPMI_INTERVAL_S: Final = 30.0
"""Interval of IPMI readings; a management controller responds slowly and averages over seconds."""
_READINGS: Final = {
    "dcmi power reading": re.compile(r"Instantaneous power reading:\s*(?P<watts>\d+(?:\.\d+)?)\s*Watts", re.IGNORECASE),
    "sdr": re.compile(
        r"^(?P<name>[^|]*?(?:pwr consumption|power meter|sys(?:tem)?[ _]?(?:total[ _]?)?p(?:o)?we?r|total[ _]?power"
        r"|pw consumption)[^|]*?)\s*\|\s*(?P<watts>\d+(?:\.\d+)?)\s*Watts\s*\|\s*ok\s*$",
        re.IGNORECASE,
    ),
}
"""Command of ``ipmitool`` -> its line with the power of the whole system, the best command first."""
_PLAUSIBLE_W: Final = (1.0, 100_000.0)
_PROC: Final = Path("/proc")
_SYS: Final = Path("/sys")
_MIB: Final = 1024.0 * 1024.0
_STALLS: Final = ("cpu", "memory", "io")
_CONTAINER_FILES: Final = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLES: Final = ("APPTAINER_CONTAINER", "container")
"""Apptainer's, and that of systemd's container interface."""

T = TypeVar("T")


class Rapl:
    """The energy counters of all CPU packages, summed: ``psys`` and ``dram`` would count parts twice.

    A counter wraps at ``max_energy_range_uj``, at 300 W within minutes, so it must be read more often.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._last_uj: dict[Path, int] = {}
        self._total_uj = 0
        # The sum over some of the packages would be wrong, so that one that cannot be read is an error.
        for name in sorted(root.glob("*-rapl:*/name")):
            if (text_of(name) or "").startswith("package-"):
                counter = name.with_name("energy_uj")
                self._last_uj[counter] = _read_number(counter)
        if not self._last_uj:
            raise SourceError(f"{root} lists no CPU package (no RAPL here, or a virtual machine)")

    @property
    def num_packages(self) -> int:
        """Number of packages that are read."""
        return len(self._last_uj)

    def energy_j(self) -> float:
        """Return the energy of all packages in J since this object was created; raises SourceError if it is unknown."""
        for counter, last in self._last_uj.items():
            now = _read_number(counter)
            wrapped = _read_number(counter.with_name("max_energy_range_uj")) if now < last else 0
            self._total_uj += now - last + wrapped
            self._last_uj[counter] = now
        return self._total_uj / 1e6


def _read_number(path: Path) -> int:
    with raising(SourceError, f"{path} cannot be read", OSError, ValueError):  # often by root only
        return int(path.read_text())


def ipmi_power_w(command: str, text: str) -> float:
    """Return the power of the whole system in W in the output of an ``ipmitool`` command; raises SourceError."""
    found = (_READINGS[command].search(line.strip()) for line in text.splitlines())
    readings = {float(match["watts"]) for match in found if match}
    if len(readings) != 1:
        problem = "no sensor" if not readings else f"{len(readings)} sensors with different values"
        raise SourceError(f"ipmitool {command} lists {problem} for the power of the whole system")
    return readings.pop()


def _read_ipmi_power_w() -> float:
    """Read the host's power in W by DCMI, else by its sensors, in seconds; raises SourceError with the reasons."""
    problems: list[str] = []
    for command in _READINGS:
        try:
            power_w = ipmi_power_w(command, run_command(["ipmitool", *command.split()], timeout_s=20.0))
        except SourceError as error:
            problems.append(str(error))
            continue
        if _PLAUSIBLE_W[0] <= power_w <= _PLAUSIBLE_W[1]:
            return power_w
        problems.append(f"the management controller reports {power_w:g} W, which is implausible")
    raise SourceError("; ".join(problems))


@dataclass(frozen=True)
class HostSample:
    """One sample of a host; rates are since the previous sample. A value that was not read is None."""

    cpu: float | None = None
    """Share of all cores that was busy, 0..1."""
    mem_used_mib: float | None = None
    mem_total_mib: float | None = None
    load1: float | None = None
    psi_cpu: float | None = None
    """Percent of the last 10 s in which some task waited for this resource (``/proc/pressure``)."""
    psi_memory: float | None = None
    psi_io: float | None = None
    disk_read_mib_s: float | None = None
    disk_write_mib_s: float | None = None
    net_rx_mib_s: float | None = None
    net_tx_mib_s: float | None = None
    """All interfaces but loopback."""
    power_w: float | None = None
    """The whole host, from its management controller (IPMI)."""
    rapl_j: float | None = None
    """Energy of all CPU packages, cumulative since the recorder started."""
    rank_rss_mib: float | None = None


class CpuMeter:
    """The share of all cores that was busy since the previous reading."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def busy(self) -> float | None:
        """Return 0..1, or None for the first reading and within 0.1 s of CPU time (the kernel counts in ticks)."""
        fields = psutil.cpu_times()._asdict()
        # user time includes guest time
        total = sum(value for name, value in fields.items() if name not in ("guest", "guest_nice"))
        idle = fields["idle"] + fields.get("iowait", 0.0)
        if self._before is None:
            self._before = (total, idle)
            return None
        elapsed, idled = total - self._before[0], idle - self._before[1]
        if elapsed < 0.1:
            return None
        self._before = (total, idle)
        return min(1.0, max(0.0, 1.0 - float(idled / elapsed)))


class HostSampler:
    """Reads the host, and the memory of ``pids`` and their descendants; ``reasons`` has what cannot be read."""

    def __init__(self, pids: Iterable[int] = (), *, power: bool = False) -> None:
        self.reasons: dict[str, str] = {}
        self._roots = frozenset(pids)
        self.rank_pids: set[int] = set()
        """The ranks and their descendants, as of a few seconds ago."""
        self._family: list[psutil.Process] = []
        self._family_at = float("-inf")
        self._cpu = CpuMeter()
        self._io: tuple[float, dict[str, int]] | None = None
        self._rapl = self._try("rapl_j", Rapl) if power else None
        self._power_w: deque[float] = deque(maxlen=1)
        """The latest reading of the management controller, until a sample has it."""
        if power and shutil.which("ipmitool"):
            threading.Thread(target=self._read_power, daemon=True, name="ipmi").start()
        elif power:
            self.reasons["power_w"] = "ipmitool is not installed"
        if not self._roots:
            self.reasons["rank_rss_mib"] = "no ranks to measure"

    def _read_power(self) -> None:
        """Read power in a thread of its own, since the controller is slow."""
        while True:
            try:
                self._power_w.append(_read_ipmi_power_w())
                self.reasons.pop("power_w", None)
            except SourceError as error:
                self.reasons["power_w"] = str(error)
            time.sleep(_IPMI_INTERVAL_S)

    def sample(self, now_s: float) -> HostSample:
        """Read the host at monotonic time ``now_s``."""
        memory = self._try("mem_used_mib", psutil.virtual_memory)
        load = self._try("load1", os.getloadavg)
        stalls = {name: self._try(f"psi_{name}", partial(_pressure_of, name)) for name in _STALLS}
        return HostSample(
            cpu=self._try("cpu", self._cpu.busy),
            mem_used_mib=None if memory is None else (memory.total - memory.available) / _MIB,
            mem_total_mib=None if memory is None else memory.total / _MIB,
            load1=None if load is None else load[0],
            power_w=self._power_w.pop() if self._power_w else None,
            rapl_j=None if self._rapl is None else self._try("rapl_j", self._rapl.energy_j),
            rank_rss_mib=self._rank_rss(now_s),
            **{f"psi_{name}": stall and stall[0] for name, stall in stalls.items()},
            **self._rates(now_s),
        )

    def _try(self, name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (OSError, ValueError, psutil.Error, RuntimeError, SourceError) as error:
            self.reasons[name] = f"cannot be read: {error}"
            return None

    def _rates(self, now_s: float) -> dict[str, float]:
        """Return the fields with rates since the previous sample, as far as they are known."""
        counts: dict[str, int] = {}
        disks = self._try("disk_read_mib_s", lambda: psutil.disk_io_counters(nowrap=False))
        if disks is None:
            self.reasons.setdefault("disk_read_mib_s", "the host has no disk counters")
        else:
            counts |= {"disk_read_mib_s": disks.read_bytes, "disk_write_mib_s": disks.write_bytes}
        nets = self._try("net_rx_mib_s", lambda: psutil.net_io_counters(pernic=True, nowrap=False))
        outside = [counter for name, counter in (nets or {}).items() if not name.startswith("lo")]
        if not outside:
            self.reasons.setdefault("net_rx_mib_s", "the host has no network interface but loopback")
        else:
            counts["net_rx_mib_s"] = sum(counter.bytes_recv for counter in outside)
            counts["net_tx_mib_s"] = sum(counter.bytes_sent for counter in outside)
        before, self._io = self._io, (now_s, counts)
        if before is None or now_s <= before[0]:
            return {}
        elapsed = now_s - before[0]
        steps = {name: count - before[1][name] for name, count in counts.items() if name in before[1]}
        # A counter decreases when a device is added or removed; the rate is then unknown.
        return {name: step / _MIB / elapsed for name, step in steps.items() if step >= 0}

    def _rank_rss(self, now_s: float) -> float | None:
        if not self._roots:
            return None
        if now_s - self._family_at >= 5.0:
            # The recorder is a child of the agent too, but not a rank.
            self._family = [process for process in _family(self._roots) if process.pid != os.getpid()]
            self.rank_pids = {process.pid for process in self._family}
            self._family_at = now_s
        rss = 0
        for process in self._family:
            with contextlib.suppress(psutil.Error):  # the process has ended
                rss += process.memory_info().rss
        return rss / _MIB


def _family(roots: Iterable[int]) -> list[psutil.Process]:
    processes: dict[int, psutil.Process] = {}
    for pid in roots:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return list(processes.values())


def foreign_processes(devices: Iterable[DeviceSample], roots: Collection[int]) -> list[str]:
    """Describe the processes on ``devices`` that are neither in ``roots`` nor descendants of one of them.

    A process that is not visible (in another container) counts as foreign. Its arguments may contain secrets.
    """
    known = {*roots, *(process.pid for process in _family(roots))}
    foreign: list[str] = []
    for device in devices:
        for pid in device.pids or ():
            if pid not in known:
                name = ""
                with contextlib.suppress(psutil.Error):
                    name = psutil.Process(pid).name()
                foreign.append(f"process {pid} ({name or 'name not visible'}) on device {device.index}")
    return foreign


def _pressure_of(resource: str) -> tuple[float, float]:
    """Return ``avg10`` in percent and ``total`` in us from the ``some`` line of a ``/proc/pressure`` file."""
    some = re.search(r"^some avg10=([\d.]+) .*total=(\d+)", (_PROC / "pressure" / resource).read_text(), re.MULTILINE)
    if some is None:
        raise ValueError("no line of some tasks with avg10 and total")
    return float(some[1]), float(some[2])


def busy_host() -> tuple[str, ...]:
    """Sample the host for half a second, before a run starts anything, and return why it is too busy for it."""
    sampler = HostSampler()
    sampler.sample(time.monotonic())
    before, began = _stalled_us(), time.monotonic()
    time.sleep(0.5)
    elapsed_us = 1e6 * (time.monotonic() - began)
    stalled = {f"psi_{name}": 100 * (us - before[name]) / elapsed_us for name, us in _stalled_us().items()}
    # The kernel's averages also include earlier load, such as the previous round.
    return busy_reasons(replace(sampler.sample(time.monotonic()), **stalled), psutil.cpu_count() or 1)


def _stalled_us() -> dict[str, float]:
    """Return the total time that some task waited for each resource, in us; empty without kernel support."""
    with contextlib.suppress(OSError, ValueError):
        return {name: _pressure_of(name)[1] for name in _STALLS}
    return {}


def busy_reasons(sample: HostSample, num_cpus: int) -> tuple[str, ...]:
    """Return why a host is too busy to measure, by a sample over some tenths of a second; empty for an idle host."""
    reasons: list[str] = []
    if sample.cpu is not None and sample.cpu > BUSY_CPU:
        reasons.append(f"{percent(sample.cpu)} of the cores are busy (limit {limit_percent(BUSY_CPU)})")
    limit = max(1.0, BUSY_CPU * num_cpus)
    if sample.cpu is None and sample.load1 is not None and sample.load1 > limit:
        reasons.append(f"load average over one minute is {sample.load1:.1f} (limit {limit:.1f} on {num_cpus} cores)")
    for resource, value in (("CPU", sample.psi_cpu), ("memory", sample.psi_memory), ("I/O", sample.psi_io)):
        if value is not None and value > BUSY_PRESSURE:
            reasons.append(f"{resource} contention {percent(value / 100)} (limit {limit_percent(BUSY_PRESSURE / 100)})")
    return tuple(reasons)


def collect(devices: Iterable[DeviceInfo] = ()) -> dict[str, Any]:
    """Return the properties of this host; a value that cannot be read is None. No environment variable is included."""
    infos = [asdict(device) for device in devices]
    fields = _cpuinfo()
    virtualisation = product = text_of(_SYS / "class/dmi/id/product_name")
    if any(Path(path).exists() for path in _CONTAINER_FILES) or not os.environ.keys().isdisjoint(_CONTAINER_VARIABLES):
        virtualisation = "container"
    elif "hypervisor" in fields.get("flags", "").split():
        virtualisation = f"virtual machine ({product or 'unknown product'})"
    release = re.search(r"^PRETTY_NAME=(.*)", text_of(Path("/etc/os-release")) or "", re.MULTILINE)
    # The limits of this process's control group (version 2), set by a container or scheduler.
    group = re.search(r"^0::/*(.*)", text_of(_PROC / "self/cgroup") or "", re.MULTILINE)
    limits = {"cpu_max": "cpu.max", "memory_max": "memory.max", "cpuset": "cpuset.cpus.effective"}
    return {
        "schema_version": 1,
        "hostname": socket.gethostname(),
        "os": release[1].strip("\"'") if release else f"{platform.system()} {platform.release()} ({sys.platform})",
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "virtualisation": virtualisation,
        "cpu": _cpu(fields),
        "memory": {
            "total_mib": psutil.virtual_memory().total / _MIB,
            "swap_mib": psutil.swap_memory().total / _MIB,
            "huge_pages": text_of(_SYS / "kernel/mm/transparent_hugepage/enabled"),
        },
        "cgroup": {name: group and text_of(_SYS / "fs/cgroup" / group[1] / file) for name, file in limits.items()},
        "drivers": sorted({info["driver"] for info in infos if info["driver"]}),
        "devices": infos,
    }


def _cpuinfo() -> dict[str, str]:
    first = (text_of(_PROC / "cpuinfo") or "").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def cpu_model() -> str:
    """Return the CPU's name as its vendor (or the hypervisor) reports it."""
    fields = _cpuinfo()
    for key in ("model name", "Model", "Hardware", "cpu model", "cpu"):
        if fields.get(key):
            return fields[key]
    implementer, part = fields.get("CPU implementer"), fields.get("CPU part")
    if implementer and part:
        return f"{platform.machine()} implementer {implementer} part {part}"
    return platform.processor() or platform.machine()


def cpu_features() -> frozenset[str]:
    """Return the instruction set extensions of the CPU, as Linux names them."""
    fields = _cpuinfo()
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def _cpu(fields: dict[str, str]) -> dict[str, Any]:
    cpus = _SYS / "devices/system/cpu"
    policy = cpus / "cpu0/cpufreq"
    no_turbo, boost = text_of(cpus / "intel_pstate/no_turbo"), text_of(cpus / "cpufreq/boost")
    flags = cpu_features()
    wanted = (
        "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "asimd", "sve", "bf16",
    )  # fmt: skip
    return {
        "model": cpu_model(),
        "logical_cores": psutil.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "usable_cores": len(os.sched_getaffinity(0)),
        "microcode": fields.get("microcode"),
        "features": [flag for flag in wanted if flag in flags],
        "governor": text_of(policy / "scaling_governor"),
        "max_mhz": thousandths(policy / "cpuinfo_max_freq"),
        "limit_mhz": thousandths(policy / "scaling_max_freq"),
        "turbo": no_turbo == "0" if no_turbo is not None else boost and boost == "1",
        "smt": text_of(cpus / "smt/control"),
        "numa_nodes": len(list((_SYS / "devices/system/node").glob("node[0-9]*"))) or None,
    }


def thousandths(path: Path) -> float | None:
    """Return the whole number in a file of the kernel, divided by 1000; None where there is none."""
    text = text_of(path)
    return int(text) / 1000 if text is not None and text.lstrip("-").isdigit() else None


def text_of(path: Path) -> str | None:
    """Return the text of a file of the kernel; None where it is empty or cannot be read."""
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
