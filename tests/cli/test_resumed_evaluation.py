"""A run that is stopped while a round's weights are evaluated outside: ``resume`` evaluates them again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelmark.cli.folders import new_folder
from accelmark.results.store.loaded_run import load_run
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE

COMMAND = (sys.executable, "-c", "from accelmark.cli import main; main()")


def reasons(run: Path) -> list[str]:
    (case,) = load_run(run).summary.cases
    return [each.actual for each in case.findings if each.rule == "reevaluation"]


@pytest.mark.heavy
def test_an_interrupted_evaluation_is_repeated_by_resume(tmp_path: Path) -> None:
    new_folder("cases", "waves", tmp_path)
    run, here = tmp_path / "run", {**os.environ, PLUGINS_VARIABLE: str(tmp_path)}
    train = (*COMMAND, "train", "waves", "--vendor", "cpu", "--out", str(run))
    with subprocess.Popen(train, env=here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        limit = time.monotonic() + 200
        while not list(run.glob("*/evaluation-round1/*/rank0.out.log")) and time.monotonic() < limit:
            assert process.poll() is None, "it ended before its weights were evaluated"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=200)
    assert f"accelmark resume {run}" in " ".join(shown.split()), shown
    assert reasons(run) == ["the evaluation job did not complete: was cancelled"]
    done = subprocess.run((*COMMAND, "resume", str(run)), env=here, capture_output=True, text=True, check=False)
    assert "evaluating its weights, which was interrupted" in done.stdout + done.stderr
    assert reasons(run) == [], done.stdout
