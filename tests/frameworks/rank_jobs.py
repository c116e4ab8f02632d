"""Jobs of a framework, whose ranks run in its environment."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from accelmark.frameworks.process_launcher import COORDINATOR
from accelmark.spec.job import JobSpec
from accelmark.spec.plugins.catalog import load_framework
from tests.cases.job_of import events_of, job_of
from tests.frameworks.environments import SOURCE, framework_python

COORDINATORS = {"paddle": "PADDLE_MASTER"}
"""Framework -> the variable with the place where ranks meet, where it is another."""
SMALL_LLAMA = {
    "model.hidden_size": 32, "model.intermediate_size": 64, "model.num_layers": 2, "model.seq_length": 32,
    "model.eval_windows": 13, "batch_size": 8, "eval_batch_size": 4, "end.max_steps": 6, "precision": "fp32",
    "log_every_steps": 2, "checkpoint.every_steps": 3, "threads": 1,
}  # fmt: skip
Events = list[tuple[str, dict[str, Any]]]


def write_plays(folder: Path) -> Path:
    """Write plays of random words."""
    for name in ("macbeth", "richard-ii", "twelfth-night", "x", "y"):
        words = np.random.default_rng(len(name)).choice(["love", "crown", "merry", "blood"], 3000)
        (folder / f"{name}.md").write_text(" ".join(words))
    return folder


def rank_job(
    framework: str, directory: Path, name: str, data: Mapping[str, Path], over: Mapping[str, Any], **changed: Any
) -> Path:
    """Write the job of a case in a framework."""
    path = job_of(name, directory, data, over)
    job = JobSpec.model_validate_json(path.read_text())
    key = job.key.model_copy(update={"framework": framework})
    backend = load_framework(framework).devices["cpu"].collective_backend
    path.write_text(job.model_copy(update={"key": key, "collective_backend": backend, **changed}).model_dump_json())
    return path


def rank_command(job: Path, num_ranks: int, program: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs the ranks of a job in the environment of its framework, and its environment.

    ``program`` is what a rank executes instead of the module.
    """
    framework = JobSpec.model_validate_json(job.read_text()).key.framework
    python = str(framework_python(framework))
    module = ["-m", "accelmark.train.loop.rank"] if program is None else ["-c", program]
    rank = [python, *module, str(job)]
    launcher = [python, "-m", "accelmark.frameworks.process_launcher", "--nproc", str(num_ranks)]
    launcher += ["--free-port", COORDINATORS.get(framework, COORDINATOR), "--"]
    variables = {"PYTHONPATH": str(SOURCE), "ACCELMARK_NODE_DIR": str(job.parent)}
    return ([*launcher, *rank] if num_ranks > 1 else rank), {**os.environ, **variables}


def stop_job(job: Path, num_ranks: int) -> str:
    """Run the ranks of a job, stop them after a window of steps, and return rank 0's log."""
    command, variables = rank_command(job, num_ranks)
    log = job.parent / "rank0.out.log"
    with subprocess.Popen(command, env=variables, cwd=job.parent) as ranks:
        while not (log.exists() and "STEP_END" in log.read_text(encoding="utf-8")):
            assert ranks.poll() is None
            time.sleep(0.1)
        ranks.send_signal(signal.SIGTERM)
        assert ranks.wait(60) == 130
    return log.read_text(encoding="utf-8")


def run_job(job: Path, num_ranks: int = 1, timeout_s: float = 400) -> Events:
    """Run the ranks of a job in the environment, and return rank 0's events."""
    command, variables = rank_command(job, num_ranks)
    (job.parent / "rank0.out.log").unlink(missing_ok=True)
    done = subprocess.run(command, env=variables, cwd=job.parent, timeout=timeout_s, check=False, capture_output=True)
    assert (job.parent / "rank0.out.log").is_file(), done.stderr.decode()
    return rank_events(job, 0)


def rank_events(job: Path, rank: int) -> Events:
    """Return the events of a rank of a job that has run."""
    return events_of(job.parent / f"rank{rank}.out.log")


def values(events: Events, name: str) -> list[dict[str, Any]]:
    """Return the values of all events of a name."""
    return [value for found, value in events if found == name]


def final_state(job: Path, step: int) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint."""
    with np.load(job.parent / "checkpoints" / f"step{step:09d}" / "state.npz") as arrays:
        return dict(arrays)
