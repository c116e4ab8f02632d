"""Sampling the host: CPU, memory, load, pressure, disks, network, the ranks' memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar, final

import psutil

from accelmark.telemetry.foreign import busy_reasons, descendants, parents
from accelmark.telemetry.sample import HostSample

_MIB: Final = 1024.0 * 1024.0
_DESCENDANTS_EVERY_S: Final = 5.0
_LEAST_CPU_S: Final = 0.1
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

T = TypeVar("T")


@final
class CpuMeter:
    """The share of all cores that was busy since the reading before."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def busy(self) -> float | None:
        """Return 0..1, or None at first and where too little time has passed to tell (the kernel counts in ticks).

        Raises:
            OSError: the kernel's counters cannot be read.
        """
        fields = psutil.cpu_times()._asdict()
        # Guest time is part of user time already.
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
    """Reads the host; every figure that cannot be read is None with an entry in ``reasons``.

    Args:
        pids: processes whose memory (children included) is summed as ``rank_rss_mib``.
        proc: where procfs is mounted.
    """

    def __init__(self, pids: Iterable[int] = (), proc: Path = Path("/proc")) -> None:
        self.reasons: dict[str, str] = {}
        self._roots = frozenset(pids)
        self._family: frozenset[int] = self._roots
        self._family_at = float("-inf")
        self._proc = proc
        self._cpu = CpuMeter()
        self._io: tuple[float, dict[str, int]] | None = None
        if not self._roots:
            self.reasons["rank_rss_mib"] = "no processes were named to watch"

    def sample(self, now_s: float) -> HostSample:
        """Read the host at monotonic time ``now_s``."""
        memory = self._try("mem_used_mib", psutil.virtual_memory)
        load = self._try("load1", os.getloadavg)
        base = HostSample(
            cpu=self._try("cpu", self._cpu.busy),
            mem_used_mib=None if memory is None else (memory.total - memory.available) / _MIB,
            mem_total_mib=None if memory is None else memory.total / _MIB,
            load1=None if load is None else load[0],
            psi_cpu=self._pressure("cpu"),
            psi_memory=self._pressure("memory"),
            psi_io=self._pressure("io"),
            rank_rss_mib=self._rank_rss(now_s),
        )
        rates = self._rates(now_s)
        return replace(
            base,
            disk_read_mib_s=rates.get("disk_read"),
            disk_write_mib_s=rates.get("disk_write"),
            net_rx_mib_s=rates.get("net_rx"),
            net_tx_mib_s=rates.get("net_tx"),
        )

    def _try(self, name: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (OSError, psutil.Error, RuntimeError) as error:
            self.reasons[name] = f"cannot be read: {error}"
            return None

    def _pressure(self, resource: str) -> float | None:
        path = self._proc / "pressure" / resource
        try:
            return pressure_avg10(path.read_text())
        except (OSError, ValueError) as error:
            self.reasons[f"psi_{resource}"] = f"{path} cannot be read: {error}"
            return None

    def _rates(self, now_s: float) -> dict[str, float]:
        counts: dict[str, int] = {}
        disks = self._try("disk_read_mib_s", lambda: psutil.disk_io_counters(nowrap=False))
        if disks is None:
            self.reasons.setdefault("disk_read_mib_s", "there are no disks to count")
        else:
            counts |= {"disk_read": disks.read_bytes, "disk_write": disks.write_bytes}
        nets = self._try("net_rx_mib_s", lambda: psutil.net_io_counters(pernic=True, nowrap=False))
        outside = [counter for name, counter in (nets or {}).items() if not name.startswith("lo")]
        if not outside:
            self.reasons.setdefault("net_rx_mib_s", "there is no interface but loopback")
        else:
            counts |= {
                "net_rx": sum(counter.bytes_recv for counter in outside),
                "net_tx": sum(counter.bytes_sent for counter in outside),
            }
        before, self._io = self._io, (now_s, counts)
        if before is None or now_s <= before[0]:
            return {}
        elapsed = now_s - before[0]
        steps = {name: count - before[1][name] for name, count in counts.items() if name in before[1]}
        # A counter that went back belongs to a device that came or went: no rate, rather than a wrong one.
        return {name: step / _MIB / elapsed for name, step in steps.items() if step >= 0}

    def _rank_rss(self, now_s: float) -> float | None:
        if not self._roots:
            return None
        if now_s - self._family_at >= _DESCENDANTS_EVERY_S:
            # The recorder is a child of what it watches, and not a rank.
            self._family = descendants(self._roots, parents(self._proc)) - {os.getpid()}
            self._family_at = now_s
        pages = 0
        for pid in self._family:
            try:
                pages += int((self._proc / str(pid) / "statm").read_text().split()[1])
            except (OSError, ValueError, IndexError):
                continue  # it ended since
        return pages * _PAGE / _MIB


def busy_host(settle_s: float = 0.5) -> tuple[str, ...]:
    """Watch the host for ``settle_s`` and return why it is too busy to be measured; empty where it is quiet.

    To be asked before anything of a run is started.
    """
    sampler = HostSampler()
    sampler.sample(time.monotonic())
    before, began = _waited_us(), time.monotonic()
    time.sleep(settle_s)
    elapsed_us = 1e6 * (time.monotonic() - began)
    waited = {f"psi_{name}": 100 * (us - before[name]) / elapsed_us for name, us in _waited_us().items()}
    # The kernel's own averages would tell of what ran here before, such as a round of ours.
    return busy_reasons(replace(sampler.sample(time.monotonic()), **waited), psutil.cpu_count() or 1)


def _waited_us() -> dict[str, float]:
    """Return for how long some task has waited for each resource so far; nothing where the kernel does not tell."""
    waited: dict[str, float] = {}
    for name in ("cpu", "memory", "io"):
        try:
            some = Path("/proc/pressure", name).read_text(encoding="ascii").splitlines()[0]
            waited[name] = float(some.partition("total=")[2])
        except (OSError, ValueError, IndexError):
            continue
    return waited


def pressure_avg10(text: str) -> float:
    """Return ``avg10`` of the ``some`` line of a ``/proc/pressure`` file, in percent.

    Raises:
        ValueError: the text has no such line.
    """
    for line in text.splitlines():
        kind, *pairs = line.split()
        if kind == "some":
            values = dict(pair.split("=", 1) for pair in pairs)
            if "avg10" in values:
                return float(values["avg10"])
    raise ValueError("no avg10 in it")
