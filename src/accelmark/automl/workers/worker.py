"""A worker: holds the data, trains one trial at a time in one thread, and answers calls in others."""

from __future__ import annotations

import os
import threading

from accelmark.automl.config import DatasetConfig
from accelmark.automl.model.network import Network
from accelmark.automl.records import EpochReport
from accelmark.automl.workers.messages import TrainedWeights, TrialOrder


class TrialWorker:
    """Trains trials; messages are JSON, so that only plain data and arrays are pickled."""

    def __init__(self, dataset: str, network: str, devices: int, threads: int) -> None:
        from accelmark.automl.dataset import open_dataset
        from accelmark.automl.trial.ranks import make_executor  # loaded before the first trial's clock starts

        config, seed = DatasetConfig.model_validate_json(dataset), Network.model_validate_json(network)
        self._data = open_dataset(config, seed)
        self._classes = seed.classes
        self._executor = make_executor(self._data, config, seed, devices=devices, threads=threads)
        self._changed = threading.Condition()
        self._busy = False
        self._reports: list[str] = []
        self._images = 0
        self._cancelled = threading.Event()

    def report(self) -> str:
        """Return a ``WorkerReport``."""
        from accelmark.automl.workers.messages import WorkerReport

        data = self._data
        report = WorkerReport(
            pid=os.getpid(), fingerprint=data.fingerprint, identity=data.identity, splits=data.splits(self._classes)
        )
        return report.model_dump_json()

    def run(self, order: str, weights: TrainedWeights) -> tuple[str, TrainedWeights]:
        """Run one trial; return its ``TrialResult`` and the best epoch's weights."""
        with self._changed:
            self._reports, self._images, self._busy = [], 0, True
        self._cancelled.clear()
        try:
            result, trained = self._executor.run(TrialOrder.model_validate_json(order), weights, self)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        return result.model_dump_json(), trained

    def drain(self, wait_s: float) -> tuple[int, list[str]]:
        """Return the images processed so far and the ``EpochReport``s since the last call.

        Waits up to ``wait_s`` for a report while a trial runs.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._reports) or not self._busy, timeout=wait_s)
            reports, self._reports = self._reports, []
            return self._images, reports

    def cancel(self) -> None:
        """Cut the running trial."""
        self._cancelled.set()

    def progress(self, images: int) -> None:
        """Count further images."""
        self._images += images

    def epoch(self, report: EpochReport) -> None:
        """Keep a report for the next ``drain``."""
        with self._changed:
            self._reports.append(report.model_dump_json())
            self._changed.notify_all()

    def should_stop(self) -> bool:
        """Return whether the trial was cut."""
        return self._cancelled.is_set()
