"""The telemetry recorder of a host, as the node agent starts, restarts and ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import psutil

from accelmark.results.store.files import write_atomic
from accelmark.run.agent.stall import size_of
from accelmark.run.agent.task import TelemetryTask
from accelmark.run.processes import descendants, is_alive
from accelmark.spec.plugins.framework import module_command

RECORDER_MODULE: Final = "accelmark.telemetry.record"
_FIRST_LINE_S: Final = 5.0
"""Longest time to wait for the first line when a job ends immediately."""
_END_S: Final = 10.0
_MAX_STARTS: Final = 3
_LONGEST_SILENCE_S: Final = 20.0
_MISSED_SAMPLES: Final = 10
"""Without a line for this time and this number of intervals, the recorder has stopped."""


@final
class RecorderProcess:
    """Starts, restarts and ends the recorder; ``warn`` receives its failures."""

    def __init__(self, node_dir: Path, warn: Callable[[str], None]) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._dir = node_dir
        self._warn = warn
        self._environment: dict[str, str] = {}
        self._num_starts = 0
        self._longest_silence_s = _LONGEST_SILENCE_S
        self._written = 0
        self._wrote_at = 0.0

    def start(self, task: TelemetryTask, environment: dict[str, str]) -> None:
        """Start the recorder."""
        request = task.model_dump(mode="json") | {"pids": [os.getpid()]}
        write_atomic(self._dir / "telemetry.json", json.dumps(request, indent=2))
        self._longest_silence_s = max(_LONGEST_SILENCE_S, _MISSED_SAMPLES * task.interval_s)
        self._environment = environment | {"OMP_NUM_THREADS": "1"}
        self._start()

    def _start(self) -> None:
        self._num_starts += 1
        self._wrote_at = time.monotonic()
        with (self._dir / "telemetry.log").open("ab") as output:
            self.process = subprocess.Popen(
                module_command(sys.executable, RECORDER_MODULE, str(self._dir)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )

    def restart(self) -> None:
        """Start the recorder again if it died or writes nothing; telemetry then has a gap, which is a warning."""
        if self.process is None:
            return
        now, size = time.monotonic(), size_of(self._dir / "telemetry.jsonl")
        if size != self._written:
            self._written, self._wrote_at = size, now
        silent_s = now - self._wrote_at
        problem = f"wrote nothing for {silent_s:.0f} s" if silent_s > self._longest_silence_s else None
        if problem is not None:
            self.process.kill()
            self.process.wait()
        elif (code := self.process.poll()) is not None:
            problem = f"ended with exit code {code}"
        if problem is None:
            return
        again = self._num_starts < _MAX_STARTS
        action = "it was started again" if again else "it was not started again"
        self._warn(f"the telemetry recorder {problem}; {action}")
        self.process = None
        if again:
            self._start()

    def stop(self, wait: Callable[[float], bool]) -> None:
        """End the recorder, once it has recorded anything; ``wait(seconds)`` returns True to end it at once."""
        if self.process is None:
            return
        deadline = time.monotonic() + _FIRST_LINE_S
        while not size_of(self._dir / "telemetry.jsonl") and self.process.poll() is None:
            if wait(0.05) or time.monotonic() > deadline:
                break
        self.process.terminate()
        for _ in range(2):
            try:
                code = self.process.wait(_END_S)
                break
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGCONT)  # a suspended recorder ends with its notes
        else:
            self.process.kill()
            self._warn(f"the telemetry recorder did not end within {2 * _END_S:g} s")
            return
        if code != 0:
            self._warn(f"the telemetry recorder ended with exit code {code}")

    def others(self, listed: Callable[[], list[psutil.Process]]) -> list[int]:
        """Return which of the processes that ``listed`` returns are not the recorder's; it starts tools meanwhile."""
        own_pids = self.pids()
        processes = listed()
        own_pids |= self.pids()
        return [process.pid for process in processes if process.pid not in own_pids and is_alive(process)]

    def pids(self) -> set[int]:
        """Return the processes of the recorder."""
        if self.process is None:
            return set()
        return {self.process.pid, *(process.pid for process in descendants(self.process.pid))}
