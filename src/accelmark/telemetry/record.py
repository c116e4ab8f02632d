"""Telemetry recorder: ``python -m accelmark.telemetry.record NODE_DIR``, one process per host, stopped by SIGTERM.

It reads ``NODE_DIR/telemetry.json`` and writes ``telemetry.jsonl`` and FlagPerf's monitor logs there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from pydantic import PositiveFloat

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.model import Spec
from accelmark.telemetry.device import DeviceSample, DeviceSource, SourceError
from accelmark.telemetry.forms import read_vendor
from accelmark.telemetry.host import HostSample, HostSampler, collect, foreign_processes
from accelmark.telemetry.sources import Poller, device_sources

CONFIG_FILE: Final = "telemetry.json"
RECORD_FILE: Final = "telemetry.jsonl"
OPEN_TIMEOUT_S: Final = 10.0
"""Maximum time that samples are buffered until the devices are open."""
_LOG_INTERVAL_S: Final = 5.0
"""FlagPerf's sampling interval."""
_STAMP: Final = "%Y-%m-%d-%H:%M:%S"
_HOST_LOGS: Final = ("cpu", "mem", "pwr")
_PIN_FROM_CPUS: Final = 4
"""Minimum number of usable cores at which the recorder reserves one for itself."""


class LineFile:
    """Appends each line with one write, so that readers never read partial lines; counts lines that are lost."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_lost = 0
        self.last_error: str | None = None
        self._partial = False
        self.digest = hashlib.sha256()
        """Of the written bytes."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, text: str) -> bool:
        """Append ``text`` and a line end; return whether all of it was written, as it is not on a full disk."""
        data = (b"\n" if self._partial else b"") + text.encode() + b"\n"
        try:
            num_written = os.write(self._fd, data)
        except OSError as error:
            self.last_error = error.strerror
            self.num_lost += 1
            return False
        self.digest.update(data[:num_written])
        self._partial = num_written < len(data)
        self.num_lost += self._partial
        return not self._partial

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class MonitorLogs:
    """FlagPerf's monitor logs of one host; ``vendor`` is None if the vendor's own script writes that log."""

    def __init__(self, directory: Path, vendor: str | None) -> None:
        # For the vendor `cpu`, the name would be the same as the host log's.
        self._vendor = None if vendor in _HOST_LOGS else vendor
        names = (*_HOST_LOGS, *([] if self._vendor is None else [self._vendor]))
        self._logs = {name: LineFile(directory / f"{name}_monitor.log") for name in names}
        self._next_s: dict[str, float] = {}
        self._unavailable: set[str] = set()

    def write(self, t: float, wall: float, host: HostSample, devices: Sequence[DeviceSample]) -> None:
        """Append a sample to each log that is due, and to the power log whenever there is a reading."""
        stamp = time.strftime(_STAMP, time.localtime(wall))
        if host.power_w is not None:
            self._logs["pwr"].write(f"{stamp}\t{host.power_w:.1f}")
        if host.cpu is not None and self._due("cpu", t):
            self._logs["cpu"].write(f"{stamp}\t{host.cpu:.4f}")
        if host.mem_used_mib is not None and host.mem_total_mib and self._due("mem", t):
            self._logs["mem"].write(f"{stamp}\t{host.mem_used_mib / host.mem_total_mib:.4f}")
        if self._vendor is not None and devices and self._due(self._vendor, t):
            self._logs[self._vendor].write("\n".join([stamp, *map(_device_line, devices)]) + "\n")

    def _due(self, name: str, t: float) -> bool:
        if t < self._next_s.get(name, t):
            return False
        self._next_s[name] = t + _LOG_INTERVAL_S - 0.01
        return True

    def unavailable(self, wall: float, reasons: Mapping[str, str]) -> None:
        """Log once why the host power (``power_w``) or the devices (``devices``) cannot be read."""
        stamp = time.strftime(_STAMP, time.localtime(wall))
        for name in reasons.keys() - self._unavailable:
            if name == "power_w":
                self._logs["pwr"].write(f"{stamp}\tnot available: {reasons[name]}")
            elif name == "devices" and self._vendor is not None:
                self._logs[self._vendor].write(f"{stamp}\nnot available: {reasons[name]}\n")
        self._unavailable.update(reasons)

    def close(self) -> None:
        """Close all logs."""
        for log in self._logs.values():
            log.close()


