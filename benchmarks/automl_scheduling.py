"""Simulate a search on 1 to 4,096 workers with the real scheduler: idle share, and the coordinator's cost.

    python -m benchmarks.automl_scheduling [--run RUN_DIRECTORY] [--workers 1,16,512]

Epoch times are drawn with replacement from those of a measured search and multiplied by ``--stretch`` (an epoch of a
large data set takes minutes, not a second). The coordinator's costs are measured here: proposals in a search of 40,000
networks derived from ResNet-50, and the real controller, which journals trials of workers that need no time. A worker
that would have to wait is given a random morph, as by the controller. Only the clock is simulated: ``Scheduler`` and
the size of batches are the code of real searches.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from accelmark.automl.config import AutomlConfig, ScheduleConfig, SearchConfig
from accelmark.automl.controller import LARGEST_BATCH, SearchController, batch_size
from accelmark.automl.journal import STATUS_FILE, SearchDirectory
from accelmark.automl.model.seeds import resnet50
from accelmark.automl.records import (
    EpochReport,
    Individual,
    Message,
    Splits,
    TrialEnded,
    TrialOrder,
    TrialResult,
    WorkerReady,
)
from accelmark.automl.scoring import summarise
from accelmark.automl.search.schedule import Scheduler
from accelmark.automl.search.searchers import BayesianSearch, Population, Searcher
from accelmark.results.store.files import write_atomic
from benchmarks.automl_figures import RESULTS, stamp, write_figures

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Measured:
    """Measured times in seconds: epochs, and the gap between trials on a worker."""

    epoch_s: tuple[float, ...]
    gap_s: float
    held_out_s: float


@dataclass(frozen=True)
class Proposing:
    """Processor time of proposals in seconds: each one in a largest batch, one alone, a random morph."""

    batched_s: float
    alone_s: float
    random_s: float

    def batch_s(self, number: int) -> float:
        """Return the time of a batch, linear in its size."""
        return self.alone_s + (number - 1) * (LARGEST_BATCH * self.batched_s - self.alone_s) / (LARGEST_BATCH - 1)


@dataclass
class Outcome:
    """Result of one simulated search; times are in worker seconds."""

    workers: int
    available_s: float = 0.0
    busy_s: float = 0.0
    hurried: int = 0
    trials: int = 0
    finished: int = 0
    epochs: float = 0.0
    proposing_s: float = 0.0
    rounds: dict[int, int] = field(default_factory=dict)

    @property
    def idle_share(self) -> float:
        """Share of the workers' time without training or evaluating."""
        return 1 - self.busy_s / self.available_s


def measured_from(run: Path) -> Measured:
    """Read the measured times of a real search."""
    state = SearchDirectory(run).state()
    lengths = [
        statistics.mean(epoch.training_s + epoch.evaluating_s for epoch in epochs if epoch.complete)
        for epochs in state.epochs.values()
        if any(epoch.complete for epoch in epochs)
    ]
    by_worker: dict[int, list[tuple[float, float]]] = {}
    for record in state.attempts.values():
        if record.ended_s is not None:
            by_worker.setdefault(record.worker, []).append((record.started_s, record.ended_s))
    gaps = [
        max(0.0, later[0] - earlier[1]) for spans in by_worker.values() for earlier, later in pairwise(sorted(spans))
    ]
    return Measured(
        epoch_s=tuple(lengths),
        gap_s=statistics.mean(gaps) if gaps else 0.0,
        held_out_s=statistics.mean(record.held_out_s for record in state.trials.values()),
    )


