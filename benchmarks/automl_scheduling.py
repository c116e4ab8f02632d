"""Simulate a search on 1 to 4,096 workers with the real scheduler, to compute the accelerators' idle share.

    python -m benchmarks.automl_scheduling [--run RUN_DIRECTORY] [--workers 1,16,512]

Epoch times are drawn with replacement from those of a measured search and multiplied by ``--stretch`` (an epoch of a
large data set takes minutes, not a second). Proposal times are measured here, one proposal at a time, on the largest
population of morphed ResNet-50s that the searcher fits. A worker that would have to wait is given a random morph, as by
the controller. Only the clock is simulated: ``Scheduler`` is the code of real searches.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from accelmark.automl.config import ScheduleConfig
from accelmark.automl.search.schedule import Assignment, Scheduler
from benchmarks.automl_figures import RESULTS, stamp, write_figures

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Measured:
    """Measured times in seconds: epochs, proposals, random morphs, and the gap between trials on a worker."""

    epoch_s: tuple[float, ...]
    proposal_s: tuple[float, ...]
    hurried_s: float
    gap_s: float
    held_out_s: float


@dataclass
class Outcome:
    """Result of one simulated search; times are in worker seconds."""

    workers: int
    available_s: float = 0.0
    busy_s: float = 0.0
    hurried: int = 0
    trials: int = 0
    finished: int = 0
    rounds: dict[int, int] = field(default_factory=dict)

    @property
    def idle_share(self) -> float:
        """Share of the workers' time without training or evaluating."""
        return 1 - self.busy_s / self.available_s


def measured_from(run: Path) -> Measured:
    """Read the measured times of a real search."""
    from accelmark.automl.controller.journal import SearchDirectory

    state = SearchDirectory(run).state()
    lengths = [
        statistics.mean(
            epoch.training_s + epoch.evaluating_s for epoch in state.epochs if epoch.trial == trial and epoch.complete
        )
        for trial in state.trials
        if any(epoch.trial == trial and epoch.complete for epoch in state.epochs)
    ]
    by_worker: dict[int, list[tuple[float, float]]] = {}
    for record in state.attempts.values():
        if record.ended_s is not None:
            by_worker.setdefault(record.worker, []).append((record.started_s, record.ended_s))
    gaps = [
        max(0.0, later[0] - earlier[1]) for spans in by_worker.values() for earlier, later in pairwise(sorted(spans))
    ]
    searched_s, hurried_s = proposal_seconds()
    return Measured(
        epoch_s=tuple(lengths),
        proposal_s=searched_s,
        hurried_s=hurried_s,
        gap_s=statistics.mean(gaps) if gaps else 0.0,
        held_out_s=statistics.mean(record.held_out_s for record in state.trials.values()),
    )


def proposal_seconds(observed: int = 300, repeats: int = 5) -> tuple[tuple[float, ...], float]:
    """Return the time in seconds of searched proposals with full memory, and of a random morph."""
    from accelmark.automl.model.seeds import resnet50
    from accelmark.automl.records import Individual
    from accelmark.automl.search.searchers import BayesianSearch, Population, Searcher

    seed = Individual(id=0, network=resnet50(), status="observed", value=0.5)
    population, draw = Population(0, [seed]), Searcher()
    values = np.random.default_rng(0)

    def observe(one: Individual) -> None:
        value = float(values.uniform(0.5, 0.8))
        population.individuals[one.id] = one.model_copy(update={"status": "observed", "value": value})

    began = time.monotonic()
    for _ in range(observed):
        observe(draw.propose(population))
    hurried_s = (time.monotonic() - began) / observed
    searcher = BayesianSearch()
    searcher.propose(population)  # fills the table of distances, which a real search fills gradually
    searched: list[float] = []
    for _ in range(repeats):
        began = time.monotonic()
        observe(searcher.propose(population))
        searched.append(time.monotonic() - began)
    return tuple(searched), hurried_s


