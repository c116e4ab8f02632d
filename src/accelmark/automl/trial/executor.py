"""Carry out a trial order in this process: the training driver trains it, then the held-out split is evaluated."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import numpy as np
import torch
import torch.distributed as dist

from accelmark.automl.config import TrainingConfig
from accelmark.automl.data import ArrayPictures, Dataset
from accelmark.automl.graph import small
from accelmark.automl.graph.module import Array, load_weights
from accelmark.automl.records import Hyperparameters
from accelmark.automl.trial.case import TrialCase
from accelmark.automl.trial.job import trial_job, trial_settings, trial_work
from accelmark.automl.trial.order import EpochReport, Listener, TrialEnd, TrialOrder, TrialResult, digest
from accelmark.automl.trial.reports import TrialReports
from accelmark.frameworks.pytorch.backend import PyTorchBackend
from accelmark.frameworks.pytorch.case import Place
from accelmark.frameworks.pytorch.in_process import InProcess
from accelmark.spec.events import EndReason, Event, Started
from accelmark.spec.framework import RankPlace
from accelmark.spec.settings import TrainSettings
from accelmark.train.loop.account import Account
from accelmark.train.loop.rank import record_peak_memory, run_training

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
class Seat:
    """This process's place on its host: one rank of a trial, for as many trials as come.

    ``control`` is the gloo group in which the ranks have met; None for a rank alone. ``threads`` None: its share of
    the cores.
    """

    device_type: str
    ranks: RankPlace = field(default_factory=RankPlace)
    control: dist.ProcessGroup | None = None
    threads: int | None = None


def device_type() -> str:
    """Return the type of this machine's accelerators, or ``cpu`` where there are none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


@final
class _TrialStop:
    """Ends a trial when its listener wants it or its time is up; the driver asks after each step."""

    def __init__(self, listener: Listener, deadline: float | None) -> None:
        self.interruptible = False
        self._listener: Final = listener
        self._deadline: Final = deadline

    @property
    def requested(self) -> str | None:
        """Who asked."""
        if self._listener.should_stop():
            return "the search"
        return "the end of its time" if self._deadline is not None and time.monotonic() >= self._deadline else None


class TorchExecutor:
    """Trains trials with the driver's PyTorch backend, one after another, as one rank."""

    def __init__(self, dataset: Dataset, seat: Seat) -> None:
        self._data: Final = dataset
        self._seat: Final = seat

    def run(
        self, order: TrialOrder, weights: dict[str, Array] | None, listener: Listener
    ) -> tuple[TrialResult, dict[str, Array] | None]:
        """Carry out an order; a trial that fails says so in its result."""
        return _Trial(order, weights, listener, self._data, self._seat).carried_out()


@final
@dataclass(frozen=True, slots=True)
class _HeldOut:
    accuracy: float | None
    duration_s: float
    reason: str
    failed: TrialEnd | None = None