def proposal_seconds(proposed: int = 40_000, distinct: int = 400, repeats: int = 3) -> tuple[float, float, float]:
    """Return seconds per proposal, in a batch of 32 and alone, of a large search of ResNet-50s, and of a random morph.

    The search has ``proposed`` networks, of which ``distinct`` differ; a tenth of them is in training.
    """
    population, draw = Population(0, [Individual(id=0, network=resnet50(), status="observed", value=0.5)]), Searcher()
    values = np.random.default_rng(0)
    began = time.process_time()
    for _ in range(distinct):
        (one,) = draw.propose(population)
        changes = {"status": "observed", "value": float(values.uniform(0.5, 0.8))}
        population.individuals[one.id] = one.model_copy(update=changes)
    random_s = (time.process_time() - began) / distinct
    for number in range(distinct + 1, proposed):
        changes = {"id": number} | ({"status": "pending", "value": None} if number > 0.9 * proposed else {})
        population.individuals.append(population.individuals[1 + number % distinct].model_copy(update=changes))
    searcher = BayesianSearch()
    searcher.propose(population)  # fills the table of distances, as a search does from the beginning
    costs: dict[int, float] = {}
    for batch in (LARGEST_BATCH, 1):
        began = time.process_time()
        made = sum(len(searcher.propose(population, batch)) for _ in range(repeats))
        costs[batch] = (time.process_time() - began) / made
    return costs[LARGEST_BATCH], costs[1], random_s


class InstantWorkers:
    """Workers that finish a trial of ``epochs`` epochs as soon as it is started."""

    def __init__(self, size: int, epochs: int) -> None:
        self.size = size
        splits = Splits(training=1_200_000, validation=80_000, held_out=50_000, classes=1000)
        self.ready = {worker: WorkerReady("f", "imagenet", splits) for worker in range(size)}
        self._epochs = epochs
        self._told: list[tuple[int, Message]] = []
        self._accuracy = np.random.default_rng(0)
        self.memory: list[tuple[int, float]] = []
        """Started trials, and the process's memory in MiB."""
        self._started = 0

    def start(self, worker: int, order: TrialOrder, weights: object) -> None:
        """Note all messages of the trial."""
        self._started += 1
        for epoch in range(1, self._epochs + 1):
            report = EpochReport(
                epoch=epoch, begun_s=0.0, ended_s=0.0, trained_images=1_200_000, evaluated_images=80_000, steps=2678,
                training_s=0.0, evaluating_s=0.0, train_loss=1.0, validation_loss=1.0,
                validation_accuracy=self._accuracy.uniform(0.5, 0.8), complete=True,
            )  # fmt: skip
            self._told.append((worker, report))
        result = TrialResult(status="finished", held_out_accuracy=0.7, precision="fp32", ranks=1)
        self._told.append((worker, TrialEnded(result, None)))

    def listen(self, _timeout_s: float) -> list[tuple[int, Message]]:
        """Return the messages of at most 256 trials."""
        self.memory.append((self._started, psutil.Process().memory_info().rss / 2**20))
        told, self._told = self._told[: 256 * (self._epochs + 1)], self._told[256 * (self._epochs + 1) :]
        return told


@dataclass(frozen=True)
class Costs:
    """Processor time and memory of the coordinator, measured with the real controller."""

    trial_s: float
    epoch_s: float
    start_mib: float
    trial_mib: float
    report_s: float
    status_command_s: float
    report_command_s: float
    measured_trials: int


