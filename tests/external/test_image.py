"""The container image of an external trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from accelmark.run.sandboxes.image import recipe_of
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.job import ExternalJob, TrainJob
from accelmark.spec.plugins.trainer import TrainerSpec
from tests.run.fakes import make_plan

TRAINER = yaml.safe_load(Path(__file__).with_name("slowgrad.yaml").read_text())


@pytest.mark.parametrize(
    ("of_cluster", "of_trainer", "expected"),
    [(None, "slowgrad:1", "slowgrad:1"), ("site:2", "slowgrad:1", "site:2"), (None, None, "accelmark-cpu-pytorch")],
)
def test_the_image_is_the_clusters_else_the_trainers_else_that_of_its_framework(
    of_cluster: str | None, of_trainer: str | None, expected: str
) -> None:
    container = {"engine": "podman"} | ({"image": of_cluster} if of_cluster else {})
    plan = make_plan((), cluster=ClusterSpec.model_validate({"container": container}), vendor="cpu")
    job = plan.jobs[0].job
    assert isinstance(job.work, TrainJob)
    trainer = TrainerSpec.model_validate(TRAINER | {"image": of_trainer})
    work = ExternalJob(**job.work.model_dump(exclude={"kind", "is_checked", "killed"}), trainer=trainer)
    key = job.key.model_copy(update={"framework": "slowgrad"})
    recipe = recipe_of(plan, job.model_copy(update={"work": work, "key": key}))
    assert recipe is not None
    assert recipe.name.startswith(expected)
