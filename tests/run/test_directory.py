"""A run's directory: permissions of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.run.record.directory import RunDirectory
from accelmark.spec.cluster import ClusterSpec, ContainerSpec
from tests.run.fakes import make_plan


@pytest.mark.parametrize(
    ("cluster", "mode"),
    [
        (ClusterSpec(), 0o004),
        (ClusterSpec(environment={"HF_TOKEN": "open5ame"}), 0),
        (ClusterSpec(container=ContainerSpec(engine="podman", pip_source="https://bob:hunter2@host/simple")), 0),
    ],
)
def test_only_the_owner_can_read_a_plan_with_secrets(tmp_path: Path, cluster: ClusterSpec, mode: int) -> None:
    plan = make_plan().model_copy(update={"cluster": cluster})
    RunDirectory.create(tmp_path / "run", plan)
    assert (tmp_path / "run" / "plan.json").stat().st_mode & 0o004 == mode