def simulate(workers: int, measured: Measured, *, hours: float, stretch: float, seed: int) -> Outcome:
    """Run the scheduler for ``hours`` of a simulated clock."""
    generator = np.random.default_rng([seed, workers])
    scheduler = Scheduler(ScheduleConfig(concurrency=workers, max_duration=hours * 3600))
    outcome = Outcome(workers)
    ends: list[tuple[float, int, float, Assignment]] = []
    now, offered = 0.0, 0
    proposed_at: float | None = None
    for _ in range(scheduler.wanted()):  # prepared before the clock starts, as in the controller
        scheduler.ready.append(offered)
        offered += 1

    def launch(at_s: float) -> float:
        """Start trials on free workers; return the time after the random morphs that were needed."""
        nonlocal offered
        late = at_s
        while len(scheduler.running) < workers:
            if not scheduler.ready:
                scheduler.ready.append(offered)
                offered += 1
                outcome.hurried += 1
                late += measured.hurried_s
            assignment = scheduler.start(late)
            if assignment is None:
                break
            epoch_s = stretch * float(generator.choice(measured.epoch_s))
            busy_s = assignment.epochs_planned * epoch_s + stretch * measured.held_out_s
            heapq.heappush(ends, (late + measured.gap_s + busy_s, assignment.trial, busy_s, assignment))
            outcome.rounds[assignment.round] = outcome.rounds.get(assignment.round, 0) + 1
        return late

    launch(0.0)
    while True:
        if proposed_at is None and scheduler.wanted() > 0:
            proposed_at = now + float(generator.choice(measured.proposal_s))
        end_s = ends[0][0] if ends else float("inf")
        limit_s = hours * 3600
        if min(end_s, proposed_at or float("inf")) >= limit_s:
            break
        if proposed_at is not None and proposed_at <= end_s:
            now, proposed_at = proposed_at, None
            scheduler.ready.append(offered)
            offered += 1
            continue
        now, trial, busy_s, _ = heapq.heappop(ends)
        outcome.busy_s += busy_s
        outcome.finished += 1
        scheduler.ended(trial, "finished", now)
        launch(now)
    # Trials that still run are cut; the completed part counts, as in the controller.
    limit_s = hours * 3600
    for end_s, trial, busy_s, _ in ends:
        outcome.busy_s += max(0.0, busy_s - (end_s - limit_s))
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
    given = parser.parse_args()
    kept = RESULTS / "automl_measured_run.json"
    if given.run is not None:
        measured = measured_from(given.run)
        kept.write_text(json.dumps({**stamp(), **measured.__dict__}, indent=2) + "\n", encoding="utf-8")
    else:
        known = json.loads(kept.read_text(encoding="utf-8"))
        measured = Measured(**{name: known[name] for name in Measured.__dataclass_fields__})
    rows: list[dict[str, Any]] = []
    for workers in (int(word) for word in given.workers.split(",")):
        outcome = simulate(workers, measured, hours=given.hours, stretch=given.stretch, seed=given.seed)
        rows.append(
            {
                "workers": workers,
                "score_of_ideal": 1 - outcome.idle_share,
                "idle_share": outcome.idle_share,
                "trials": outcome.trials,
                "finished": outcome.finished,
                "hurried_share": outcome.hurried / max(1, outcome.trials),
                "rounds_reached": max(outcome.rounds),
            }
        )
        print(json.dumps(rows[-1]))
    mean_epoch = given.stretch * statistics.mean(measured.epoch_s)
    table = [
        f"{given.hours:g} simulated hours; an epoch takes {mean_epoch:.1f} s on average (measured x {given.stretch:g});"
        f" a searched proposal {statistics.mean(measured.proposal_s):.3f} s; {measured.gap_s:.3f} s between trials.",
        "Ideal is every worker training or evaluating all the time.",
        "",
        "| Workers | Score against ideal | Idle | Trials started | Proposals in a hurry | Rounds reached |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {one['workers']:,} | {one['score_of_ideal']:.3%} | {one['idle_share']:.3%} | {one['trials']:,}"
            f" | {one['hurried_share']:.1%} | {one['rounds_reached']} |"
            for one in rows
        ),
    ]
    figures = {**stamp(), "hours": given.hours, "stretch": given.stretch, "measured": measured.__dict__, "sizes": rows}
    write_figures("automl_scheduling", figures, table)


if __name__ == "__main__":
    main()
