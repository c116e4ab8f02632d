"""Scaling efficiency of a case over numbers of hosts and ranks: speedup relative to ideal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from accelmark.results.figure_names import FigureName
from accelmark.results.schema import CaseResult, RoundResult, Spread
from accelmark.results.store.loaded_run import LoadedRun

FIGURE: Final = FigureName.THROUGHPUT_TRAIN
_SCALE_SETTINGS: Final = (
    "batch_size", "eval_batch_size", "gradient_accumulation_steps", "optimizer.lr", "schedule.", "end.", "evaluate.",
    "parallelism", "threads", "loader.", "checkpoint", "log_every_steps", "seed",
)  # fmt: skip
"""Prefixes of settings that change with the scale, or do not change the work of a step."""


@final
@dataclass(frozen=True, slots=True)
class ScalePoint:
    """One scale of a case."""

    run: str
    nnodes: int
    nproc: int
    throughput: float
    """Units per second over training time, all ranks."""
    speedup: float
    """Over the smallest scale of the curve."""
    efficiency: float
    """``speedup`` over the ratio of ranks: 1 is ideal."""
    half95: float | None
    """Half of the 95 % interval of ``efficiency``; None where a side has one round."""
    batch_size: str
    """Per rank; scaling is weak where it is the same at all scales."""

    @property
    def ranks(self) -> int:
        """Ranks over all hosts."""
        return self.nnodes * self.nproc

    @property
    def scale(self) -> str:
        """Hosts × devices per host, as in keys."""
        return f"{self.nnodes}×{self.nproc}"


@final
@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """A case on one chip at several scales, smallest first."""

    model: str
    framework: str
    chip: str
    precision: str
    unit: str
    synthetic: bool
    points: tuple[ScalePoint, ...]

    @property
    def same_batch(self) -> bool:
        """Whether every scale had the same batch per rank."""
        return len({point.batch_size for point in self.points}) == 1


def scaling_curves(runs: Iterable[LoadedRun]) -> list[ScalingCurve]:
    """Return a curve for each training case with at least two scales, from the newest run of each scale.

    Cases are grouped by version, chip, precision, open or closed, synthetic or real data, and all settings that do
    not depend on the scale.
    """
    groups: dict[tuple[str, ...], dict[tuple[int, int], tuple[LoadedRun, CaseResult, str]]] = {}
    units: dict[tuple[str, ...], str] = {}
    for run in sorted(runs, key=lambda run: run.summary.started_at):
        for case in run.summary.cases:
            rounds = [result for result in run.rounds_of(case) if result.state == "succeeded"]
            spread = case.figures.get(FIGURE)
            if case.task != "train" or not rounds or spread is None or not spread.mean:
                continue
            key, first = case.key, rounds[0]
            batch = first.settings.get("batch_size")
            group = (
                key.model, key.framework, key.hardware, first.precision, str(first.case_version),
                "open" if "open" in case.marks else "", "synthetic" if "synthetic" in case.marks else "",
                _settings(first),
            )  # fmt: skip
            units[group] = case.unit
            scales = groups.setdefault(group, {})
            scales[key.nnodes, key.nproc] = (run, case, str(batch.value) if batch else "–")
    return [_curve(group, units[group], scales) for group, scales in sorted(groups.items()) if len(scales) > 1]


def _curve(
    group: tuple[str, ...], unit: str, scales: dict[tuple[int, int], tuple[LoadedRun, CaseResult, str]]
) -> ScalingCurve:
    ordered = sorted(scales.items(), key=lambda entry: (entry[0][0] * entry[0][1], entry[0]))
    (base_nodes, base_nproc), (_, base_case, _) = ordered[0]
    base = base_case.figures[FIGURE]
    points: list[ScalePoint] = []
    for (nnodes, nproc), (run, case, batch) in ordered:
        spread = case.figures[FIGURE]
        speedup = (spread.mean or 0.0) / (base.mean or math.nan)
        efficiency = speedup * base_nodes * base_nproc / (nnodes * nproc)
        parts = (_relative(spread), 0.0 if case is base_case else _relative(base))
        half = None if None in parts else efficiency * math.hypot(*(part or 0.0 for part in parts))
        if case is base_case:
            half = None
        points.append(ScalePoint(run.summary.run, nnodes, nproc, spread.mean or 0.0, speedup, efficiency, half, batch))
    return ScalingCurve(group[0], group[1], group[2], group[3], unit, bool(group[6]), tuple(points))


def _settings(result: RoundResult) -> str:
    """Return the settings that have to be equal at every scale, as canonical text."""
    kept = {
        name: setting.value for name, setting in sorted(result.settings.items()) if not name.startswith(_SCALE_SETTINGS)
    }
    return json.dumps(kept, default=str)


def _relative(spread: Spread) -> float | None:
    if spread.ci95 is None or not spread.mean:
        return None
    return (spread.ci95[1] - spread.ci95[0]) / 2 / abs(spread.mean)
