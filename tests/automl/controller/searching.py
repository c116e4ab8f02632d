"""A real search in processes of its own, driven through the command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from accelmark.automl.journal import EpochEvent, SearchDirectory, find_search, read_journal
from tests.automl.images import tiny_dataset, tiny_network

PROGRAM = """
import sys
from accelmark.cli.automl import app
from accelmark.spec.errors import AccelmarkError
try:
    app()
except AccelmarkError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
CONFIG = {
    "network": "net.json",
    "training": {"batch_size": 32, "learning_rate": 0.05},
    "tuning": {"kernel": [3, 5], "dropout": [0.0, 0.5]},
}


def workers_below(ancestor: psutil.Process) -> list[psutil.Process]:
    """Return the processes of Ray that do trials; those that end meanwhile are none of them."""
    found = []
    for one in ancestor.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "ray::TrialWorker" in " ".join(one.cmdline()):
                found.append(one)
    return found


class Search:
    """One search in a folder of its own, driven through the command line in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net.json").write_text(tiny_network().to_json())
        self.dataset = tiny_dataset(folder)
        self.started: list[subprocess.Popen[str]] = []
        self.launcher: tuple[str, ...] = ()
        """Command that starts the search, such as srun."""

    def configure(self, **changes: object) -> Path:
        path = self.folder / "search.json"
        path.write_text(json.dumps(CONFIG | {"dataset": self.dataset.model_dump(mode="json")} | changes))
        return path

    def begin(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self.launcher, sys.executable, "-c", PROGRAM, *words, "--runs", str(self.folder / "runs")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout_s: float = 500) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err

    def run(self) -> SearchDirectory:
        return find_search("latest", self.folder / "runs")

    def wait_for(self, what: Callable[[], bool], timeout_s: float = 300) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline or (self.started[-1].poll() is not None):
                pytest.fail(f"never happened; the search said: {self.finish(self.started[-1])}")
            time.sleep(0.05)

    def epochs(self) -> int:
        try:
            return sum(isinstance(event, EpochEvent) for event in read_journal(self.run().path))
        except Exception:  # noqa: BLE001 - the run may not be there yet
            return 0

    def workers(self) -> list[psutil.Process]:
        return workers_below(psutil.Process(self.started[-1].pid))

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        with contextlib.suppress(ProcessLookupError):
            for process in self.started:
                os.killpg(process.pid, signal.SIGKILL)
