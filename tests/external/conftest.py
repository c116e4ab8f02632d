"""A case that only an external trainer trains, and the trainer's one YAML file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("accelmark")

CASE = """
name: signs
version: 1
title: Signs
description: Made up for tests.
licence: Apache-2.0
size: mini
train:
  unit: sample
  target: {metric: accuracy, direction: at_least, value: 0.9, why: made up for tests}
  mutable: [batch_size, end, model, optimizer.lr, log_every_steps]
  settings:
    batch_size: 16
    threads: 1
    end: {max_steps: 120}
    optimizer: {lr: 0.5, momentum: 0.0}
    model: {every: 1, fault: ""}
"""


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "cases" / "signs").mkdir(parents=True)
    (folder / "cases" / "signs" / "case.yaml").write_text(CASE)
    (folder / "trainers").mkdir()
    for name in ("slowgrad.yaml", "toy_trainer.py"):
        shutil.copy(HERE / name, folder / "trainers" / name)
    return folder


Accelmark = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def accelmark(plugins: Path, tmp_path: Path) -> Accelmark:
    """Return a function that runs the command line in a directory of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "ACCELMARK_PLUGINS": str(plugins),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        command = [str(COMMAND), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
        )

    return run


def result_of(run: Path) -> dict[str, Any]:
    (path,) = run.glob("*/round1/result.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found
