"""Kinds of work: files of schema version 1 are upgraded when they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from accelmark.plan.plan import Plan
from accelmark.spec.job import InferJob, JobSpec, TrainJob

RECORDED = Path(__file__).with_name("recorded")
"""Files of runs made at commit 05d27fd, before work had a kind."""


def read_job(name: str) -> JobSpec:
    return JobSpec.model_validate_json((RECORDED / name).read_bytes())


def test_a_training_job_of_version_1_is_read_as_a_train_job() -> None:
    job = read_job("train_job_1.json")
    assert isinstance(job.work, TrainJob)
    assert (job.work.unit, job.work.settings.batch_size) == ("image", 128)
    assert (job.schema_version, job.collective_backend, job.framework) == (2, "gloo", "pytorch")


def test_an_inference_job_of_version_1_is_read_as_an_infer_job() -> None:
    job = read_job("infer_job_1.json")
    assert isinstance(job.work, InferJob)
    assert (job.work.metric, job.work.settings.compiler) == ("top1", "onnxruntime")


@pytest.mark.parametrize("kind", ["train", "infer"])
def test_a_plan_of_version_1_is_read(kind: str) -> None:
    plan = Plan.model_validate_json((RECORDED / f"{kind}_plan_1.json").read_bytes())
    assert [job.job.work.kind for job in plan.jobs] == [kind]


def test_an_unknown_kind_of_work_names_the_known_ones() -> None:
    values = read_job("train_job_1.json").model_dump(mode="json")
    values["work"]["kind"] = "dance"
    with pytest.raises(ValidationError, match="'train', 'infer'"):
        JobSpec.model_validate(values)


def test_each_round_of_training_has_its_own_seed_and_inference_has_none() -> None:
    train, infer = read_job("train_job_1.json").work, read_job("infer_job_1.json").work
    assert isinstance(train, TrainJob)
    assert train.for_round(3).settings.seed == train.settings.seed + 2
    assert infer.for_round(3) == infer
