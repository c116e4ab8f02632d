"""Sample the host: CPU, memory, load, pressure, disks, network, power, and the processes of the run and of others."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar, final

import psutil

from accelmark.spec.number_format import limit_percent, percent
from accelmark.telemetry.device import DeviceSample
from accelmark.telemetry.sources import CommandError, run_command

POWERCAP: Final = Path("/sys/class/powercap")
_IPMI_INTERVAL_S: Final = 30.0
"""Interval of IPMI readings; a management controller responds slowly and averages over seconds."""
_IPMI_TIMEOUT_S: Final = 20.0
_DCMI: Final = re.compile(r"Instantaneous power reading:\s*(\d+(?:\.\d+)?)\s*Watts", re.IGNORECASE)
_SDR: Final = re.compile(
    r"^(?P<name>[^|]*?(?:pwr consumption|power meter|sys(?:tem)?[ _]?(?:total[ _]?)?p(?:o)?we?r|total[ _]?power"
    r"|pw consumption)[^|]*?)\s*\|\s*(?P<watts>\d+(?:\.\d+)?)\s*Watts\s*\|\s*ok\s*$",
    re.IGNORECASE,
)
_PLAUSIBLE_W: Final = (1.0, 100_000.0)


class RaplError(Exception):
    """RAPL cannot be read; the message is the reason."""


class IpmiError(Exception):
    """The management controller reports no power; the message is the reason."""


@final
class Rapl:
    """The energy counters of all CPU packages, unwrapped and summed.

    Only zones named ``package-N`` count: ``psys`` and ``dram`` would count parts twice or the whole board. A counter
    wraps at ``max_energy_range_uj``, at 300 W within minutes, so it must be read more often.

    Raises RaplError: there is no package, or a package is not readable.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._last_uj: dict[Path, int] = {}
        self._total_uj = 0
        if not root.is_dir():
            raise RaplError(f"{root} does not exist (no RAPL here, or a virtual machine)")
        problems: list[str] = []
        for zone in sorted(root.glob("*-rapl:*")):
            try:
                if (zone / "name").read_text().startswith("package-"):
                    self._last_uj[zone / "energy_uj"] = _read_number(zone / "energy_uj")
            except (OSError, RaplError) as error:
                problems.append(str(error))
        if problems:
            # The sum over some of the packages would be wrong.
            raise RaplError("; ".join(problems))
        if not self._last_uj:
            raise RaplError(f"{root} lists no CPU package")

    @property
    def num_packages(self) -> int:
        """Number of packages that are read."""
        return len(self._last_uj)

    def energy_j(self) -> float:
        """Return the energy of all packages in J since this object was created; raises RaplError if it is unknown."""
        for counter, last in self._last_uj.items():
            now = _read_number(counter)
            wrapped = _read_number(counter.with_name("max_energy_range_uj")) if now < last else 0
            self._total_uj += now - last + wrapped
            self._last_uj[counter] = now
        return self._total_uj / 1e6


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except PermissionError as error:
        raise RaplError(f"{path} is readable by root only") from error
    except (OSError, ValueError) as error:
        raise RaplError(f"{path} cannot be read: {error}") from error


def parse_dcmi(text: str) -> float:
    """Return the power in W from ``ipmitool dcmi power reading``; raises IpmiError if it has no plausible reading."""
    match = _DCMI.search(text)
    if match is None:
        raise IpmiError("ipmitool dcmi reports no instantaneous power reading")
    return _plausible(float(match[1]))


def parse_sdr(text: str) -> float:
    """Return the power in W of the one sensor for the whole system in ``ipmitool sdr``; raises IpmiError otherwise."""
    readings = {float(match["watts"]) for line in text.splitlines() if (match := _SDR.match(line.strip()))}
    if len(readings) != 1:
        problem = "no sensor" if not readings else f"{len(readings)} sensors with different values"
        raise IpmiError(f"ipmitool sdr lists {problem} for the power of the whole system")
    return _plausible(readings.pop())


def _plausible(power_w: float) -> float:
    if not _PLAUSIBLE_W[0] <= power_w <= _PLAUSIBLE_W[1]:
        raise IpmiError(f"the management controller reports {power_w:g} W, which is implausible")
    return power_w


def read_ipmi_power_w(tool: str = "ipmitool") -> float:
    """Read the host's power in W by DCMI, else by its sensors, in seconds; raises IpmiError with the reasons."""
    if shutil.which(tool) is None:
        raise IpmiError(f"{tool} is not installed")
    try:
        return parse_dcmi(run_command([tool, "dcmi", "power", "reading"], _IPMI_TIMEOUT_S))
    except (CommandError, IpmiError) as first:
        try:
            return parse_sdr(run_command([tool, "sdr"], _IPMI_TIMEOUT_S))
        except (CommandError, IpmiError) as second:
            raise IpmiError(f"{first}; {second}") from second


@final
class IpmiPower:
    """Reads power in a separate thread, since the controller is slow."""

    def __init__(self) -> None:
        self.reason = None if shutil.which("ipmitool") else "ipmitool is not installed"
        """Why there is no power reading, or None."""
        self._fresh: deque[float] = deque(maxlen=1)
        if self.reason is None:
            threading.Thread(target=self._refresh, daemon=True, name="ipmi").start()

    def take(self) -> float | None:
        """Return the latest reading in W if it was not returned before, else None."""
        with contextlib.suppress(IndexError):
            return self._fresh.pop()
        return None

    def _refresh(self) -> None:
        while True:
            try:
                self._fresh.append(read_ipmi_power_w())
                self.reason = None
            except IpmiError as error:
                self.reason = str(error)
            time.sleep(_IPMI_INTERVAL_S)


