"""Folders of a made-up vendor and case that tests plan with."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE

os.environ["ACCELMARK_STATE"] = tempfile.mkdtemp(prefix="accelmark-tests-")  # not the registry of the user's runs
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests share their cores with one another: a thread that spins while it waits for another takes the core of the other.

# Without a time limit for each example, which a busy machine exceeds by luck.
hypothesis.settings.register_profile("no-deadline", deadline=None)
hypothesis.settings.load_profile("no-deadline")

VENDOR = """
name: acme
title: Acme (made up for tests)
frameworks:
  pytorch: {device_type: cpu, collective_backend: gloo}
visible_devices_env: ACME_VISIBLE_DEVICES
chips:
  - name: X1
    variant: Pod
    device_name: 'Acme X1 Pod'
    peaks: {fp32: 10.0, bf16: 100.0}
    source: made up for tests
  - name: X1
    variant: Card
    device_name: 'Acme X1( Card)?'
    memory_gib: [30, 34]
    peaks: {fp32: 8.0, bf16: 80.0}
    source: made up for tests
"""

CASE = """
name: toy
version: 1
title: Toy
description: Made up for tests.
licence: Apache-2.0
size: mini
train:
  unit: token
  units_per_sample_key: seq_length
  target: {metric: accuracy, direction: at_least, value: 0.9, why: made up for tests}
  mutable: [batch_size, precision, loader, optimizer.lr]
  settings:
    batch_size: 8
    seed: 3
    end: {max_steps: 10}
    optimizer: {name: sgd, lr: 1e-1}
    model: {seq_length: 16, dropout: 0.0, width: 4}
"""


FRAMEWORK = """
name: bare
title: No framework (ranks are started as they are)
module: json
distributions: [json]
processes: host
timing: window
"""

LAUNCH = """
from accelmark.spec.plugins.framework import Launch, RankPlace


def launch(place):
    variables = RankPlace(place.noderank, 0, place.nnodes, 1).variables()
    return Launch(place.rank_command, variables | {"BARE_SERVERS": " ".join(map(str, place.servers))})
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the vendor ``acme``, the case ``toy`` and the framework ``bare``, found as plug-ins."""
    root = tmp_path / "plugins"
    (root / "vendors" / "acme").mkdir(parents=True)
    (root / "vendors" / "acme" / "vendor.yaml").write_text(VENDOR)
    (root / "cases" / "toy").mkdir(parents=True)
    (root / "cases" / "toy" / "case.yaml").write_text(CASE)
    (root / "cases" / "toy" / "pytorch.py").write_text("")
    (root / "frameworks" / "bare").mkdir(parents=True)
    (root / "frameworks" / "bare" / "framework.yaml").write_text(FRAMEWORK)
    (root / "frameworks" / "bare" / "launch.py").write_text(LAUNCH)
    monkeypatch.setenv(PLUGINS_VARIABLE, str(root))
    return root


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that is to be made."""
    return tmp_path / "run"
