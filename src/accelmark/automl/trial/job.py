"""A trial's order as a job of the training driver."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from accelmark.automl.trial.order import TrialOrder, digest
from accelmark.spec.errors import DataError
from accelmark.spec.job import FolderRef, JobSpec
from accelmark.spec.key import CaseKey
from accelmark.spec.settings import (
    EndSettings,
    EvaluateSettings,
    OptimizerSettings,
    ScheduleSettings,
    TrainSettings,
)
from accelmark.spec.work import TrainJob

_EVALUATION_BATCH: Final = 512


def trial_settings(order: TrialOrder, *, pictures: int, world_size: int, threads: int | None) -> TrainSettings:
    """Return the driver's settings for an order over ``pictures`` training pictures.

    The trial's batch is the global one, dealt out evenly; the learning rate falls linearly over all its epochs. Every
    epoch is validated. There is no bound in time: a trial that is cut must not be evaluated once more. Raises DataError
    for a batch larger than the split: trained would be another one than was asked for.
    """
    hyper, training = order.hyperparameters, order.training
    if hyper.batch_size > pictures:
        raise DataError(f"a batch of {hyper.batch_size} is larger than the training split of {pictures} pictures")
    return TrainSettings(
        batch_size=max(1, hyper.batch_size // world_size),
        eval_batch_size=_EVALUATION_BATCH,
        precision=training.precision,
        seed=order.seed,
        threads=threads,
        end=EndSettings(max_epochs=order.epochs),
        evaluate=EvaluateSettings(every_epochs=1),
        optimizer=OptimizerSettings(
            name="sgd", lr=hyper.learning_rate, momentum=training.momentum, weight_decay=training.weight_decay
        ),
        schedule=ScheduleSettings(name="linear", final_lr_ratio=training.final_learning_rate / hyper.learning_rate),
    )


def trial_work(settings: TrainSettings) -> TrainJob:
    """Return what a trial trains."""
    return TrainJob(unit="image", units_per_sample=1, target=None, reference_loss=None, settings=settings)


def trial_job(order: TrialOrder, work: TrainJob, *, device_type: str, world_size: int) -> JobSpec:
    """Return the job; the network stands where another job names a case's folder, its digest as the folder's."""
    device = torch.device(device_type)
    return JobSpec(
        key=CaseKey(model="trial", framework="pytorch", hardware=device_type, nproc=world_size),
        round=1,
        case=FolderRef(
            name=order.network.name,
            path=Path(__file__).parent,
            package="accelmark.automl.trial",
            sha256=digest(order.network),
        ),
        case_version=1,
        vendor=device_type,
        device_type=device_type,
        framework_module=None,
        collective_backend=dist.get_default_backend_for_device(device),
        data_dirs={},
        checkpoint_dir=Path("checkpoints"),
        work=work,
    )
