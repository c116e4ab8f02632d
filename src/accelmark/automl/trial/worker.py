"""A worker: holds the data, trains one trial at a time in one thread, and answers calls in others."""

from __future__ import annotations

import platform
import tarfile
import threading
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

from accelmark.automl import records
from accelmark.automl.config import DatasetConfig
from accelmark.automl.model.graph import Network


def packed_logs() -> bytes:
    """Return the logs of Ray's processes on this node as a compressed archive; runs as a task of Ray."""
    from ray._private import worker

    node: Any = worker._global_node
    with BytesIO() as content:
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            archive.add(node.get_logs_dir_path(), "logs")
        return content.getvalue()


class TrialWorker:
    """Trains trials and collects their reports for the controller."""

    def __init__(self, dataset: DatasetConfig, network: Network, devices: int, threads: int) -> None:
        from accelmark.automl.dataset import open_dataset

        # Loaded before the first trial's clock starts.
        from accelmark.automl.trial.training import RankContext, RankGroup, device_type, run_trial, warm_up

        data = open_dataset(dataset, network)
        self._execute: Callable[[records.TrialOrder, records.TrainedWeights, records.TrialListener], records.TrialEnded]
        sizes = {name: len(getattr(data, name)) for name in ("training", "validation", "held_out")}
        splits = records.Splits(**sizes, classes=network.classes)
        self._ready = records.WorkerReady(data.fingerprint, data.identity, splits, platform.node())
        if devices > 1:
            self._execute = RankGroup(dataset, network, devices=devices, threads=threads).run
        else:
            place = RankContext(device_type(), threads=threads or None)
            warm_up(place)
            self._execute = partial(run_trial, data, place)
        self._changed = threading.Condition()
        self._busy = False
        self._epochs: list[records.EpochReport] = []
        self._images = 0
        self._cancelled = threading.Event()

    def ready(self) -> records.WorkerReady:
        """Return the data that was opened."""
        return self._ready

    def run(self, order: records.TrialOrder, weights: records.TrainedWeights) -> records.TrialEnded:
        """Run one trial."""
        with self._changed:
            self._epochs, self._images, self._busy = [], 0, True
        self._cancelled.clear()
        try:
            return self._execute(order, weights, records.TrialListener(self._report, self._cancelled.is_set))
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def drain(self, wait_s: float) -> list[records.Progress]:
        """Return the images and epochs since the last call; waits up to ``wait_s`` for an epoch of a running trial."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._epochs) or not self._busy, timeout=wait_s)
            progress: list[records.Progress] = [self._images, *self._epochs]
            self._images, self._epochs = 0, []
            return progress

    def cancel(self) -> None:
        """Cut the running trial."""
        self._cancelled.set()

    def _report(self, progress: records.Progress) -> None:
        """Keep progress for the next ``drain``."""
        with self._changed:
            if isinstance(progress, int):
                self._images += progress
            else:
                self._epochs.append(progress)
                self._changed.notify_all()
