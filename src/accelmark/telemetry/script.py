"""A FlagPerf monitor script, unchanged, as a device source."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path
from typing import Final, final

from accelmark.telemetry.command import CommandError, run_command
from accelmark.telemetry.forms import UnreadableError, Values, parse_number
from accelmark.telemetry.rule import ScriptRule
from accelmark.telemetry.sample import DeviceInfo, DeviceSample
from accelmark.telemetry.source import SourceError

_STAMP: Final = re.compile(r"\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d")
_FIRST_BLOCK_S: Final = 20.0
_CONTROL_S: Final = 30.0
_CLOSING_S: Final = 10.0


@final
class ScriptSource:
    """Starts ``<vendor>_monitor.py -o start -l DIR``, follows the log it writes there, and stops it in the end.

    The script samples at its own pace (FlagPerf's are set to 5 s); a sample taken between two of its blocks waits.
    One that does not start because an earlier run left its pid file is told to restart, as FlagPerf itself does.

    Args:
        script: the script.
        log_dir: the directory it is told to write to; its log is ``<name of the script>.log`` there.
        rule: how a device's line in the log reads.
    """

    def __init__(self, script: Path, log_dir: Path, rule: ScriptRule, first_block_s: float = _FIRST_BLOCK_S) -> None:
        self._script = script
        self._log_dir = log_dir
        self._log = log_dir / f"{script.stem}.log"
        self._rule = rule
        self._first_block_s = first_block_s
        self._offset = 0
        self._started = False
        self._interrupted = threading.Event()
        self.closing_s = _CLOSING_S
        """How long ending the script may take: FlagPerf's wait a second after each signal."""

    @property
    def log(self) -> Path:
        """The log that the script writes."""
        return self._log

    def open(self) -> tuple[DeviceInfo, ...]:
        """Start the script and wait for its first block."""
        if not self._script.is_file():
            raise SourceError(f"{self._script} does not exist")
        self._started = True
        try:
            self._control("start")
        except SourceError:
            self._control("restart")
        devices = self._next_block(self._first_block_s)
        return tuple(
            DeviceInfo(
                index=at,
                name="unknown",
                memory_total_mib=_number(values, "memory_total_mib"),
                reasons=dict.fromkeys(_missing(values), f"{self._script.name} does not give it"),
            )
            for at, values in enumerate(devices)
        )

    def sample(self) -> tuple[DeviceSample, ...]:
        """Wait for the script's next block and read it."""
        return tuple(
            DeviceSample(
                index=at,
                utilisation=_number(values, "utilisation"),
                memory_used_mib=_number(values, "memory_used_mib"),
                memory_total_mib=_number(values, "memory_total_mib"),
                power_w=_number(values, "power_w"),
                temperature_c=_number(values, "temperature_c"),
            )
            for at, values in enumerate(self._next_block(self._first_block_s))
        )

    def interrupt(self) -> None:
        """Have whoever waits for a block give up; called from another thread."""
        self._interrupted.set()

    def close(self) -> None:
        """Stop the script."""
        if self._started:
            self._started = False
            try:
                self._control("stop")
            except SourceError:
                return

    def _control(self, operation: str) -> None:
        command = [sys.executable, str(self._script), "-o", operation, "-l", str(self._log_dir)]
        try:
            run_command(command, _CONTROL_S)
        except CommandError as error:
            raise SourceError(f"{self._script.name} -o {operation}: {error}") from error

    def _next_block(self, patience_s: float) -> tuple[Values, ...]:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            block = self._complete_block()
            if block is not None:
                return read_block(block, self._rule)
            if self._interrupted.wait(0.2):
                raise SourceError(f"{self._script.name} is being stopped")
        raise SourceError(f"{self._script.name} wrote nothing to {self._log.name} for {patience_s:g} s")

    def _complete_block(self) -> str | None:
        try:
            with self._log.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return None
        end = data.rfind(b"\n\n")
        if end < 0:
            return None
        self._offset += end + 2
        return data[:end].decode("utf-8", errors="replace").rpartition("\n\n")[2]


def read_block(block: str, rule: ScriptRule) -> tuple[Values, ...]:
    """Return the devices of one block of a monitor log: a line with the time, then a line a device.

    Raises:
        SourceError: a line has another form.
    """
    stamp, *lines = [" ".join(line.split()) for line in block.strip().splitlines()] or [""]
    if not _STAMP.fullmatch(stamp):
        raise SourceError(f"a block of the script's log begins with {stamp[:40]!r}, not with a time")
    devices: list[Values] = []
    for line in lines:
        found = re.fullmatch(rule.line, line)
        if found is None:
            raise SourceError(f"the line {line[:60]!r} of the script's log has another form")
        try:
            values: Values = {name: parse_number(name, text or "") for name, text in found.groupdict().items()}
        except UnreadableError as error:
            raise SourceError(f"the script's log is not readable: {error}") from error
        devices.append(values)
    if not devices:
        raise SourceError("the script's log shows no device")
    return tuple(devices)


def _missing(values: Values) -> list[str]:
    names = (
        "utilisation", "memory_used_mib", "memory_total_mib", "power_w", "temperature_c", "sm_clock_mhz",
        "memory_clock_mhz", "throttle", "energy_j", "ecc_errors", "pids",
    )  # fmt: skip
    return [name for name in names if values.get(name) is None]


def _number(values: Values, name: str) -> float | None:
    value = values.get(name)
    return value if isinstance(value, float) else None
