"""One call of the campaign: its time budget, its output files, and the commands that its items run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, final

BUDGET_S: Final = 540.0
"""Seconds of a call by default, with ``RESERVE_S``."""
RESERVE_S: Final = 40.0
"""Seconds of a call that no item may use: to end the last one and to pack the logs."""
_END_GRACE_S: Final = 20.0
"""From SIGTERM to SIGKILL: time for a run to stop its agents and to write its results."""
_ROOT: Final = Path(__file__).parents[2]
_MOST_BUNDLED_BYTES: Final = 4 * 2**20
"""Files above this size stay out of the bundle of logs."""
_BUNDLED: Final = ("*.json", "*.jsonl", "*.log", "*.txt", "*.html")


class ItemError(Exception):
    """An item failed; the message says why."""


class LeftOutError(Exception):
    """An item cannot be measured here; the message says what it needs."""


@final
@dataclass(frozen=True, slots=True)
class Device:
    """The accelerator under test, as its vendor's telemetry reports it."""

    name: str
    hardware: str
    memory_gib: float
    is_accelerator: bool
    """False for the CPU, which every machine has."""
    peaks_tflops: dict[str, float]
    bandwidth_gb_s: float | None


@final
@dataclass(slots=True)
class Session:
    """What the items of a call share."""

    device: Device
    output: Path
    """The files to keep: ``results.json`` and an archive of logs for each call."""
    root: Path
    """Run directories and logs of commands, a directory per item."""
    deadline: float
    """End of the call, on the clock of ``time.monotonic``."""
    tiny: bool
    data: Path | None = None
    """Directory with fashion_mnist/ and shakespeare/ (see README.md)."""
    commands: list[str] = field(default_factory=list)
    work: Path = field(init=False)
    """The directory of the item that is measured."""
    _item_deadline: float = field(init=False, default=float("inf"))

    def begin(self, item: str, limit_s: float) -> None:
        """Give an item an empty directory to work in, and at most ``limit_s`` seconds."""
        self.commands.clear()
        self._item_deadline = time.monotonic() + limit_s
        self.work = self.root / item
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)

    def end(self) -> None:
        """End the item's time limit."""
        self._item_deadline = float("inf")

    def left_s(self) -> float:
        """Return the seconds that are left to the item, or of the budget."""
        return min(self.deadline, self._item_deadline) - time.monotonic()

    def python(self, name: str, *arguments: str, expect: tuple[int, ...] = (0,)) -> str:
        """Run ``python -m ...`` within the budget and return its standard output.

        Raises:
            ItemError: it ended with another exit code than expected, or was ended at the deadline.
        """
        ended = self.start(name, *arguments)
        code = self.wait(ended, self.left_s())
        text = (self.work / f"{name}.stdout.txt").read_text(encoding="utf-8", errors="replace")
        if code not in expect:
            why = "was ended at the deadline" if code is None else f"ended with exit code {code}"
            raise ItemError(f"{' '.join(arguments[:2])} {why}: {self.errors(name) or text[-800:]}")
        return text

    def errors(self, name: str) -> str:
        """Return the end of a command's standard error."""
        return (self.work / f"{name}.stderr.txt").read_text(encoding="utf-8", errors="replace")[-800:]

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``python -m ...`` in a process group of its own, its output in files named after ``name``.

        AccelMark is started without this program's directory in ``PYTHONPATH``, which would make results OPEN.
        """
        self.commands.append(" ".join(arguments))
        environment = dict(os.environ)
        if arguments[0] == "accelmark":
            entries = environment.get("PYTHONPATH", "").split(os.pathsep)
            environment["PYTHONPATH"] = os.pathsep.join(entry for entry in entries if entry != str(_ROOT))
        with (self.work / f"{name}.stdout.txt").open("wb") as out, (self.work / f"{name}.stderr.txt").open("wb") as err:
            command = [sys.executable, "-m", *arguments]
            return subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)

    def wait(self, process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
        """Return the exit code, or None after ending the process group at the timeout."""
        try:
            return process.wait(max(1.0, timeout_s))
        except subprocess.TimeoutExpired:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(_END_GRACE_S)
                    break
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
            return None


@final
class ResultsFile:
    """``results.json``: what all calls measured. An item that succeeded is not measured again on the same device."""

    def __init__(self, session: Session) -> None:
        self.path = session.output / "results.json"
        self._session = session
        self.items: dict[str, dict[str, Any]] = {}
        self.call = 1
        if self.path.is_file():
            before = json.loads(self.path.read_text(encoding="utf-8"))
            self.call = before["calls"] + 1
            if before["device"] == session.device.name and before["tiny"] == session.tiny:
                self.items = before["items"]

    def is_done(self, name: str) -> bool:
        """Whether the item succeeded in an earlier call."""
        return self.items.get(name, {}).get("state") == "succeeded"

    def write(self) -> None:
        """Write the file whole, so that an interrupted call keeps what was measured."""
        device = self._session.device
        content = {
            "schema_version": 3,
            "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "calls": self.call,
            "device": device.name,
            "device_memory_gib": device.memory_gib,
            "peaks_tflops": device.peaks_tflops,
            "bandwidth_gb_s": device.bandwidth_gb_s,
            "tiny": self._session.tiny,
            "items": self.items,
        }
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.rename(self.path)


def pack_logs(session: Session, call: int) -> Path:
    """Pack the logs and results of the call's runs into one archive in the output directory."""
    path = session.output / f"logs{call}.tar.xz"
    with tarfile.open(path, "w:xz", preset=1) as archive:
        for pattern in _BUNDLED:
            for file in sorted(session.root.rglob(pattern)):
                if file.is_file() and file.stat().st_size <= _MOST_BUNDLED_BYTES:
                    archive.add(file, file.relative_to(session.root))
    return path
