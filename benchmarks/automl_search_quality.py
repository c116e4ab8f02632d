"""Compare the held-out errors of the search methods after equal work, over several seeds.

    python -m benchmarks.automl_search_quality --data FASHION_MNIST_FOLDER [--seeds 0 1 2 3 4] [--epochs 300]

Work is counted in operations: each method may use the operations of ``--epochs`` epochs of the seed network. The error
is the held-out error of the network with the best validation accuracy. ``bayesian`` is the Gaussian process with
morphs; ``random`` and ``evolution`` use morphs with the same weight transfer, trial length and limits. ``none`` trains
the seed network in one trial of all epochs, with one decay of the learning rate. ``scaled``, ``scaled5`` and
``scaled8`` train a network of three, five and eight times its filters once, for as many epochs as operations allow;
``bayesian-scaled`` searches from the first. ``halving`` is successive halving over widths and depths, each network in
rounds of 1, 3, 9 and 18 epochs that continue from its weights; ``halving-scratch`` trains each round from new weights.

Results are added to the existing file if it has the same setting, so that a measurement can be split over several runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from accelmark.automl.config import (
    AutomlConfig,
    DatasetConfig,
    ScheduleConfig,
    SearchConfig,
    SearchName,
    TrainingConfig,
)
from accelmark.automl.controller.controller import SearchController
from accelmark.automl.journal import Proposed, SearchDirectory, SearchState, read_journal
from accelmark.automl.model.counting import count
from accelmark.automl.model.network import Network
from accelmark.automl.model.seeds import small
from accelmark.automl.scoring.score import Scoreboard
from accelmark.automl.search.schedule import Scheduler
from accelmark.datasets.images import read_fashion_mnist
from benchmarks.automl_figures import RESULTS, stamp, write_figures
from tests.automl.threads import thread_pool

NAME: Final = "automl_search_quality"
METHODS: Final = (
    "bayesian", "random", "evolution", "tpe", "halving", "halving-scratch", "none", "scaled", "scaled5", "scaled8",
    "bayesian-scaled",
)  # fmt: skip
SEARCHERS: Final[dict[str, SearchName]] = {
    "bayesian": "bayesian", "random": "random", "evolution": "evolution", "tpe": "tpe", "halving": "halving",
    "halving-scratch": "halving", "none": "none", "scaled": "none", "scaled5": "none", "scaled8": "none",
    "bayesian-scaled": "bayesian",
}  # fmt: skip
TIMES: Final = {"scaled": 3, "scaled5": 5, "scaled8": 8, "bayesian-scaled": 3}
"""Method -> how often the seed's filters are taken."""
HALVING_EPOCHS: Final = (1, 3, 9, 18)
TOLD: Final = {
    "bayesian": "Gaussian process with morphs",
    "random": "random morphs",
    "evolution": "evolution with morphs",
    "tpe": "TPE over widths and depths",
    "halving": "successive halving, weights carried",
    "halving-scratch": "successive halving, from scratch",
    "none": "seed trained longer",
    "scaled": "network of 12 and 24 filters trained once",
    "scaled5": "network of 20 and 40 filters trained once",
    "scaled8": "network of 32 and 64 filters trained once",
    "bayesian-scaled": "Gaussian process with morphs, from that network",
}
VALIDATION_SHARE: Final = 0.2
GROWTH: Final = 30
SIDE: Final = 14


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all runs of a measurement share."""

    images: int = 5000
    epochs: int = 300
    trial_epochs: int = 3
    batch_size: int = 64
    learning_rate: float = 0.05

    @property
    def network(self) -> Network:
        """The seed network: 4 and 8 filters, 438 parameters, so that it can grow."""
        return small((1, SIDE, SIDE), filters=(4, 8), dropout=0.0, name="thin14")

    def start(self, method: str) -> Network:
        """Return the network that a method starts from."""
        times = TIMES.get(method, 1)
        return small((1, SIDE, SIDE), filters=(4 * times, 8 * times), dropout=0.0, name=f"thin14-{method}")

    @property
    def budget(self) -> int:
        """Operations that each method may use."""
        return self.epochs * self._epoch(self.network)

    def _epoch(self, network: Network) -> int:
        """Return the operations of one epoch of a network."""
        cost = count(network, "accelmark")
        validated = round(self.images * VALIDATION_SHARE)
        trained = self.images - validated
        trained -= trained % self.batch_size
        steps = trained // self.batch_size
        return (cost.forward + cost.backward) * trained + cost.evaluation * validated + cost.update * steps

    def config(self, method: str, seed: int, data: Path) -> AutomlConfig:
        """Return the configuration of one search."""
        longer = SEARCHERS[method] == "none"
        epochs = HALVING_EPOCHS if SEARCHERS[method] == "halving" else (self.trial_epochs,)
        return AutomlConfig(
            seed=seed,
            dataset=DatasetConfig(name="arrays", directory=data, limit=self.images, validation_share=VALIDATION_SHARE),
            search=SearchConfig(
                method=SEARCHERS[method],
                weights="from-scratch" if method.endswith("scratch") else "carried",
                max_forward_operations=GROWTH * count(self.network, "accelmark").matrix_forward,
            ),
            schedule=ScheduleConfig(
                concurrency=1,
                max_trials=1 if longer else 1000,
                round_epochs=(self.budget // self._epoch(self.start(method)),) if longer else epochs,
                tuning_round=None,
                early_stop=False,
            ),
            training=TrainingConfig(batch_size=self.batch_size, learning_rate=self.learning_rate),
        )


def halved_pictures(fashion_mnist: Path, target: Path) -> Path:
    """Write Fashion-MNIST at half its size (means of 2 x 2 pixels), for short trials; return the path."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, pictures in zip(("train", "held_out"), read_fashion_mnist(fashion_mnist), strict=True):
        images = pictures.batch(np.arange(len(pictures)), None).astype(np.float32)
        blocks = images.reshape(len(images), 1, SIDE, 2, SIDE, 2).mean(axis=(3, 5))
        arrays |= {f"{split}_images": blocks.round().astype(np.uint8), f"{split}_labels": pictures.labels}
    np.savez(target, allow_pickle=False, **arrays)
    return target


