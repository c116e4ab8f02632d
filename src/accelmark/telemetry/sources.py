"""Device sources of a vendor (its own library, its command-line tool, a FlagPerf monitor script), read in a thread."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import raising
from accelmark.spec.plugins.catalog import file_module
from accelmark.telemetry import forms
from accelmark.telemetry.device import DeviceInfo, DeviceSample, DeviceSource, SourceError
from accelmark.telemetry.forms import FIELD_NAMES, ScriptRule, ToolCommand, ToolRule, Values, VendorTelemetry

_SAMPLED: Final = tuple(name.name for name in fields(DeviceSample) if name.name not in ("index", "age_s"))
MODULE_FILE: Final = "telemetry.py"
"""A vendor's own reader; it defines a class ``Source``, called without arguments."""
_BLOCK_S: Final = 20.0
"""Longest wait for the next block of a FlagPerf script."""
_PROPERTIES: Final = ("name", "uuid", "bus_id", "driver", "memory_total_mib", "power_limit_w")

T = TypeVar("T")


class ToolSource:
    """Runs the tool once for every sample and parses its output by the first form that matches."""

    def __init__(self, rule: ToolRule) -> None:
        self._rule = rule
        self._tool = rule.command[0]
        self._num_devices = 0

    def open(self) -> tuple[DeviceInfo, ...]:
        """Run the tool once and return the devices that it lists."""
        devices, form = self._run(self._rule)
        self._num_devices = len(devices)
        if self._rule.identify is not None:
            with contextlib.suppress(SourceError):  # samples without names are still worth recording
                known, _ = self._run(self._rule.identify)
                by_index = {forms.device_index(at, values): values for at, values in enumerate(known)}
                indexed = [(forms.device_index(at, values), values) for at, values in enumerate(devices)]
                devices = tuple(by_index.get(index, {}) | values for index, values in indexed)
        infos = [self._info(at, values) for at, values in enumerate(devices)]
        return tuple(_share_power(infos, devices, form.power_shared) if form.power_shared else infos)

    def sample(self) -> tuple[DeviceSample, ...]:
        """Run the tool and read every device."""
        devices, _ = self._run(self._rule)
        if len(devices) != self._num_devices:
            raise SourceError(f"{self._tool} lists {len(devices)} devices; it listed {self._num_devices} when opened")
        return tuple(forms.device_sample(at, values) for at, values in enumerate(devices))

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _run(self, rule: ToolCommand) -> tuple[tuple[Values, ...], forms.Form]:
        text = run_command(rule.command, self._rule.timeout_s)
        problems: list[str] = []
        for form in rule.forms:
            try:
                return forms.parse_output(text, form), form
            except SourceError as error:
                problems.append(str(error))
        raise SourceError(f"the output of {self._tool} is not readable: {'; '.join(dict.fromkeys(problems))}")

    def _info(self, at: int, values: Values) -> DeviceInfo:
        reasons = {
            name: self._rule.reasons.get(name, f"{self._tool} does not report it")  # type: ignore[call-overload]
            if name in FIELD_NAMES
            else f"not read from {self._tool}"
            for name in _SAMPLED
            if values.get(name) is None
        }
        known: dict[str, Any] = {name: values[name] for name in _PROPERTIES if values.get(name) is not None}
        return DeviceInfo(forms.device_index(at, values), known.pop("name", "unknown"), reasons=reasons, **known)


def _share_power(
    infos: list[DeviceInfo], devices: tuple[Values, ...], with_which: Literal["previous", "next"]
) -> list[DeviceInfo]:
    step = 1 if with_which == "previous" else -1
    shared: list[DeviceInfo] = []
    leader: int | None = None
    for info, values in list(zip_strict(infos, devices))[::step]:
        if values.get("power_w") is not None:
            leader = info.index
        elif leader is not None:
            reasons = info.reasons | {"power_w": f"included in the power of device {leader}"}
            info = replace(info, power_in=leader, reasons=reasons)
        shared.append(info)
    return shared[::step]


