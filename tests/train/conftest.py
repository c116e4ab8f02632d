"""Running a rank inside the test's own process: the same code as a real rank's, without importing PyTorch anew."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.spec.job import JobSpec
from accelmark.spec.log.perflog import PerfLogWriter
from accelmark.train.loop.process import StopRequest
from accelmark.train.loop.rank import run_rank
from tests.train.jobs import Ran, make_job, node_dir_of

RunHere = Callable[[JobSpec], Ran]
Train = Callable[..., Ran]


@pytest.fixture
def run_here(tmp_path: Path) -> RunHere:
    """Run a single-rank job in this process; each call has a node directory of its own."""
    count = 0

    def run(job: JobSpec) -> Ran:
        nonlocal count
        count += 1
        node_dir = node_dir_of(tmp_path, f"here{count}")
        descriptor = os.open(node_dir / "rank0.out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            code = run_rank(job, PerfLogWriter(0, descriptor), time.monotonic(), StopRequest(wanted=False))
        finally:
            os.close(descriptor)
        return Ran(node_dir, code, "")

    return run


@pytest.fixture
def train(tmp_path: Path, run_here: RunHere) -> Train:
    """Run a job of the tiny case with the arguments of :func:`make_job`."""
    return lambda *settings, **more: run_here(make_job(tmp_path, *settings, **more))