def search(method: str, seed: int, data: Path, setting: Setting) -> dict[str, Any]:
    """Search until the budget of operations is used up, and return the figures."""
    config, network, budget = setting.config(method, seed, data), setting.start(method), setting.budget
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = SearchDirectory.create(Path(folder), config, network)
        workers = thread_pool(config.dataset, network, 1)

        def stop_when_spent(state: SearchState, scheduler: Scheduler) -> None:
            board = Scoreboard(state)
            if config.search.method != "none" and board.operations_until(board.ended_s) >= budget:
                scheduler.asked_to_stop = True

        SearchController(run, config, workers, observer=stop_when_spent).run()
        state = run.state()
        drawn = [event.searcher for event in read_journal(run.path) if isinstance(event, Proposed)]
    within = _within(state, budget)
    board = Scoreboard(state)
    at = max((board.trials[trial].ended_s or 0.0 for trial in within), default=0.0)
    best = board.best_trial_at(at)
    return {
        "method": method,
        "seed": seed,
        "held_out_error": board.at(at).error,
        "search_error": board.at(at).search_error,
        "trials": len(within),
        "immediate_proposals": sum("immediate" in searcher for searcher in drawn),
        "morphs_a_proposal": statistics.mean(
            [len(one.morphs) for one in state.individuals if one.parent is not None] or [0]
        ),
        "best_parameters": best.parameters if best else None,
        "best_morphs": _line_of_descent(state, best.individual) if best else [],
        "curve": _curve(state, within),
        "seconds": time.monotonic() - began,
        "measured": _measured(stamp()),
    }


def _measured(figures: dict[str, Any]) -> str:
    return f"{figures['measured_at'][:10]} on {figures['machine']}"


def _within(state: SearchState, budget: int) -> list[int]:
    """Return the trials that ended within the budget; a trial beyond it would give its method more work."""
    spent = {record.trial: record.cost.operations(state.totals_of(record)) for record in state.useful()}
    total, within = 0, []
    for trial in sorted(spent):
        total += spent[trial]
        if total > budget * 1.0001:
            break
        within.append(trial)
    return within