def controller_costs(workers: int, trials: int) -> Costs:
    """Run the controller with workers that need no time, and measure it, ``status`` and ``report``."""
    config = AutomlConfig(
        network="resnet50",
        search=SearchConfig(method="random"),  # proposals are measured apart
        schedule=ScheduleConfig(concurrency=workers, max_trials=trials, tuning_round=None, early_stop=False),
    )
    used: list[float] = []
    lines: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        for epochs in (1, 21):
            run = SearchDirectory.create(Path(folder) / str(epochs), config, resnet50())
            began, instant = time.process_time(), InstantWorkers(workers, epochs)
            SearchController(run, config, instant).run()  # type: ignore[arg-type]
            used.append((time.process_time() - began) / trials)
            grown = [sample for sample in instant.memory if sample[0] > trials / 4]
            lines.append(statistics.linear_regression(*zip(*grown, strict=True)))
        state = run.state(keeps_epochs=False)
        began = time.process_time()
        write_atomic(run.path / STATUS_FILE, summarise(run, state=state, series=False).to_json())
        report_s = time.process_time() - began
        commands: list[float] = []
        for verb in ("status", "report"):
            began = sum(os.times()[2:4])
            command = [sys.executable, "-m", "accelmark", "automl", verb, str(run.path)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            commands.append(sum(os.times()[2:4]) - began)
    epoch_s = (used[1] - used[0]) / 20
    (trial_mib, start_mib), (status_s, command_s) = lines[0], commands
    return Costs(used[0] - epoch_s, epoch_s, start_mib, trial_mib, report_s, status_s, command_s, trials)


def simulate(
    workers: int, measured: Measured, proposing: Proposing, *, hours: float, stretch: float, seed: int
) -> Outcome:
    """Run the scheduler for ``hours`` of a simulated clock."""
    generator = np.random.default_rng([seed, workers])
    schedule = ScheduleConfig(concurrency=workers, max_duration=hours * 3600)
    scheduler = Scheduler(schedule)
    outcome = Outcome(workers)
    ends: list[tuple[float, int, float, int]] = []
    now, limit_s, offered = 0.0, hours * 3600, 0
    batch: tuple[float, int] | None = None
    """The batch in preparation: the time when it is ready, and its size."""

    def offer(number: int) -> None:
        nonlocal offered
        scheduler.ready.extend(range(offered, offered + number))
        offered += number

    def launch(at_s: float) -> float:
        """Start trials on free workers; return the time after the random morphs that were needed."""
        late = at_s
        while len(scheduler.running) < workers:
            if not scheduler.ready:
                offer(1)
                outcome.hurried += 1
                outcome.proposing_s += proposing.random_s
                late += proposing.random_s
            assignment = scheduler.start(late)
            if assignment is None:
                break
            epoch_s = stretch * float(generator.choice(measured.epoch_s))
            number = assignment.trial // workers + 1
            epochs, _ = schedule.plan(number)
            busy_s = epochs * epoch_s + stretch * measured.held_out_s
            heapq.heappush(ends, (late + measured.gap_s + busy_s, assignment.trial, busy_s, epochs))
            outcome.rounds[number] = outcome.rounds.get(number, 0) + 1
        return late

    offer(scheduler.wanted())  # prepared before the clock starts, as in the controller
    launch(0.0)
    while True:
        if batch is None and (wanted := scheduler.wanted()):
            batch = now + proposing.batch_s(batch_size(wanted)), batch_size(wanted)
            outcome.proposing_s += batch[0] - now
        end_s = ends[0][0] if ends else float("inf")
        if min(end_s, batch[0] if batch else float("inf")) >= limit_s:
            break
        if batch is not None and batch[0] <= end_s:
            now = batch[0]
            offer(batch[1])
            batch = None
            continue
        now, trial, busy_s, epochs = heapq.heappop(ends)
        outcome.busy_s += busy_s
        outcome.finished += 1
        outcome.epochs += epochs
        scheduler.ended(trial, "finished", now)
        launch(now)
    # Trials that still run are cut; the completed part counts, as in the controller.
    for end_s, trial, busy_s, epochs in ends:
        done_s = max(0.0, busy_s - (end_s - limit_s))
        outcome.busy_s += done_s
        outcome.epochs += epochs * done_s / busy_s
        scheduler.ended(trial, "cut", limit_s)
    if not scheduler.over(limit_s):
        raise AssertionError("the scheduler does not know that its time is up")
    outcome.available_s = workers * limit_s
    outcome.trials = scheduler.started_trials
    return outcome


def main() -> None:
    """Simulate every number of workers and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, help="a measured run's folder; otherwise the figures kept from one")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--stretch", type=float, default=1.0, help="how much longer an epoch takes than measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--controlled", type=int, default=1024, help="workers and trials with which costs are measured")
    given = parser.parse_args()
    kept = RESULTS / "automl_measured_run.json"
    if given.run is not None:
        measured = measured_from(given.run)
        kept.write_text(json.dumps({**stamp(), **measured.__dict__}, indent=2) + "\n", encoding="utf-8")
    else:
        known = json.loads(kept.read_text(encoding="utf-8"))
        measured = Measured(**{name: known[name] for name in Measured.__dataclass_fields__})
    costs = controller_costs(given.controlled // 4, given.controlled)
    proposing = Proposing(*proposal_seconds())
    costs = replace(costs, trial_s=costs.trial_s - proposing.random_s)  # a random morph a trial was proposed there
    rows: list[dict[str, Any]] = []
    for workers in (int(word) for word in given.workers.split(",")):
        outcome = simulate(workers, measured, proposing, hours=given.hours, stretch=given.stretch, seed=given.seed)
        used_s = outcome.proposing_s + outcome.trials * costs.trial_s + outcome.epochs * costs.epoch_s
        rows.append(
            {
                "workers": workers,
                "score_of_ideal": 1 - outcome.idle_share,
                "idle_share": outcome.idle_share,
                "trials": outcome.trials,
                "finished": outcome.finished,
                "epochs": round(outcome.epochs),
                "hurried_share": outcome.hurried / max(1, outcome.trials),
                "rounds_reached": max(outcome.rounds),
                # Reports take at most a twentieth of the time.
                "coordinator_cores": used_s / (3600 * given.hours) + 1 / 20,
                "coordinator_gib": (costs.start_mib + outcome.trials * costs.trial_mib) / 1024,
            }
        )
        print(json.dumps(rows[-1]))
    mean_epoch = given.stretch * statistics.mean(measured.epoch_s)
    table = [
        f"{given.hours:g} simulated hours; an epoch takes {mean_epoch:.1f} s on average (measured x {given.stretch:g});"
        f" {measured.gap_s:.3f} s between trials. Processor time of the coordinator, measured: a proposal"
        f" {1e3 * proposing.batched_s:.0f} ms in a batch of {LARGEST_BATCH}, {proposing.alone_s:.2f} s alone,"
        f" {1e3 * proposing.random_s:.0f} ms for a random morph; the controller {1e3 * costs.trial_s:.1f} ms a trial"
        f" and {1e3 * costs.epoch_s:.2f} ms an epoch; {costs.start_mib:.0f} MiB at the start and"
        f" {1024 * costs.trial_mib:.0f} KiB a trial. The processor time of `status` of a search of"
        f" {costs.measured_trials:,} trials was {costs.status_command_s:.1f} s, of `report` with"
        f" {21 * costs.measured_trials:,} epochs {costs.report_command_s:.1f} s.",
        "Ideal is every worker training or evaluating all the time. Cores include the twentieth that reports may take.",
        "",
        "| Workers | Score against ideal | Idle | Trials started | Hurried proposals | Rounds | Coordinator |",
        "|---:|---:|---:|---:|---:|---:|---|",
        *(
            f"| {one['workers']:,} | {one['score_of_ideal']:.3%} | {one['idle_share']:.3%} | {one['trials']:,}"
            f" | {one['hurried_share']:.1%} | {one['rounds_reached']}"
            f" | {one['coordinator_cores']:.2f} cores, {one['coordinator_gib']:.1f} GiB |"
            for one in rows
        ),
    ]
    figures = {
        **stamp(), "hours": given.hours, "stretch": given.stretch, "measured": asdict(measured),
        "proposing": asdict(proposing), "costs": asdict(costs), "sizes": rows,
    }  # fmt: skip
    write_figures("automl_scheduling", figures, table)


if __name__ == "__main__":
    main()
