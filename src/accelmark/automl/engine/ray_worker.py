"""The worker process: it holds the data, trains one trial at a time, and answers while it does."""

from __future__ import annotations

import os
import threading
from typing import Any

from accelmark.automl.config import DatasetConfig
from accelmark.automl.graph import Network
from accelmark.automl.trial.order import Array, EpochReport, TrialOrder


class TrialWorker:
    """Runs as a Ray actor with several threads: one trains, others answer. Messages are JSON."""

    def __init__(self, dataset: str, network: str, devices: int, threads: int) -> None:
        from accelmark.automl.data import open_dataset
        from accelmark.automl.trial.replicas import make_executor  # imported before the first trial's clock runs

        asked, seed = DatasetConfig.model_validate_json(dataset), Network.model_validate_json(network)
        self._data = open_dataset(asked, seed)
        self._classes = seed.classes
        self._executor = make_executor(self._data, asked, seed, devices=devices, threads=threads)
        self._news = threading.Condition()
        self._busy = False
        self._reports: list[str] = []
        self._images = 0
        self._cancelled = threading.Event()

    def ready(self) -> tuple[int, str, str, tuple[int, int, int, int]]:
        """Return the process id, and of the data that this worker holds: fingerprint, identity, splits.

        Splits are the numbers of pictures to train on, to validate on and held out, and of classes.
        """
        data = self._data
        sizes = len(data.training), len(data.validation), len(data.held_out), self._classes
        return os.getpid(), data.fingerprint, data.identity, sizes

    def run(self, order: str, weights: dict[str, Array] | None) -> tuple[str, dict[str, Array] | None]:
        """Carry out one trial; return its result as JSON, and the best epoch's weights."""
        with self._news:
            self._reports, self._images, self._busy = [], 0, True
        self._cancelled.clear()
        given = TrialOrder.model_validate_json(order)
        try:
            result, trained = self._executor.run(given, weights, self)
        finally:
            with self._news:
                self._busy = False
                self._news.notify_all()
        return result.model_dump_json(), trained

    def drain(self, wait_s: float) -> tuple[int, list[str]]:
        """Return the images processed so far and the reports since the last call.

        Waits for a report at most ``wait_s``, and not at all when no trial runs.
        """
        with self._news:
            self._news.wait_for(lambda: bool(self._reports) or not self._busy, timeout=wait_s)
            reports, self._reports = self._reports, []
            return self._images, reports

    def cancel(self) -> None:
        """End the trial that runs, where it is."""
        self._cancelled.set()

    def progress(self, images: int) -> None:
        """Take note that so many images more were processed."""
        self._images += images

    def epoch(self, report: EpochReport) -> None:
        """Keep a report for the next call of ``drain``."""
        with self._news:
            self._reports.append(report.model_dump_json())
            self._news.notify_all()

    def should_stop(self) -> bool:
        """Tell whether the trial was cancelled."""
        return self._cancelled.is_set()


def as_actor(**options: Any) -> Any:
    """Return the worker as a Ray actor class with these options; several threads let it answer while it trains."""
    import ray

    return ray.remote(TrialWorker).options(max_concurrency=4, max_restarts=0, **options)
