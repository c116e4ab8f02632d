"""Run trials in this process: the training driver trains, then the held-out split is evaluated."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
import torch.distributed as dist

from accelmark.automl.config import TrainingConfig
from accelmark.automl.dataset import Dataset
from accelmark.automl.messages import TrainedWeights, TrialEnded, TrialListener, TrialOrder, TrialResult
from accelmark.automl.model.seeds import small
from accelmark.automl.records import EpochReport, Hyperparameters, TrialStatus
from accelmark.automl.search.schedule import stops_early
from accelmark.automl.trial.module import TrialCase, TrialInput, load_weights, to_weights
from accelmark.datasets.images import LabeledArrays
from accelmark.frameworks.pytorch.backend import InProcess, PyTorchBackend
from accelmark.spec.errors import DataError
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.log.events import EndReason, Evaluation, Event, Finished, Started, StepWindow
from accelmark.spec.model import Spec
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import (
    EndSettings,
    EvaluateSettings,
    OptimizerSettings,
    ScheduleSettings,
    TrainSettings,
)
from accelmark.train.loop.ends import End
from accelmark.train.loop.rank import run_training
from accelmark.train.loop.window import RunTotals

_EVALUATION_BATCH: Final = 512
_COMPUTED_IN: Final = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_STATUS: Final[Mapping[EndReason, TrialStatus]] = {
    "max_epochs": "finished",
    "early_stop": "finished",
    "cancelled": "cut",
    "nonfinite_loss": "diverged",
    "out_of_memory": "out-of-memory",
}
_USEFUL: Final = ("finished", "cut")


@final
@dataclass(frozen=True, slots=True)
class RankContext:
    """This process's rank for all its trials.

    ``control``: the gloo group of the ranks; None for a single rank. ``threads``: None: the rank's share of the cores.
    """

    device_type: str
    ranks: RankPlace = field(default_factory=RankPlace)
    control: dist.ProcessGroup | None = None
    threads: int | None = None


def device_type() -> str:
    """Return the type of this machine's accelerators; ``cpu`` where there are none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def trial_settings(order: TrialOrder, *, images: int, world_size: int, threads: int | None) -> TrainSettings:
    """Return the driver's settings for an order over ``images`` training images.

    The trial's batch is the global one, divided evenly among the ranks. There is no limit in time: the driver would
    evaluate a trial that reaches one once more. Raises DataError where the batch is larger than the training split.
    """
    hyper, training = order.hyperparameters, order.training
    if hyper.batch_size > images:
        raise DataError(f"a batch of {hyper.batch_size} is larger than the training split of {images} images")
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


def _job(order: TrialOrder, work: TrainJob, place: RankContext) -> JobSpec:
    """Return the driver's job; network and digest replace the case's folder and its hash."""
    network, kind = order.network, place.device_type
    folder = Path(__file__).parent
    return JobSpec(
        key=CaseKey(model="trial", framework="pytorch", hardware=kind, nproc=place.ranks.world_size),
        round=1,
        case=FolderRef(name=network.name, path=folder, package="accelmark.automl.trial", sha256=network.digest),
        case_version=1,
        vendor=kind,
        device_type=kind,
        framework_module=None,
        collective_backend=dist.get_default_backend_for_device(torch.device(kind)),
        data_dirs={},
        checkpoint_dir=Path("checkpoints"),
        work=work,
    )


def run_trial(
    data: Dataset, place: RankContext, order: TrialOrder, weights: TrainedWeights, listener: TrialListener
) -> TrialEnded:
    """Run a trial as one rank; a trial that fails is reported in its result."""
    world = place.ranks.world_size
    settings = trial_settings(order, images=len(data.training), world_size=world, threads=place.threads)
    work = TrainJob(unit="image", units_per_sample=1, target=None, reference_loss=None, settings=settings)
    return _Trial(TrialInput(data, order, weights, listener), place, work).run()


