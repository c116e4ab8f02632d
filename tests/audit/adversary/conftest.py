"""The bench of the adversary suite, made once for all workers, and a run to edit."""

from __future__ import annotations

import fcntl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.audit.adversary.bench import Bench


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    own = tmp_path_factory.getbasetemp()
    path = (own if worker_id == "master" else own.parent) / "adversary"
    path.mkdir(exist_ok=True)
    return path


@contextmanager
def _alone(shared: Path) -> Iterator[None]:
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def bench(shared: Path) -> Bench:
    """The bench; the first worker makes it, and the others wait."""
    root = shared / "bench"
    with _alone(shared):
        return Bench(root) if root.is_dir() else Bench.make(root)


@pytest.fixture(scope="session")
def honest(bench: Bench, shared: Path) -> tuple[Path, Path]:
    """Two honest runs, signed: one of three rounds, and another."""
    runs = []
    with _alone(shared):
        if not bench.key.is_file():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(bench.key)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        for name, key in (("three-rounds", "short:pytorch:ACME:1:1:3"), ("another", "short")):
            directory = bench.root / "honest" / name
            if not directory.is_dir():
                made = bench.vendor(f"honest-{name}", {})
                outcome = bench.train(made, key=key, environment={"ACCELMARK_SIGNING_KEY": str(bench.key)})
                assert outcome.verdict == "VALID", outcome.output
                directory.parent.mkdir(exist_ok=True)
                made.rename(directory)
            runs.append(directory / "run")
    return runs[0], runs[1]
