"""Environments of frameworks for tests, and the command line with them.

An environment is created once, by ``accelmark env create`` in ``.environments/`` of the checkout, or in
``$ACCELMARK_TEST_ENVIRONMENTS``, which several checkouts can share.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import accelmark
from accelmark.spec.plugins.catalog import find

SOURCE = Path(accelmark.__file__).parents[1]
PLACE = Path(os.environ.get("ACCELMARK_TEST_ENVIRONMENTS") or Path(__file__).parents[2] / ".environments")


def run_accelmark(
    *arguments: str, timeout_s: float = 500, **variables: str | os.PathLike[str]
) -> subprocess.CompletedProcess[str]:
    """Run the command line of this checkout."""
    command = [sys.executable, "-c", "from accelmark.cli import main; main()", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    environment |= {name: os.fspath(value) for name, value in variables.items()}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False, encoding="utf-8"
    )


def made_once(name: str, wanted: str, make: Callable[[Path], object]) -> Path:
    """Return the directory ``name``, which ``make`` makes where it does not exist or ``wanted`` has changed."""
    path, marker = PLACE / name, PLACE / f"{name}.constraints"
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.is_file() or marker.read_text(encoding="utf-8") != wanted:
            make(path)
            marker.write_text(wanted, encoding="utf-8")
    return path


@functools.cache
def framework_environment(framework: str) -> Path:
    """Return the virtual environment of a framework, created where it does not exist or its versions have changed."""

    def create(path: Path) -> None:
        options = ("--vendor", "cpu", "--path", str(path))
        done = run_accelmark("env", "create", framework, *options, timeout_s=3600, ACCELMARK_CACHE=PLACE / "cache")
        assert done.returncode == 0, done.stdout + done.stderr

    constraints = find("frameworks", framework).path / "constraints.txt"
    return made_once(framework, constraints.read_text(encoding="utf-8"), create)


def framework_python(framework: str) -> Path:
    """Return the Python of a framework's environment."""
    return framework_environment(framework) / "bin" / "python"


def run_program(framework: str, program: str, *arguments: str, timeout_s: float = 300) -> list[str]:
    """Run a Python program in the environment of a framework, and return the lines that it printed."""
    command = [str(framework_python(framework)), "-W", "ignore", "-c", program, *arguments]
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **variables, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