@final
@dataclass
class _Trial:
    """One trial: receives the driver's events, reports epochs, and requests its end.

    Everything that it decides on, except a stop that is requested, is equal on all ranks.
    """

    given: TrialInput
    place: RankContext
    work: TrainJob
    began: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)
    """Start of the epoch."""
    interruptible: bool = False
    backend: PyTorchBackend | None = None
    case: TrialCase | None = None
    started: Started | None = None
    best: TrainedWeights = None
    best_accuracy: float = -1.0
    epoch: int = 1
    images: int = 0
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    data_wait_s: float = 0.0
    validation_losses: list[float] = field(default_factory=list)

    def run(self) -> TrialEnded:
        totals = RunTotals(process_start=self.began, job=self.work)
        training = run_training(self.work, self._open, self, totals, self, Path("checkpoints"), self.evaluated)
        end, backend = training.end, training.backend
        finished = totals.finished(end)
        if finished.global_steps > self.steps:  # a part of an epoch
            self._report(finished, in_step=training.in_step)
        status = _STATUS.get(end.reason, "crashed")
        outcome: dict[str, Any] = {"status": status, "reason": end.message or end.reason}
        if status in _USEFUL:
            outcome |= {"reason": ""} | self._held_out()
        if backend is not None:
            backend.close(together=training.in_step)
        return TrialEnded(self._result(outcome, finished), self.best if outcome["status"] in _USEFUL else None)

    def _open(self) -> PyTorchBackend:
        job = _job(self.given.order, self.work, self.place)
        in_process = InProcess(self._make_case, self.place.control)
        self.backend = PyTorchBackend(job, self.work, self.place.ranks, self, in_process)
        return self.backend

    def _make_case(self, *args: Any) -> TrialCase:
        self.case = TrialCase(self.given, *args)
        return self.case

    @property
    def requested(self) -> str | None:
        """The reason to stop; polled by the driver after each step."""
        if self.given.listener.should_stop():
            return "the search"
        limit_s = self.given.order.limit_s
        is_over = limit_s is not None and time.monotonic() >= self.began + limit_s
        return "the end of its time" if is_over else None

    def event(self, event: Event, value: Spec | Mapping[str, Any] | None = None, *, at_ns: int | None = None) -> None:
        """Receive an event of the driver."""
        if event == Event.TRAIN_START:
            self.since = time.monotonic()
        elif isinstance(value, Started):
            self.started = value
        elif isinstance(value, StepWindow):
            self.losses += [math.nan if loss is None else loss for loss in value.losses]
            self.data_wait_s += sum(value.data_wait_ms) / 1e3

    def evaluated(self, evaluation: Evaluation) -> End | None:
        """Report the epoch that this evaluation closes, keep its weights if they are the best, and decide on an end."""
        self._report(evaluation)
        accuracy, loss = evaluation.metrics["accuracy"], evaluation.metrics["loss"]
        if loss is None or not math.isfinite(loss):
            return End("nonfinite_loss", f"the validation loss of epoch {self.epoch - 1} is {loss}")
        module = self.case.module if self.case is not None else None
        if module is not None and accuracy is not None and accuracy > self.best_accuracy:
            self.best_accuracy, self.best = accuracy, to_weights(module)
        self.validation_losses.append(loss)
        order = self.given.order
        ends = order.early_stop and stops_early(order.round, self.validation_losses)
        self.since = time.monotonic()
        return End("early_stop") if ends else None

    def _report(self, event: Evaluation | Finished, *, in_step: bool = True) -> None:
        """Report an epoch that an evaluation closes, or the part of one that was trained before the end."""
        now = time.monotonic()
        evaluation = event if isinstance(event, Evaluation) else None
        metrics: Mapping[str, float | None] = evaluation.metrics if evaluation else {}
        evaluating_s = evaluation.duration_s if evaluation else 0.0
        train_loss = sum(self.losses) / len(self.losses) if self.losses else math.nan
        if in_step and self.backend is not None:
            (train_loss,) = self.backend.mean([train_loss])
        report = EpochReport(
            epoch=self.epoch,
            begun_s=self.since - self.began,
            ended_s=now - self.began,
            trained_images=event.num_trained_samples - self.images,
            evaluated_images=round(metrics.get("count") or 0),
            steps=event.global_steps - self.steps,
            training_s=max(0.0, now - self.since - evaluating_s),
            data_wait_s=min(self.data_wait_s, max(0.0, now - self.since - evaluating_s)),
            evaluating_s=evaluating_s,
            train_loss=_finite(train_loss),
            validation_loss=_finite(metrics.get("loss")),
            validation_accuracy=metrics.get("accuracy"),
            complete=evaluation is not None,
        )
        self.images, self.steps = event.num_trained_samples, event.global_steps
        self.epoch, self.losses, self.data_wait_s, self.since = self.epoch + 1, [], 0.0, now
        self.given.listener.report(report)

    def _held_out(self) -> dict[str, Any]:
        """Evaluate the best epoch's weights on all ranks; return the fields of the result that this determines."""
        case, backend, began = self.case, self.backend, time.monotonic()
        if case is None or case.module is None or backend is None or self.best is None:
            return {}
        outcome: dict[str, Any] = {}
        try:
            load_weights(case.module, self.best)
            outcome["held_out_accuracy"] = backend.evaluate_on(case.held_out_batches())["accuracy"]
        except Exception as error:  # noqa: BLE001 - any failure is recorded; the worker goes on
            reason, message = backend.explain(error)
            outcome["status"] = "out-of-memory" if reason == "out_of_memory" else "crashed"
            outcome["reason"] = f"evaluating the held-out split: {message}"
        return outcome | {"held_out_s": time.monotonic() - began}

    def _result(self, outcome: Mapping[str, Any], finished: Finished) -> TrialResult:
        case, started = self.case, self.started
        facts: dict[str, Any] = {}
        if case is not None:
            executed = case.module.network.digest if case.module is not None else None
            facts |= {"weights": case.started_from, "executed": executed}
        if started is not None:
            # Autocast's type, else the parameters', where fp32 may be TF32; the rules have no width for other types.
            kind = started.compute_type or "unknown"
            precision = started.precision if kind == "float32" else _COMPUTED_IN.get(kind, kind)
            facts |= {"precision": precision, "device": started.device_name}
        return TrialResult(
            **outcome,
            **facts,
            trained_images=finished.num_trained_samples,
            flops_per_image=finished.flops_per_sample,
            computing_s=finished.pure_training_computing_time,
            peak_memory_mib=finished.peak_device_memory_mib,
            host=platform.node(),
            ranks=self.place.ranks.world_size,
            seconds=time.monotonic() - self.began,
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def warm_up(place: RankContext) -> None:
    """Train a tiny network, so that one-time initialization is not part of a trial."""
    size, classes = 8, 2
    number = 4 * place.ranks.world_size
    images = LabeledArrays(np.zeros((number, 1, size, size), np.uint8), np.arange(number) % classes)
    dataset = Dataset("warm-up", images, images, images, (0.0,), (1.0,), "", "warm-up")
    order = TrialOrder(
        round=1,
        network=small((1, size, size), classes, filters=(2,), name="warm-up"),
        hyperparameters=Hyperparameters(batch_size=number, learning_rate=0.1),
        training=TrainingConfig(precision="bf16"),
        epochs=1,
        early_stop=False,
        seed=0,
    )
    run_trial(dataset, place, order, None, TrialListener())
