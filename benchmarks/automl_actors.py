"""Run the real controller with real Ray actors that only report: how many workers this machine carries.

    python -m benchmarks.automl_actors [--workers 64,128,256] [--epoch 20] [--trials-each 2]

Every worker is a Ray actor with the methods of ``TrialWorker``; its trial sleeps three epochs of ``--epoch`` seconds, a
quarter more or less, and reports. Ray is told to have as many cores as workers. The script stops at the first size that
fails.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from accelmark.automl.cluster import WorkerPool
from accelmark.automl.config import AutomlConfig, ScheduleConfig
from accelmark.automl.controller import SearchController
from accelmark.automl.journal import Proposed, SearchDirectory, read_journal
from accelmark.automl.model.seeds import resolve_network
from accelmark.automl.records import (
    EpochReport,
    Splits,
    TrainedWeights,
    TrialEnded,
    TrialListener,
    TrialOrder,
    TrialResult,
    WorkerReady,
)
from accelmark.automl.trial.worker import TrialWorker
from benchmarks.automl_figures import stamp, write_figures

EPOCHS = 3
_SPLITS = Splits(training=54_000, validation=6_000, held_out=10_000, classes=10)


class Reporter(TrialWorker):
    """A worker whose trial sleeps and reports."""

    def __init__(self, epoch_s: float) -> None:
        self._epoch_s = epoch_s
        self._ready = WorkerReady("none", "none", _SPLITS)
        self._execute = self._sleep
        self._changed = threading.Condition()
        self._busy = False
        self._epochs, self._images = [], 0
        self._cancelled = threading.Event()

    def _sleep(self, order: TrialOrder, weights: TrainedWeights, listener: TrialListener) -> TrialEnded:
        generator, ended_s = np.random.default_rng(order.seed), 0.0
        for epoch in range(1, EPOCHS + 1):
            length_s = self._epoch_s * float(generator.uniform(0.75, 1.25))
            time.sleep(length_s)
            begun_s, ended_s = ended_s, ended_s + length_s
            listener.report(
                EpochReport(
                    epoch=epoch, begun_s=begun_s, ended_s=ended_s, trained_images=_SPLITS.training,
                    evaluated_images=_SPLITS.validation, steps=120, training_s=0.9 * length_s,
                    evaluating_s=0.1 * length_s, train_loss=1.0, validation_loss=1.0,
                    validation_accuracy=float(generator.uniform(0.5, 0.8)), complete=True,
                )
            )  # fmt: skip
        executed = order.network.digest
        return TrialEnded(TrialResult(status="finished", executed=executed, held_out_accuracy=0.7), None)


def measure(workers: int, epoch_s: float, trials_each: int) -> dict[str, Any]:
    """Return the figures of one search; raises what Ray or the pool raises where so many workers do not start."""
    import ray

    config = AutomlConfig(
        network="small28",
        schedule=ScheduleConfig(
            concurrency=workers, max_trials=workers * trials_each, round_epochs=(EPOCHS,), tuning_round=None
        ),
    )
    with tempfile.TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True) as folder:
        began = time.monotonic()
        ray.init(num_cpus=workers, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        try:
            actor = ray.remote(Reporter).options(max_concurrency=4, num_cpus=1)
            kill = partial(ray.kill, no_restart=True)
            with closing(WorkerPool(workers, partial(actor.remote, epoch_s), kill)) as pool:
                ready_s = time.monotonic() - began
                run = SearchDirectory.create(Path(folder) / "runs", config, resolve_network(config.network))
                used_s, began = time.process_time(), time.monotonic()
                SearchController(run, config, pool).run()
                lasted_s, used_s = time.monotonic() - began, time.process_time() - used_s
                memory = sum(one.memory_full_info().pss for one in psutil.Process().children(recursive=True))
            state = run.state()
            proposals = [event.searcher for event in read_journal(run.path) if isinstance(event, Proposed)]
        finally:
            ray.shutdown()
    finished = [record for record in state.trials.values() if record.status == "finished"]
    busy_s = sum(totals.training_s + totals.evaluating_s for totals in state.totals.values())
    return {
        "workers": workers,
        "ready_s": ready_s,
        "search_s": lasted_s,
        "trials": len(finished),
        "epochs": sum(totals.epochs for totals in state.totals.values()),
        "of_ideal": busy_s / (workers * lasted_s),
        "hurried_share": proposals.count("random (immediate)") / len(proposals),
        "coordinator_cores": used_s / lasted_s,
        "coordinator_mib": psutil.Process().memory_info().rss / 2**20,
        "ray_gib": memory / 2**30,
    }


def main() -> None:
    """Measure every number of workers until one fails, and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="64,128,256")
    parser.add_argument("--epoch", type=float, default=20.0, help="seconds of an epoch")
    parser.add_argument("--trials-each", type=int, default=2, help="trials for each worker")
    given = parser.parse_args()
    rows, failed = [], None
    for workers in (int(word) for word in given.workers.split(",")):
        try:
            rows.append(measure(workers, given.epoch, given.trials_each))
        except Exception as error:  # noqa: BLE001 - whatever Ray raises where the machine carries no more
            failed = f"{workers} workers failed: {type(error).__name__}: {error}"
            break
        print(rows[-1], flush=True)
    table = [
        f"Ray actors that report and do nothing else; {EPOCHS} epochs of {given.epoch:g} s (a quarter more or less)"
        f" a trial, {given.trials_each} trials a worker, method `bayesian`. Ideal: every worker always in an epoch.",
        "",
        "| Workers | All ready after | Trials | Of ideal | Hurried proposals | Coordinator | Actors and Ray |",
        "|---:|---:|---:|---:|---:|---|---:|",
        *(
            f"| {one['workers']} | {one['ready_s']:.0f} s | {one['trials']} | {one['of_ideal']:.1%}"
            f" | {one['hurried_share']:.1%} | {one['coordinator_cores']:.2f} cores, {one['coordinator_mib']:.0f} MiB"
            f" | {one['ray_gib']:.1f} GiB |"
            for one in rows
        ),
        *(["", failed] if failed else []),
    ]
    write_figures("automl_actors", {**stamp(), "sizes": rows, "failed": failed}, table)


if __name__ == "__main__":
    main()
