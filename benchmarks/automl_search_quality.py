"""Does the search earn its keep: best held-out error after equal work, for every method and several seeds.

    python -m benchmarks.automl_search_quality --data FASHION_MNIST_FOLDER [--seeds 3] [--epochs 24] [--images 4000]

Work is counted in operations: every method may spend what ``--epochs`` epochs of the seed network cost. The error is
that of the network which the validation split prefers, on the held-out split. ``bayesian`` is the Gaussian process
with morphs, ``random`` random morphs with the same weight transfer, ``none`` the seed trained longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

from accelmark.automl.config import AutomlConfig, DatasetConfig, ScheduleConfig, SearchConfig, TrainingConfig
from accelmark.automl.counting import count
from accelmark.automl.engine.coordinator import Coordinator
from accelmark.automl.engine.rundir import RunDirectory
from accelmark.automl.engine.state import RunState
from accelmark.automl.engine.thread_crew import ThreadCrew
from accelmark.automl.graph import seed_network
from accelmark.automl.schedule import Scheduler
from accelmark.automl.search import SearchName
from benchmarks.automl_figures import stamp, write_figures

METHODS: tuple[SearchName, ...] = ("bayesian", "random", "evolution", "none")
SEED_NETWORK = "small28"
TRIAL_EPOCHS = 2


def search(method: SearchName, seed: int, data: Path, images: int, budget: int) -> dict[str, Any]:
    """Search until the budget of operations is spent and return what came of it."""
    network = seed_network(SEED_NETWORK)
    config = AutomlConfig(
        seed=seed,
        network=SEED_NETWORK,
        dataset=DatasetConfig(name="fashion-mnist", directory=data, limit=images),
        search=SearchConfig(method=method, max_forward_operations=12 * count(network, "accelmark").matrix_forward),
        schedule=ScheduleConfig(
            concurrency=1, max_trials=1000, round_epochs=(TRIAL_EPOCHS,), tuning_round=None, early_stop=False
        ),
        training=TrainingConfig(batch_size=64, learning_rate=0.05),
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.created(Path(folder), config, network)
        crew = ThreadCrew(config.dataset, network, 1)

        def stop_when_spent(state: RunState, scheduler: Scheduler) -> None:
            board = state.scoreboard()
            if board.operations_until(board.ended_s) >= budget:
                scheduler.asked_to_stop = True

        Coordinator(run, config, crew, fingerprint=next(iter(crew.fingerprints)), observer=stop_when_spent).work()
        state = run.state()
    # Only trials that ended within the budget: a trial that went beyond it had more work than the others.
    board = state.scoreboard()
    spent, last_s = 0, 0.0
    for epoch in sorted(board.epochs, key=lambda each: each.ended_s):
        spent += board.trials[epoch.trial].cost.of(epoch)
        if spent > budget:
            break
        last_s = epoch.ended_s
    ends = [record.ended_s for record in board.trials.values() if record.ended_s and record.ended_s <= last_s + 2.0]
    at = max(ends, default=0.0)
    best = board.best_trial_at(at)
    return {
        "method": method,
        "seed": seed,
        "held_out_error": board.held_out_error_at(at),
        "search_error": board.search_error_at(at),
        "trials": len(ends),
        "best_parameters": best.parameters if best else None,
        "best_morphs": [str(morph) for morph in best.morphs] if best else [],
        "seconds": time.monotonic() - began,
    }


def main() -> None:
    """Run every method with every seed and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=24, help="the budget, in epochs of the seed network")
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=get_args(SearchName))
    given = parser.parse_args()
    cost = count(seed_network(SEED_NETWORK), "accelmark")
    trained = round(given.images * 0.9)
    per_epoch = cost.operations(trained_images=trained, evaluated_images=given.images - trained, steps=trained // 64)
    budget = given.epochs * per_epoch
    rows: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        for method in given.methods:
            rows.append(search(method, seed, given.data, given.images, budget))
            print(json.dumps(rows[-1]), flush=True)
            _write(rows, given.epochs, given.images, budget)


def _write(rows: list[dict[str, Any]], epochs: int, images: int, budget: int) -> None:
    table = [
        f"{SEED_NETWORK} on {images} images of Fashion-MNIST, budget {budget:.3g} operations"
        f" ({epochs} epochs of the seed network), trials of {TRIAL_EPOCHS} epochs, one worker.",
        "",
        "| Method | Held-out error, mean | of each seed | Trials |",
        "|---|---:|---|---:|",
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method and row["held_out_error"] is not None]
        if not mine:
            continue
        errors = [row["held_out_error"] for row in mine]
        each = ", ".join(f"{error:.4f}" for error in errors)
        mean_trials = statistics.mean(row["trials"] for row in mine)
        table.append(f"| {method} | {statistics.mean(errors):.4f} | {each} | {mean_trials:.1f} |")
    write_figures("automl_search_quality", {**stamp(), "budget_operations": budget, "runs": rows}, table)


if __name__ == "__main__":
    main()