def run_command(command: Sequence[str], timeout_s: float) -> str:
    """Return the standard output of a command, which is killed after a timeout; raises SourceError."""
    name = command[0]
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, "LC_ALL": "C", "LANG": "C"},
        )  # fmt: skip
    except FileNotFoundError:
        raise SourceError(f"{name} is not installed") from None
    except OSError as error:
        raise SourceError(f"{name} cannot be started: {error.strerror}") from None
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise SourceError(f"{name} did not finish within {timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if status := process.returncode:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        raise SourceError(f"{name} {how}")
    return output.decode("utf-8", errors="replace")


class MonitorScript:
    """Runs FlagPerf's ``<vendor>_monitor.py -o start -l DIR``, follows the log that it writes, stops it when closed.

    The script samples at its own interval (5 s in FlagPerf); ``sample`` waits for its next block. ``rule`` is the
    format of a device's line in the log, ``<name of the script>.log`` in ``log_dir``.
    """

    closing_s = 10.0
    """Maximum duration of stopping the script: FlagPerf's scripts wait a second after each signal."""

    def __init__(self, script: Path, log_dir: Path, rule: ScriptRule) -> None:
        self._script = script
        self._log_dir = log_dir
        self._log = log_dir / f"{script.stem}.log"
        self._form = forms.LinesForm(form="lines", like=".*", line=rule.line, source=script.name)
        self._offset = 0
        self._started = False
        self._interrupted = threading.Event()

    def open(self) -> tuple[DeviceInfo, ...]:
        """Start the script and wait for its first block."""
        if not self._script.is_file():
            raise SourceError(f"{self._script} does not exist")
        self._started = True
        try:
            self._control("start")
        except SourceError:  # a stale pid file
            self._control("restart")
        infos: list[DeviceInfo] = []
        for at, values in enumerate(self._next_block()):
            reasons = {name: f"{self._script.name} does not report it" for name in _SAMPLED if values.get(name) is None}
            total = forms.number(values, "memory_total_mib")
            infos.append(DeviceInfo(at, "unknown", memory_total_mib=total, reasons=reasons))
        return tuple(infos)

    def sample(self) -> tuple[DeviceSample, ...]:
        """Wait for the script's next block and read it."""
        return tuple(forms.device_sample(at, values) for at, values in enumerate(self._next_block()))

    def interrupt(self) -> None:
        """End a wait for the next block; called from another thread."""
        self._interrupted.set()

    def close(self) -> None:
        """Stop the script."""
        if self._started:
            self._started = False
            with contextlib.suppress(SourceError):
                self._control("stop")

    def _control(self, operation: str) -> None:
        command = [sys.executable, str(self._script), "-o", operation, "-l", str(self._log_dir)]
        with raising(SourceError, f"{self._script.name} -o {operation}", SourceError):
            run_command(command, timeout_s=30.0)

    def _next_block(self) -> tuple[Values, ...]:
        deadline = time.monotonic() + _BLOCK_S
        while time.monotonic() < deadline:
            data = b""
            with contextlib.suppress(OSError), self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            if (end := data.rfind(b"\n\n")) >= 0:
                self._offset += end + 2
                block = data[:end].decode("utf-8", errors="replace").rpartition("\n\n")[2]
                timestamp, _, text = block.strip().partition("\n")
                if not re.fullmatch(r"\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d", timestamp.strip()):
                    raise SourceError(f"a block of the script's log starts with {timestamp[:40]!r}, not with a time")
                with raising(SourceError, "the script's log is not readable", SourceError):
                    return forms.parse_output(text, self._form)
            if self._interrupted.wait(0.2):
                raise SourceError(f"{self._script.name} was interrupted while waiting for its next block")
        raise SourceError(f"{self._script.name} wrote nothing to {self._log.name} for {_BLOCK_S:g} s")


def device_sources(folder: Path, telemetry: VendorTelemetry, log_dir: Path | None = None) -> tuple[DeviceSource, ...]:
    """Return the ways to read a vendor's devices, best first; without ``log_dir`` scripts are left out."""
    sources: list[DeviceSource] = []
    path = folder / MODULE_FILE
    if path.is_file():
        try:
            if folder.parent == Path(__file__).parents[1] / "vendors":
                module = importlib.import_module(f"accelmark.vendors.{folder.name}.telemetry")
            else:
                module = file_module(f"_accelmark_vendor_{folder.name}_telemetry", path)
            source = module.Source()
        except Exception as error:
            raise SourceError(f"{path}: Source cannot be used: {type(error).__name__}: {error}") from error
        if not isinstance(source, DeviceSource):
            raise SourceError(f"Source in {path} lacks open(), sample() or close()")
        sources.append(source)
    if telemetry.tool is not None:
        sources.append(ToolSource(telemetry.tool))
    if telemetry.script is not None and log_dir is not None:
        sources.append(MonitorScript(folder / telemetry.script.file, log_dir, telemetry.script))
    if not sources:
        raise SourceError(telemetry.reasons.get("devices", "the vendor declares no way to read its devices"))
    return tuple(sources)


def first_readable(sources: Iterable[DeviceSource], read: Callable[[DeviceSource], T]) -> tuple[DeviceSource, T]:
    """Return the first source that ``read`` succeeds with, and its result; raises SourceError with all reasons."""
    problems: list[str] = []
    for source in sources:
        try:
            return source, read(source)
        except Exception as error:  # noqa: BLE001  a vendor's reader may raise anything
            problems.append(_problem_of(source, error))
        source.close()
    raise SourceError("; ".join(problems) or "no device source")


def _problem_of(source: DeviceSource, error: Exception) -> str:
    known = isinstance(error, SourceError)
    return str(error) if known else f"{type(source).__name__} raises {type(error).__name__}: {error}"


class Reading(NamedTuple):
    """One reading of all devices, or why it failed."""

    t: float
    """Monotonic seconds: the middle of the reading."""
    devices: tuple[DeviceSample, ...] = ()
    problem: str | None = None


class Poller:
    """Opens the first source that works and reads it once per request."""

    def __init__(self, sources: Sequence[DeviceSource]) -> None:
        self.infos: tuple[DeviceInfo, ...] = ()
        """The devices; empty before opening and after a failure."""
        self.problem: str | None = None
        self.opened = False
        """Whether opening has finished or failed; set after ``infos`` and ``problem``."""
        self._sources = sources
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self.requested_at: float | None = None
        """Start of a request that is not answered yet."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="devices")

    def start(self) -> None:
        """Start opening the sources."""
        self._thread.start()

    def read(self, patience_s: float) -> Reading | None:
        """Request a reading and return the next one; None where none comes within ``patience_s``."""
        if not self.opened or self.problem is not None:
            return None
        if self.requested_at is None:
            self.requested_at = time.monotonic()
            self._requests.put(True)
        try:
            reading = self._readings.get(timeout=patience_s)
        except queue.Empty:
            return None
        self.requested_at = None
        return reading

    def close(self) -> None:
        """Stop the thread; a source that hangs ends with the process."""
        self._requests.put(False)
        patience_s = 1.0
        for source in self._sources:
            patience_s = max(patience_s, getattr(source, "closing_s", 0.0))
            getattr(source, "interrupt", lambda: None)()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def _run(self) -> None:
        try:
            source, self.infos = first_readable(self._sources, lambda source: source.open())
        except SourceError as error:
            self.problem = str(error)
            return
        finally:
            self.opened = True
        while self._requests.get():
            began = time.monotonic()
            try:
                devices = source.sample()
                problem = forms.implausible_power(devices)
                reading = Reading((began + time.monotonic()) / 2, () if problem else devices, problem)
            except Exception as error:  # noqa: BLE001  a vendor's reader may raise anything
                reading = Reading(began, problem=_problem_of(source, error))
            self._readings.put(reading)
        source.close()
