"""Scaling efficiency of a case over numbers of hosts and ranks: speedup relative to ideal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from accelmark.results.figures import FigureName
from accelmark.results.schema import CaseResult
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun

FIGURE: Final = FigureName.THROUGHPUT_STEADY
_SCALE_SETTINGS: Final = (
    "batch_size", "eval_batch_size", "gradient_accumulation_steps", "optimizer.lr", "schedule.", "end.", "evaluate.",
    "parallelism", "zero.", "threads", "loader.", "checkpoint", "log_every_steps", "seed",
)  # fmt: skip
"""Prefixes of settings that change with the scale, or do not change the work of a step."""
_LINEAR: Final = 1.02


class ScalePoint(NamedTuple):
    """One scale of a case."""

    run: str
    nnodes: int
    nproc: int
    throughput: float
    """Units per second of all ranks, without warm-up."""
    speedup: float
    """Over the smallest scale of the curve."""
    efficiency: float
    """``speedup`` over the ratio of ranks: 1 is ideal."""
    half95: float | None
    """Half of the 95 % interval of ``efficiency``; None where a side has one round."""
    batch_size: str
    """Per rank; scaling is weak where it is the same at all scales."""
    is_busy: bool = False
    """Whether other work ran on the hosts."""

    @property
    def ranks(self) -> int:
        """Ranks over all hosts."""
        return self.nnodes * self.nproc

    @property
    def scale(self) -> str:
        """Hosts × devices per host, as in keys."""
        return f"{self.nnodes}×{self.nproc}"


class ScalingCurve(NamedTuple):
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

    @property
    def is_busy(self) -> bool:
        """Whether other work ran on the hosts at any scale."""
        return any(point.is_busy for point in self.points)

    @property
    def is_superlinear(self) -> bool:
        """Whether any efficiency is above 1 by more than ratios of rounds usually scatter."""
        return any(point.efficiency > _LINEAR for point in self.points)


def scaling_curves(runs: Iterable[LoadedRun]) -> list[ScalingCurve]:
    """Return a curve for each training case with at least two scales, from the newest run of each scale.

    Cases are grouped by version, chip, precision, open or closed, synthetic or real data, and all settings that do
    not depend on the scale.
    """
    groups: dict[tuple[str, ...], dict[tuple[int, int], LoadedCase]] = {}
    for run in sorted(runs, key=lambda run: run.summary.started_at):
        for case in run.cases:
            spread, key, marks = case.result.figures.get(FIGURE), case.result.key, case.result.marks
            if not case.succeeded or spread is None or not spread.mean:
                continue
            first = case.succeeded[0]
            kept = {name: one.value for name, one in first.settings.items() if not name.startswith(_SCALE_SETTINGS)}
            group = (
                key.model, key.framework, key.hardware, first.precision, str(first.case_version),
                "open" if "open" in marks else "", "synthetic" if "synthetic" in marks else "",
                json.dumps(kept, default=str, sort_keys=True),
            )  # fmt: skip
            groups.setdefault(group, {})[key.nnodes, key.nproc] = case
    curves = []
    for _, scales in sorted(groups.items()):
        if len(scales) > 1:
            ordered = sorted(scales.values(), key=lambda case: (case.result.key.world_size, case.result.key.nnodes))
            smallest, key = ordered[0].result, ordered[0].result.key
            curve = ScalingCurve(
                key.model, key.framework, key.hardware, ordered[0].succeeded[0].precision, smallest.unit,
                "synthetic" in smallest.marks, tuple(_point(case, smallest) for case in ordered),
            )  # fmt: skip
            curves.append(curve)
    return curves


def _point(case: LoadedCase, base: CaseResult) -> ScalePoint:
    key, spread, base_spread = case.result.key, case.result.figures[FIGURE], base.figures[FIGURE]
    speedup = (spread.mean or 0.0) / (base_spread.mean or math.nan)
    efficiency = speedup * base.key.world_size / key.world_size
    own, of_base = spread.relative_half95, base_spread.relative_half95
    half = None
    if case.result is not base and own is not None and of_base is not None:
        half = efficiency * math.hypot(own, of_base)
    batch = case.succeeded[0].settings.get("batch_size")
    return ScalePoint(
        case.run.summary.run, key.nnodes, key.nproc, spread.mean or 0.0, speedup, efficiency, half,
        str(batch.value) if batch else "–", "busy_machine" in case.result.marks,
    )  # fmt: skip
