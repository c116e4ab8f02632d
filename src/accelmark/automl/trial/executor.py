"""Run trials in this process: the training driver trains, then the held-out split is evaluated."""

from __future__ import annotations

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
from accelmark.automl.model.seeds import small
from accelmark.automl.records import EpochReport, Hyperparameters
from accelmark.automl.trial.case import TrialCase
from accelmark.automl.trial.module import load_weights
from accelmark.automl.trial.reports import TrialReports
from accelmark.automl.workers.messages import TrainedWeights, TrialEnd, TrialListener, TrialOrder, TrialResult
from accelmark.datasets.images import ArrayImages
from accelmark.frameworks.pytorch.backend import InProcess, PyTorchBackend
from accelmark.spec.errors import DataError
from accelmark.spec.events import EndReason, Event, Started
from accelmark.spec.job import FolderRef, JobSpec
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings import EndSettings, EvaluateSettings, OptimizerSettings, ScheduleSettings, TrainSettings
from accelmark.spec.work import TrainJob
from accelmark.train.loop.account import Account
from accelmark.train.loop.rank import record_peak_memory, run_training

_EVALUATION_BATCH: Final = 512
_COMPUTED_IN: Final = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_STATUS: Final[Mapping[EndReason, TrialEnd]] = {
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
    evaluate a trial that reaches one once more.

    Raises:
        DataError: the batch is larger than the training split.
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
    here = Path(__file__).parent
    return JobSpec(
        key=CaseKey(model="trial", framework="pytorch", hardware=kind, nproc=place.ranks.world_size),
        round=1,
        case=FolderRef(name=network.name, path=here, package="accelmark.automl.trial", sha256=network.digest),
        case_version=1,
        vendor=kind,
        device_type=kind,
        framework_module=None,
        collective_backend=dist.get_default_backend_for_device(torch.device(kind)),
        data_dirs={},
        checkpoint_dir=Path("checkpoints"),
        work=work,
    )


@final
class _TrialStop:
    """Requests the end of a trial when its listener does or its time is up; polled by the driver after each step."""

    interruptible = False

    def __init__(self, listener: TrialListener, deadline: float | None) -> None:
        self._listener: Final = listener
        self._deadline: Final = deadline

    @property
    def requested(self) -> str | None:
        """The reason to stop."""
        if self._listener.should_stop():
            return "the search"
        return "the end of its time" if self._deadline is not None and time.monotonic() >= self._deadline else None


class TorchExecutor:
    """Trains trials one after another as one rank."""

    def __init__(self, dataset: Dataset, place: RankContext) -> None:
        self._data: Final = dataset
        self._place: Final = place

    def run(
        self, order: TrialOrder, weights: TrainedWeights, listener: TrialListener
    ) -> tuple[TrialResult, TrainedWeights]:
        """Run a trial; a trial that fails is reported in its result."""
        return _Trial(order, weights, listener, self._data, self._place).run()


class _Trial:
    def __init__(
        self, order: TrialOrder, weights: TrainedWeights, listener: TrialListener, dataset: Dataset, place: RankContext
    ) -> None:
        self._began: Final = time.monotonic()
        self._order: Final = order
        self._listener: Final = listener
        self._place: Final = place
        self._data: Final = dataset
        self._weights: Final = weights
        self._reports: Final = TrialReports(order, listener, began=self._began)
        world = place.ranks.world_size
        settings = trial_settings(order, images=len(dataset.training), world_size=world, threads=place.threads)
        self._work: Final = TrainJob(
            unit="image", units_per_sample=1, target=None, reference_loss=None, settings=settings
        )
        self._backend: PyTorchBackend | None = None

    def run(self) -> tuple[TrialResult, TrainedWeights]:
        reports = self._reports
        account = Account(process_start=self._began, job=self._work)
        deadline = None if self._order.limit_s is None else self._began + self._order.limit_s
        stop = _TrialStop(self._listener, deadline)
        carried = run_training(self._work, self._open, reports, account, stop, reports)
        record_peak_memory(account, carried.backend)
        reports.event(Event.FINISHED, account.finished(carried.end))
        reports.close(in_step=carried.in_step)
        status = _STATUS.get(carried.end.reason, "crashed")
        outcome: dict[str, Any] = {"status": status, "reason": carried.end.message or carried.end.reason}
        if status in _USEFUL:
            outcome |= {"reason": ""} | self._held_out()
        if carried.backend is not None:
            carried.backend.close(together=carried.in_step)
        return self._result(outcome), reports.best_weights if outcome["status"] in _USEFUL else None

    def _open(self) -> PyTorchBackend:
        in_process = InProcess(self._make_case, self._place.control)
        job = _job(self._order, self._work, self._place)
        self._backend = PyTorchBackend(job, self._work, self._place.ranks, self._reports, in_process)
        self._reports.mean = self._backend.mean
        return self._backend

    def _make_case(self, *args: Any) -> TrialCase:
        self._reports.case = TrialCase(
            *args, order=self._order, dataset=self._data, weights=self._weights, listener=self._listener
        )
        return self._reports.case

    def _held_out(self) -> dict[str, Any]:
        """Evaluate the best epoch's weights on all ranks; return the fields of the result that this determines."""
        case, backend, best = self._reports.case, self._backend, self._reports.best_weights
        began = time.monotonic()
        if case is None or backend is None or best is None:
            return {}
        outcome: dict[str, Any] = {}
        try:
            load_weights(case.graph, best)
            outcome["held_out_accuracy"] = backend.evaluate_on(case.held_out_batches())["accuracy"]
        except Exception as error:  # noqa: BLE001 - any failure is recorded; the worker goes on
            reason, message = backend.explain(error)
            outcome["status"] = "out-of-memory" if reason == "out_of_memory" else "crashed"
            outcome["reason"] = f"evaluating the held-out split: {message}"
        return outcome | {"held_out_s": time.monotonic() - began}

    def _result(self, outcome: Mapping[str, Any]) -> TrialResult:
        case, started, finished = self._reports.case, self._reports.started, self._reports.finished
        facts: dict[str, Any] = {}
        if case is not None:
            facts["weights"] = case.started_from
            facts["executed"] = case.graph.network.digest if case.module is not None else None
        if started is not None:
            facts |= {"precision": _used_precision(started), "device": started.device_name}
        if finished is not None:
            facts["trained_images"] = finished.num_trained_samples
            facts["flops_per_image"] = finished.flops_per_sample
            facts["computing_s"] = finished.pure_training_computing_time
            facts["peak_memory_mib"] = finished.peak_device_memory_mib
        ranks, seconds = self._place.ranks.world_size, time.monotonic() - self._began
        return TrialResult(**outcome, **facts, host=platform.node(), ranks=ranks, seconds=seconds)


def _used_precision(started: Started) -> str:
    """Return the precision of the matrix work: autocast's type, else the parameters', where fp32 may be TF32.

    Other types keep the framework's name, for which the rules have no number of bits.
    """
    kind = started.compute_type or "unknown"
    return started.precision if kind == "float32" else _COMPUTED_IN.get(kind, kind)


class _NoListener:
    def progress(self, images: int) -> None:
        pass

    def epoch(self, report: EpochReport) -> None:
        pass

    def should_stop(self) -> bool:
        return False


def warm_up(place: RankContext) -> None:
    """Train a tiny network, so that one-time initialization is not part of a trial."""
    size, classes = 8, 2
    number = 4 * place.ranks.world_size
    images = ArrayImages(np.zeros((number, 1, size, size), np.uint8), np.arange(number) % classes)
    dataset = Dataset("warm-up", images, images, images, (0.0,), (1.0,), "", "warm-up")
    order = TrialOrder(
        round=1,
        network=small((1, size, size), classes, filters=(2,), name="warm-up"),
        parent_network=None,
        morphs=(),
        hyperparameters=Hyperparameters(batch_size=number, learning_rate=0.1),
        training=TrainingConfig(precision="bf16"),
        epochs=1,
        early_stop=False,
        seed=0,
        limit_s=None,
    )
    TorchExecutor(dataset, place).run(order, None, _NoListener())