BUSY_CPU: Final = 0.2
"""Maximum share of busy cores before a run."""
BUSY_PRESSURE: Final = 10.0
"""Maximum percentage of time that tasks wait for the CPU, memory or disk before a run."""
_PROC: Final = Path("/proc")
_MIB: Final = 1024.0 * 1024.0
_DESCENDANTS_EVERY_S: Final = 5.0
_LEAST_CPU_S: Final = 0.1

T = TypeVar("T")


@final
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
    """Resident memory of the ranks and their descendants."""


@final
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
        if elapsed < _LEAST_CPU_S:
            return None
        self._before = (total, idle)
        return min(1.0, max(0.0, 1.0 - float(idled / elapsed)))


@final
class HostSampler:
    """Reads the host; every value that cannot be read is None with an entry in ``reasons``.

    The memory of ``pids`` and their descendants is ``rank_rss_mib``; power is read only where ``power`` is set.
    """

    def __init__(self, pids: Iterable[int] = (), proc: Path = _PROC, *, power: bool = False) -> None:
        self.reasons: dict[str, str] = {}
        self._roots = frozenset(pids)
        self._family: list[psutil.Process] = []
        self._family_at = float("-inf")
        self._proc = proc
        self._cpu = CpuMeter()
        self._io: tuple[float, dict[str, int]] | None = None
        self._ipmi = IpmiPower() if power else None
        self._rapl = self._try("rapl_j", Rapl) if power else None
        if not self._roots:
            self.reasons["rank_rss_mib"] = "no ranks to measure"

    def sample(self, now_s: float) -> HostSample:
        """Read the host at monotonic time ``now_s``."""
        memory = self._try("mem_used_mib", psutil.virtual_memory)
        load = self._try("load1", os.getloadavg)
        return HostSample(
            cpu=self._try("cpu", self._cpu.busy),
            mem_used_mib=None if memory is None else (memory.total - memory.available) / _MIB,
            mem_total_mib=None if memory is None else memory.total / _MIB,
            load1=None if load is None else load[0],
            psi_cpu=self._pressure("cpu"),
            psi_memory=self._pressure("memory"),
            psi_io=self._pressure("io"),
            power_w=self._power_w(),
            rapl_j=None if self._rapl is None else self._try("rapl_j", self._rapl.energy_j),
            rank_rss_mib=self._rank_rss(now_s),
            **self._rates(now_s),
        )

    def _try(self, name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (OSError, ValueError, psutil.Error, RuntimeError, RaplError) as error:
            self.reasons[name] = f"cannot be read: {error}"
            return None

    def _power_w(self) -> float | None:
        if self._ipmi is None:
            return None
        self.reasons.pop("power_w", None)
        if self._ipmi.reason is not None:
            self.reasons["power_w"] = self._ipmi.reason
        return self._ipmi.take()

    def _pressure(self, resource: str) -> float | None:
        path = self._proc / "pressure" / resource
        return self._try(f"psi_{resource}", lambda: pressure(path.read_text())[0])

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

    @property
    def rank_pids(self) -> set[int]:
        """The ranks and their descendants, as of a few seconds ago."""
        return {process.pid for process in self._family}

    def _rank_rss(self, now_s: float) -> float | None:
        if not self._roots:
            return None
        if now_s - self._family_at >= _DESCENDANTS_EVERY_S:
            # The recorder is a child of the agent too, but not a rank.
            self._family = [process for process in family(self._roots) if process.pid != os.getpid()]
            self._family_at = now_s
        rss = 0
        for process in self._family:
            with contextlib.suppress(psutil.Error):  # the process has ended
                rss += process.memory_info().rss
        return rss / _MIB


def family(roots: Iterable[int]) -> list[psutil.Process]:
    """Return the running processes ``roots`` and all their descendants."""
    processes: dict[int, psutil.Process] = {}
    for pid in roots:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            processes |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return list(processes.values())


def foreign_processes(devices: Iterable[DeviceSample], roots: Collection[int]) -> list[str]:
    """Describe the processes on ``devices`` that are neither in ``roots`` nor descendants of one of them.

    A process that is not visible (in another container) counts as foreign. The program is named without its arguments,
    which may contain secrets.
    """
    known = {*roots, *(process.pid for process in family(roots))}
    return [
        f"process {pid} ({_program_name(pid)}) on device {device.index}"
        for device in devices
        for pid in device.pids or ()
        if pid not in known
    ]


def _program_name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name() or "name not visible"
    return "name not visible"


def busy_host(settle_s: float = 0.5) -> tuple[str, ...]:
    """Sample the host for ``settle_s`` seconds, before a run starts anything, and return why it is too busy for it."""
    sampler = HostSampler()
    sampler.sample(time.monotonic())
    before, began = _stalled_us(), time.monotonic()
    time.sleep(settle_s)
    elapsed_us = 1e6 * (time.monotonic() - began)
    stalled = {f"psi_{name}": 100 * (us - before[name]) / elapsed_us for name, us in _stalled_us().items()}
    # The kernel's averages also include earlier load, such as the previous round.
    return busy_reasons(replace(sampler.sample(time.monotonic()), **stalled), psutil.cpu_count() or 1)


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


def _stalled_us() -> dict[str, float]:
    """Return the total time that some task waited for each resource, in us; empty without kernel support."""
    stalled: dict[str, float] = {}
    for name in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError, ValueError):
            stalled[name] = pressure((_PROC / "pressure" / name).read_text())[1]
    return stalled


def pressure(text: str) -> tuple[float, float]:
    """Return ``avg10`` in percent and ``total`` in us from the ``some`` line of a ``/proc/pressure`` file."""
    some = re.search(r"^some avg10=([\d.]+) .*total=(\d+)", text, re.MULTILINE)
    if some is None:
        raise ValueError("no line of some tasks with avg10 and total")
    return float(some[1]), float(some[2])