def _curve(state: SearchState, within: list[int]) -> list[list[float]]:
    """Return (operations spent, held-out error) at the end of each trial."""
    board = Scoreboard(state)
    ends = [board.trials[trial].ended_s or 0.0 for trial in within]
    points = [(board.operations_until(end), board.at(end).error) for end in ends]
    return [[operations, error] for operations, error in points if error is not None]


def _line_of_descent(state: SearchState, individual: int) -> list[str]:
    one = state.individuals[individual]
    line: list[str] = []
    while one.parent is not None:
        line = [*map(str, one.morphs), *line]
        one = state.individuals[one.parent]
    return line


def main() -> None:
    """Run every method with every seed and write the figures."""
    default = Setting()
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=default.epochs, help="the budget, in epochs of the seed network")
    parser.add_argument("--images", type=int, default=default.images)
    parser.add_argument("--trial-epochs", type=int, default=default.trial_epochs)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--name", default=NAME, help="the figures' name")
    given = parser.parse_args()
    setting = Setting(images=given.images, epochs=given.epochs, trial_epochs=given.trial_epochs)
    rows = _known_rows(given.name, setting)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool,
    ):
        data = halved_pictures(given.data, Path(folder) / "images.npz")
        tasks = [(method, seed, data, setting) for seed in given.seeds for method in given.methods]
        for done in pool.map(_search, tasks):
            print(json.dumps(done), flush=True)
            kept = [row for row in rows if (row["method"], row["seed"]) != (done["method"], done["seed"])]
            rows = sorted([*kept, done], key=lambda row: (row["seed"], METHODS.index(row["method"])))
            _write(given.name, rows, setting)


def _search(task: tuple[str, int, Path, Setting]) -> dict[str, Any]:
    return search(*task)


def _known_rows(name: str, setting: Setting) -> list[dict[str, Any]]:
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return []
    figures = json.loads(path.read_text(encoding="utf-8"))
    if figures.get("setting") != asdict(setting):
        return []
    return [{"measured": _measured(figures), **row} for row in figures["runs"]]


def _write(name: str, rows: list[dict[str, Any]], setting: Setting) -> None:
    network = setting.network
    parameters = count(network, "accelmark").parameters
    table = [
        f"Seed network {network.name} ({parameters} parameters) on {setting.images} pictures of Fashion-MNIST halved to"
        f" {SIDE} x {SIDE} (a fifth of them to validate on) and {setting.images} held-out ones; batch"
        f" {setting.batch_size}, learning rate {setting.learning_rate}. Every run may spend {setting.budget:.3g}"
        f" operations ({setting.epochs} epochs of the seed). Trials of {setting.trial_epochs} epochs, networks of at"
        f" most {GROWTH} times the seed's operations, one worker of one thread, two runs side by side; the seed trained"
        " longer is one trial of all epochs.",
        "",
        "| Method | Held-out error, mean | spread (deviation) | of each seed | Trials | Parameters of the best "
        "| Measured |",
        "|---|---:|---:|---|---:|---:|---|",
    ]
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method and row["held_out_error"] is not None]
        if not mine:
            continue
        errors = [row["held_out_error"] for row in mine]
        spread = f"{statistics.stdev(errors):.4f}" if len(errors) > 1 else "-"
        each = ", ".join(f"{error:.4f}" for error in errors)
        trials, sizes = (statistics.mean(row[key] for row in mine) for key in ("trials", "best_parameters"))
        measured = ", ".join(sorted({row["measured"] for row in mine}))
        table.append(
            f"| {TOLD[method]} | {statistics.mean(errors):.4f} | {spread} | {each} | {trials:.1f} | {sizes:,.0f} "
            f"| {measured} |"
        )
    seeds = " ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    command = f"python -m benchmarks.{NAME} --data FASHION_MNIST --epochs {setting.epochs} --seeds {seeds}"
    told = {
        **stamp(),
        "command": command,
        "budget_operations": setting.budget,
        "setting": asdict(setting),
        "runs": rows,
    }
    write_figures(name, told, table)


if __name__ == "__main__":
    main()
