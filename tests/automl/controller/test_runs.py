"""Searches on Ray workers: they end, resume after a kill, and retry failed trials."""

from __future__ import annotations

import json
import os
import signal
import tarfile

import psutil
import pytest

from accelmark.automl.journal import SearchState, read_journal
from accelmark.automl.scoring import lineage, verify_search
from tests.automl.controller.searching import Search


@pytest.mark.heavy
def test_a_killed_search_resumes_to_its_last_trial_with_the_right_score(search: Search) -> None:
    schedule = {"concurrency": 2, "max_trials": 5, "round_epochs": [3], "tuning_round": 2}
    search.begin("run", "-c", str(search.configure(schedule=schedule)))
    search.wait_for(lambda: search.epochs() >= 3)
    os.killpg(search.started[-1].pid, signal.SIGKILL)
    search.started[-1].wait()
    before = search.run().state()
    assert before.ended is None
    starting = search.begin("resume", "latest")
    search.wait_for(lambda: bool(psutil.Process(starting.pid).children()))  # Ray's processes
    starting.terminate()
    code, out, err = search.finish(starting, timeout_s=60)
    assert (code, out) == (130, "")
    assert f"Continue with: accelmark automl resume {search.run().path}" in err
    assert len(search.run().state().sessions) == 1, "it ended before its trials began"
    code, out, err = search.finish(search.begin("resume", "latest", "--json"))
    assert code == 0, err
    summary = json.loads(out)
    assert summary["trials"] == {"finished": 5}
    assert summary["interruptions"] == 1
    after = search.run().state()
    assert after.sessions[1].clock_s == pytest.approx(before.clock_s, abs=1.5)
    interrupted = [record for record in after.attempts.values() if record.status == "lost"]
    assert all(record.reason == "the run was interrupted" for record in interrupted)
    scored = {(record.trial, record.attempt) for record in after.useful() if after.epochs_of(record)}
    assert not scored & {(record.trial, record.attempt) for record in interrupted}
    judged = verify_search(search.run())
    assert judged.verdict == "VALID", judged.reasons
    events = list(read_journal(search.run().path))
    for end in range(len(events) + 1):
        explained = [agrees for agrees, *_ in lineage(events[:end], SearchState.of(events[:end]))]
        assert all(explained), "wherever a run is killed, what it wrote explains its networks"
    assert "has ended (all its trials are done)" in search.finish(search.begin("resume", "latest"))[2]
    assert search.finish(search.begin("verify", "latest"))[0] == 0
    (packed,) = (search.run().path / "ray" / "session2").iterdir()
    with tarfile.open(packed) as archive:
        assert {"logs/raylet.out", "logs/gcs_server.out"} <= set(archive.getnames())
    assert search.finish(search.begin("report", "latest", "--logs"))[0] == 0
    with tarfile.open(search.run().path / "logs.tar.gz") as archive:
        assert f"{search.run().path.name}/ray/session2/{packed.name}" in archive.getnames()


@pytest.mark.heavy
def test_trials_of_lost_and_stalled_workers_are_retried(search: Search) -> None:
    schedule = {"concurrency": 2, "max_trials": 2, "round_epochs": [60], "early_stop": False}
    training = {"batch_size": 32, "learning_rate": 0.01, "stall": "15s"}
    search.begin("run", "-c", str(search.configure(schedule=schedule, training=training)), "--json")
    search.wait_for(lambda: search.epochs() >= 2)
    one, other = search.workers()
    one.send_signal(signal.SIGKILL)
    other.send_signal(signal.SIGSTOP)
    code, out, err = search.finish(search.started[-1])
    assert code == 0, err
    assert json.loads(out)["trials"] == {"finished": 2}
    state = search.run().state()
    assert {record.status for record in state.attempts.values() if record.attempt == 1} == {"lost", "stalled"}
    assert {record.attempt for record in state.trials.values()} == {2}
    judged = verify_search(search.run())
    assert judged.verdict == "VALID", judged.reasons