class _Trial:
    def __init__(
        self,
        order: TrialOrder,
        weights: dict[str, Array] | None,
        listener: Listener,
        dataset: Dataset,
        seat: Seat,
    ) -> None:
        self._began: Final = time.monotonic()
        self._order: Final = order
        self._weights: Final = weights
        self._listener: Final = listener
        self._data: Final = dataset
        self._seat: Final = seat
        self._reports: Final = TrialReports(order, listener, began=self._began)
        world = seat.ranks.world_size
        settings = trial_settings(order, pictures=len(dataset.training), world_size=world, threads=seat.threads)
        self._work: Final = trial_work(settings)
        self._job: Final = trial_job(order, self._work, device_type=seat.device_type, world_size=world)
        self._backend: PyTorchBackend | None = None

    def carried_out(self) -> tuple[TrialResult, dict[str, Array] | None]:
        reports = self._reports
        account = Account(process_start=self._began, job=self._work)
        deadline = None if self._order.limit_s is None else self._began + self._order.limit_s
        stop = _TrialStop(self._listener, deadline)
        carried = run_training(self._work, self._open, reports, account, stop, reports)
        record_peak_memory(account, carried.backend)
        reports.event(Event.FINISHED, account.finished(carried.end))
        reports.close(in_step=carried.in_step)
        status = _STATUS.get(carried.end.reason, "crashed")
        held_out = _HeldOut(None, 0.0, "" if status in _USEFUL else carried.end.message or carried.end.reason)
        if status in _USEFUL:
            held_out = self._held_out()
            status = held_out.failed or status
        if carried.backend is not None:
            carried.backend.close(together=carried.in_step)
        return self._result(status, held_out), reports.best_weights if status in _USEFUL else None

    def _open(self) -> PyTorchBackend:
        in_process = InProcess(self._make_case, self._seat.control)
        self._backend = PyTorchBackend(self._job, self._work, self._seat.ranks, self._reports, in_process)
        self._reports.mean = self._backend.mean
        return self._backend

    def _make_case(self, settings: TrainSettings, data_dirs: Mapping[str, Path], place: Place) -> TrialCase:
        self._reports.case = case = TrialCase(
            settings,
            data_dirs,
            place,
            order=self._order,
            dataset=self._data,
            weights=self._weights,
            listener=self._listener,
        )
        return case

    def _held_out(self) -> _HeldOut:
        """Evaluate the best epoch's weights, on all ranks together, after the driver is done."""
        case, backend, best = self._reports.case, self._backend, self._reports.best_weights
        began = time.monotonic()
        if case is None or backend is None or best is None:
            return _HeldOut(None, 0.0, "")
        try:
            load_weights(case.graph, best)
            accuracy = backend.evaluate_on(case.held_out_batches())["accuracy"]
        except Exception as error:  # noqa: BLE001 - whatever it dies of is recorded; the worker lives on
            reason, words = backend.explain(error)
            failed: TrialEnd = "out-of-memory" if reason == "out_of_memory" else "crashed"
            return _HeldOut(None, time.monotonic() - began, f"evaluating the held-out split: {words}", failed)
        return _HeldOut(accuracy, time.monotonic() - began, "")

    def _result(self, status: TrialEnd, held_out: _HeldOut) -> TrialResult:
        case, started, finished = self._reports.case, self._reports.started, self._reports.finished
        return TrialResult(
            status=status,
            reason=held_out.reason,
            executed=digest(case.graph.network) if case is not None and case.module is not None else None,
            weights=case.started_from if case is not None else "from-scratch",
            held_out_accuracy=held_out.accuracy,
            held_out_s=held_out.duration_s,
            seconds=time.monotonic() - self._began,
            precision=used_precision(started) if started is not None else None,
            device=started.device_name if started is not None else None,
            host=platform.node(),
            ranks=self._seat.ranks.world_size,
            trained_images=finished.num_trained_samples if finished is not None else None,
            flops_per_image=finished.flops_per_sample if finished is not None else None,
            computing_s=finished.pure_training_computing_time if finished is not None else None,
            peak_memory_mib=finished.peak_device_memory_mib if finished is not None else None,
        )


def used_precision(started: Started) -> str:
    """Return what the matrix work was computed in, as the driver found it when all was built.

    Under autocast that is autocast's type; else the parameters', where fp32 may be computed in TF32. A mixture bears
    the framework's own names, whose bits no rule knows.
    """
    kind = started.compute_type or "unknown"
    return started.precision if kind == "float32" else _COMPUTED_IN.get(kind, kind)


class _Unheard:
    def progress(self, images: int) -> None:
        pass

    def epoch(self, report: EpochReport) -> None:
        pass

    def should_stop(self) -> bool:
        return False


def warm_up(seat: Seat) -> None:
    """Train a toy through the driver, so that no trial's time is spent on what a first training loads and opens."""
    size, classes = 8, 2
    number = 4 * seat.ranks.world_size
    pictures = ArrayPictures(np.zeros((number, 1, size, size), np.uint8), np.arange(number) % classes)
    dataset = Dataset("warm-up", pictures, pictures, pictures, (0.0,), (1.0,), "", "warm-up")
    order = TrialOrder(
        trial=0,
        individual=0,
        attempt=1,
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
    TorchExecutor(dataset, seat).run(order, None, _Unheard())
