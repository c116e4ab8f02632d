"""Real searches on real Ray workers: they end, survive being killed, and never call a failure finished."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from accelmark.automl.engine.journal import EpochDone, read_journal
from accelmark.automl.engine.rundir import RunDirectory, find_run
from accelmark.automl.verify import verify_run
from tests.automl.pictures import tiny_dataset, tiny_network

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


class Search:
    """One search in a folder of its own, driven through the command line in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net.json").write_text(tiny_network().to_json())
        self.dataset = tiny_dataset(folder)
        self.started: list[subprocess.Popen[str]] = []

    def configure(self, **changes: object) -> Path:
        config = CONFIG | {"dataset": self.dataset.model_dump(mode="json")} | changes
        path = self.folder / "search.json"
        path.write_text(json.dumps(config))
        return path

    def begin(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words, "--runs", str(self.folder / "runs")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err

    def run(self) -> RunDirectory:
        return find_run("latest", self.folder / "runs")

    def wait_for(self, what: Callable[[], bool], timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline or (self.started[-1].poll() is not None):
                pytest.fail(f"never happened; the search said: {self.finish(self.started[-1])}")
            time.sleep(0.05)

    def epochs(self) -> int:
        try:
            return sum(isinstance(event, EpochDone) for event in read_journal(self.run().path))
        except Exception:  # noqa: BLE001 - the run may not be there yet
            return 0

    def workers(self) -> list[psutil.Process]:
        everyone = psutil.Process(self.started[-1].pid).children(recursive=True)
        return [one for one in everyone if "ray::TrialWorker" in " ".join(one.cmdline())]


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    made = Search(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    with contextlib.suppress(ProcessLookupError):
        for process in made.started:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_killed_search_goes_on_to_its_last_trial_and_its_score_stays_right(search: Search) -> None:
    schedule = {"concurrency": 2, "max_trials": 5, "round_epochs": [3], "tuning_round": 2}
    search.begin("run", "-c", str(search.configure(schedule=schedule)))
    search.wait_for(lambda: search.epochs() >= 3)
    os.killpg(search.started[-1].pid, signal.SIGKILL)
    search.started[-1].wait()
    before = search.run().state()
    assert before.ended is None
    time.sleep(3)
    resumed = search.begin("resume", "latest", "--json")
    code, out, err = search.finish(resumed)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["trials"] == {"finished": 5}
    assert summary["interruptions"] == 1
    after = search.run().state()
    assert after.sessions[1].clock_s == pytest.approx(before.clock_s, abs=1.5)
    assert after.scoreboard().ended_s - before.clock_s < 60
    interrupted = [record for record in after.attempts.values() if record.status == "lost"]
    assert all(record.reason == "the run was interrupted" for record in interrupted)
    scored = {(epoch.trial, epoch.attempt) for epoch in after.useful_epochs()}
    assert not scored & {(record.trial, record.attempt) for record in interrupted}
    assert verify_run(search.run()).verdict == "VALID"
    assert "over" in search.finish(search.begin("resume", "latest"))[2]
    assert search.finish(search.begin("verify", "latest"))[0] == 0


def test_workers_that_die_or_hang_are_recorded_as_such_and_their_trials_tried_again(search: Search) -> None:
    schedule = {"concurrency": 2, "max_trials": 2, "round_epochs": [60], "early_stop": False}
    training = {"batch_size": 32, "learning_rate": 0.01, "stall": "4s"}
    search.begin("run", "-c", str(search.configure(schedule=schedule, training=training)), "--json")
    search.wait_for(lambda: search.epochs() >= 2)
    one, other = search.workers()
    one.send_signal(signal.SIGKILL)
    other.send_signal(signal.SIGSTOP)
    code, out, err = search.finish(search.started[-1])
    assert code == 0, err
    summary = json.loads(out)
    assert summary["trials"] == {"finished": 2}
    state = search.run().state()
    assert {record.status for record in state.attempts.values() if record.attempt == 1} == {"lost", "stalled"}
    assert {record.attempt for record in state.trials.values()} == {2}
    assert verify_run(search.run()).verdict == "VALID"


def test_more_workers_than_there_are_is_refused_before_anything_starts(search: Search) -> None:
    schedule = {"concurrency": 4096, "max_trials": 1}
    code, _, err = search.finish(search.begin("run", "-c", str(search.configure(schedule=schedule))))
    assert code == 2
    assert "4096 trials at a time" in err
    assert not (search.folder / "runs").exists()