def _device_line(device: DeviceSample) -> str:
    """Return a device's line: temperature, power, memory used, total memory, utilisation; N/A where unknown."""
    percent = None if device.utilisation is None else device.utilisation * 100
    figures = (device.temperature_c, device.power_w, device.memory_used_mib, device.memory_total_mib, percent)
    units = ("C", "W", "MiB", "MiB", "%")
    return " ".join("N/A" if value is None else f"{value:.0f}{unit}" for value, unit in zip_strict(figures, units))


class RecorderConfig(Spec):
    """Contents of ``telemetry.json``."""

    vendor: str
    vendor_folder: Path
    interval_s: PositiveFloat = 1.0
    pids: tuple[int, ...] = ()
    """Processes of the run; their descendants also belong to it."""
    cpus: tuple[int, ...] = ()
    """Cores that the recorder runs on; empty: the last usable core, from four usable cores on."""
    detached: bool = False
    """Continue after the process that started it has ended (``accelmark monitor start``)."""


class Recorder:
    """Samples a host and its devices at absolute deadlines until it is stopped."""

    def __init__(self, config: RecorderConfig, node_dir: Path) -> None:
        self._config = config
        self._node_dir = node_dir
        self._problem: str | None = None
        self._devices_are_cpus = False
        sources: tuple[DeviceSource, ...] = ()
        script_log = False
        try:
            _, telemetry = read_vendor(config.vendor_folder)
            self._devices_are_cpus = telemetry.of_cpus
            sources = device_sources(config.vendor_folder, telemetry, node_dir)
            script_log = telemetry.script is not None and len(sources) == 1
        except (AccelmarkError, SourceError) as error:
            self._problem = str(error)  # the host is recorded even where the vendor's reader is broken
        self._file = LineFile(node_dir / RECORD_FILE)
        # A vendor's own script writes the vendor's log itself.
        self._logs = MonitorLogs(node_dir, None if script_log else config.vendor)
        self._poller = Poller(sources)
        self._host = HostSampler(config.pids, power=True)
        self._stopped = False
        self.was_suspended = False
        # Not an Event: a signal handler that sets one deadlocks where it interrupts the wait. put() is reentrant.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._held: list[str] | None = []
        """Lines that wait for the header."""
        self._notes: dict[str, tuple[float, int]] = {}
        """Event -> when it first happened, and how often."""
        self._num_samples = 0
        self._num_missed = 0
        self._foreign_at = float("-inf")

    def stop(self) -> None:
        """Take a last sample, write the footer and stop; safe to call from a signal handler."""
        self._stopped = True
        self._wake.put(None)

    def run(self) -> None:
        """Record until ``stop`` is called or, unless detached, until the parent process has ended."""
        self._poller.start()
        parent, start = os.getppid(), time.monotonic()
        due = start
        while True:
            t, wall = time.monotonic(), time.time()
            if self.was_suspended:
                self.was_suspended = False
                self._note("suspended: the recorder was stopped by a signal, and continued")
            host = self._host.sample(t)
            devices = self._sample_devices(t)
            self._emit(t=t, wall=wall, host=asdict(host), devices=[self._values(device) for device in devices])
            self._num_samples += 1
            self._logs.write(t, wall, host, devices)
            if self._held is not None and (self._poller.opened or t - start >= OPEN_TIMEOUT_S):
                self._write_header(start, wall)
            if self._held is None:
                self._logs.unavailable(wall, self._reasons())
            if t - self._foreign_at >= 5.0 and any(device.pids for device in devices):
                self._foreign_at = t
                for process in foreign_processes(devices, (*self._config.pids, os.getpid())):
                    self._note(f"foreign {process}")
            if self._stopped:
                break
            missed = max(0, int((time.monotonic() - due) // self._config.interval_s))
            due += (missed + 1) * self._config.interval_s
            self._num_missed += missed
            with contextlib.suppress(Empty):
                self._wake.get(timeout=max(0.0, due - time.monotonic()))
            if not self._config.detached and os.getppid() != parent:
                self._note("the parent process of the recorder has ended")
                self._stopped = True
        if self._held is not None:
            self._write_header(start, time.time())
        self._poller.close()
        self._write_footer()
        self._file.close()
        self._logs.close()

    def _values(self, device: DeviceSample) -> dict[str, Any]:
        """Return the recorded values of a sample; ``rank_memory_mib`` is the memory of the ranks' processes."""
        values = {name: value for name, value in asdict(device).items() if name != "age_s" or value}
        mib = [used for pid, used in (device.pids or {}).items() if used is not None and pid in self._host.rank_pids]
        return values | ({"rank_memory_mib": sum(mib)} if mib else {})

    def _sample_devices(self, t: float) -> tuple[DeviceSample, ...]:
        reading = self._poller.read(min(0.2 * self._config.interval_s, 0.2))
        if reading is None:
            waited_s = time.monotonic() - (self._poller.requested_at or math.inf)
            if waited_s > max(5.0, 3 * self._config.interval_s):
                self._note("the device source does not respond")
            return ()
        if reading.problem is not None:
            self._note(reading.problem)
            return ()
        age = t - reading.t
        if abs(age) < 0.02:
            return reading.devices
        return tuple(replace(device, age_s=age) for device in reading.devices)

    def _reasons(self) -> dict[str, str]:
        problem = self._problem or self._poller.problem
        if problem is None and not self._poller.opened:
            problem = f"the devices were not open within {OPEN_TIMEOUT_S:g} s"
        return dict(self._host.reasons) | ({} if problem is None else {"devices": problem})

    def _write_header(self, start: float, wall: float) -> None:
        infos = self._poller.infos
        header = {
            "schema_version": 1,
            "t": start,
            "wall": wall,
            "vendor": self._config.vendor,
            "interval_s": self._config.interval_s,
            "devices": [asdict(info) for info in infos],
            "devices_are_cpus": self._devices_are_cpus,
            "reasons": self._reasons(),
            "pid": os.getpid(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "clock": "CLOCK_MONOTONIC",
        }
        lines, self._held = self._held or [], None
        self._emit(header=header)
        for line in lines:
            self._write(line)
        if self._config.detached:  # in a run, the node agent writes it
            path = self._node_dir / "sys_info.json"
            with contextlib.suppress(OSError):
                path.with_suffix(".json.part").write_text(json.dumps(collect(infos), indent=2) + "\n")
                path.with_suffix(".json.part").replace(path)

    def _write_footer(self) -> None:
        usage, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        footer = {
            "t": time.monotonic(),
            "wall": time.time(),
            "cpu_time_s": usage.ru_utime + usage.ru_stime + children.ru_utime + children.ru_stime,
            "samples": self._num_samples,
            "missed": self._num_missed,
            "lost_lines": self._file.num_lost,
            "sha256": self._file.digest.hexdigest(),
            "reasons": self._reasons(),
            "notes": [{"t": t, "what": what, "count": count} for what, (t, count) in self._notes.items()],
        }
        self._emit(footer=footer)

    def _note(self, text: str) -> None:
        now = time.monotonic()
        first, count = self._notes.get(text, (now, 0))
        self._notes[text] = (first, count + 1)
        if not count:
            self._emit(note={"t": now, "what": text})

    def _emit(self, **entry: object) -> None:
        line = json.dumps(_rounded(entry))
        if self._held is not None:
            self._held.append(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        if not self._file.write(line) and self._file.num_lost == 1:
            reason = self._file.last_error or "the disk is full"
            print(f"telemetry: {self._file.path} cannot be written: {reason}", file=sys.stderr)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def main(node_dir: Path) -> None:
    """Record into a directory until a signal stops it."""
    config = RecorderConfig.model_validate_json((node_dir / CONFIG_FILE).read_bytes())
    with contextlib.suppress(OSError):  # a container may forbid either
        os.nice(5)
        allowed = sorted(os.sched_getaffinity(0))
        if config.cpus or len(allowed) >= _PIN_FROM_CPUS:
            os.sched_setaffinity(0, config.cpus or {allowed[-1]})
    recorder = Recorder(config, node_dir)
    signal.signal(signal.SIGTERM, lambda *_: recorder.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCONT, lambda *_: setattr(recorder, "was_suspended", True))
    recorder.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
