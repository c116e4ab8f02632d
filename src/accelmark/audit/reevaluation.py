"""Rules about the evaluation job: a fresh process without vendor code checks a round's weights and steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from accelmark.audit.evidence import Findings, RoundEvidence, deviation
from accelmark.results.figures import FigureName
from accelmark.results.read.round_dir import Reevaluation, ReplayedStep, ReplayedSteps
from accelmark.results.schema import Severity, finding
from accelmark.spec.job import TrainingWork, TrainJob
from accelmark.spec.number_format import limit_percent, percent
from accelmark.spec.settings.training import Precision

METRIC_TOLERANCE: Final = 0.005
"""Largest relative difference of a metric: kernels of a vendor round differently from the framework's own."""
NUM_CLOSE_STEPS: Final = 8
"""Steps over which two correct computations stay close; after that, small differences grow as in any chaotic system."""
MOST_STEPS: Final = 128
MIN_STEPS_WITH_PAIR: Final = 144
"""Steps from which training writes a pair of checkpoints: 8 before it, at most 128 in it, and 8 more."""


class ReplayTolerance(NamedTuple):
    """Largest differences between training and its replay at one precision (docs/reference/replay.md)."""

    loss: float
    """Mean relative difference of the losses of the first ``NUM_CLOSE_STEPS`` steps."""
    update: float
    """Norm of the difference of the parameters' changes / norm of the replayed change, over as many steps."""
    cosine: float = 0.3
    """Smallest cosine of the angle between the parameters' changes over ``MOST_STEPS`` steps; its distance from 1 is
    limited in proportion to the root of their number."""
    origin: Literal["measured", "not measured"] = "measured"
    """Whether it comes from honest runs, or was set between other precisions' tolerances, by the mantissa."""


REPLAY_TOLERANCES: Final[dict[Precision, ReplayTolerance]] = {
    "fp32": ReplayTolerance(loss=0.002, update=0.04, cosine=0.5),
    "tf32": ReplayTolerance(loss=0.005, update=0.1, origin="not measured"),
    "bf16": ReplayTolerance(loss=0.02, update=0.3, cosine=0.5),
    "fp16": ReplayTolerance(loss=0.01, update=0.2),
    "fp8": ReplayTolerance(loss=0.05, update=0.6, origin="not measured"),
}
NORM_TOLERANCE: Final = 0.05
"""Largest relative difference of the norms of the parameters' changes over 64 steps; over more, in proportion."""
MIN_LOSS_CORRELATION: Final = 0.8


_STATE_TOLERANCES: Final = {"buffers": (0.002, 1.5, 0.3), "optimizer": (0.02, 15.0, 2.0)}
"""Largest norm of the difference of a state at the end of a pair / norm of the replayed state: the least, what is added
for each unit of the difference of the parameters' changes, the most (docs/reference/replay.md)."""
MAX_UNTIMED: Final = 0.25
"""Largest time before the first step, or in evaluations, beyond the evaluation job's, as a share of the training's."""
MIN_UNTIMED_S: Final = 2.0
"""The least of it that is reported: honest starts differ by less."""


def reproduced(entry: RoundEvidence) -> Findings:
    """Check that each round's weights were evaluated and its steps replayed without vendor code, with its results."""
    work, reevaluation = entry.job.work if entry.job is not None else None, entry.reevaluation
    if not isinstance(work, TrainJob) or (work.settings.loader.synthetic and not work.is_checked):
        return
    if reevaluation is None and work.is_checked:
        actual = "the weights were not evaluated after training; 'accelmark evaluate' does it"
        yield finding("error", "reevaluation", "an evaluation in a fresh process", actual)
    elif reevaluation is not None:
        if work.is_checked and reevaluation.problem is None and reevaluation.metrics is None and reevaluation.reported:
            yield deviation(entry, "reevaluation", "metrics", "the evaluation job has none")
        yield from reevaluation_findings(entry, reevaluation)
        yield from replay_findings(entry, work, reevaluation)
        if entry.job is not None and entry.job.has_vendors_code:
            train_s = entry.result.value_of(FigureName.TRAIN_NO_EVAL_TIME) or 0.0
            yield from _untimed_findings(work, reevaluation, train_s, is_cpu=entry.job.device_type == "cpu")


def _untimed_findings(work: TrainJob, found: Reevaluation, train_s: float, *, is_cpu: bool) -> Findings:
    """Report work that no throughput counts: before the first step (in CPU time on CPUs), and in evaluations."""
    before = f"{'of CPU time ' if is_cpu else ''}before its first step"
    # On a busy machine, CPU time is less than the time that training takes.
    took = [
        (before, *(start.cpu_s if is_cpu else start.wall_s), min(start.train_s) if is_cpu else start.train_s[0])
        for start in found.starts
    ]
    if found.evaluation_s is not None:
        # The first evaluation of a round that compiles takes longest; this job does not compile.
        listed = sorted(found.evaluations_s)[: -1 if work.settings.compile != "off" else None]
        took.append(("in evaluations", sum(listed), len(listed) * found.evaluation_s, train_s))
    for phase, own_s, other_s, timed_s in took:
        if own_s - other_s > max(MIN_UNTIMED_S, MAX_UNTIMED * timed_s):
            actual = f"a rank took {own_s:.1f} s {phase}, without the vendor's code {other_s:.1f} s"
            yield finding("open", "untimed-work", "as much untimed work as without the vendor's code", actual)
            return


def reevaluation_findings(entry: RoundEvidence, found: Reevaluation) -> Findings:
    """Check that the weights have the metrics that training reported."""
    if found.problem is not None:
        yield deviation(entry, "reevaluation", "", f"the evaluation job did not complete: {found.problem}")
    for name, value in found.reported.items() if found.metrics is not None else ():
        other = (found.metrics or {}).get(name)
        is_equal = value is other
        if value is not None and other is not None:
            is_equal = math.isclose(value, other, rel_tol=METRIC_TOLERANCE, abs_tol=1e-9)
        if not is_equal:
            both = f"reported {_text(value)}, evaluated in a fresh process {_text(other)}"
            actual = f"{name} of the last evaluation: {both}"
            yield finding("error", "reevaluated-metric", f"equal within {limit_percent(METRIC_TOLERANCE)}", actual)
    target = entry.result.target
    if found.claimed is not None and target is not None:
        metric = found.claimed.get(target.metric)
        if metric is None or not target.reached(metric):
            actual = f"the weights with which training reported it have {target.metric} {_text(metric)}"
            yield finding("error", "reevaluated-target", f"{target.metric} {target.value:g}", actual)


def replay_findings(entry: RoundEvidence, work: TrainingWork, found: Reevaluation) -> Findings:
    """Check that replayed steps have the losses and the effect on the parameters that training had."""
    tolerance = REPLAY_TOLERANCES[work.settings.precision]
    for warning in found.warnings:
        yield finding("open" if "replay" in warning else "warning", "replay", "", warning)
    has_pair = any(replay.start is not None for replay in found.replays)
    if work.settings.checkpoint.replay_mib == 0:
        yield finding("open", "replay", "pairs of checkpoints", "checkpoint.replay_mib is 0: no pair was kept")
    elif found.problem is None and entry.result.num_steps >= MIN_STEPS_WITH_PAIR and not has_pair:
        within = f"within checkpoint.replay_mib ({work.settings.checkpoint.replay_mib})"
        why = "after the round was resumed" if "resumed" in entry.result.marks else within
        severity: Severity = "open" if entry.job is not None and entry.job.has_vendors_code else "warning"
        steps = f"of {entry.result.num_steps} steps only the first were replayed"
        actual = f"{steps}: no pair of checkpoints was kept {why}"
        yield finding(severity, "replay", "steps between two checkpoints replayed", actual)
    for attempt in found.unpaired:
        if len(attempt) >= MIN_STEPS_WITH_PAIR:
            actual = f"no pair of checkpoints was kept of the attempt with steps {attempt.start} to {attempt.stop - 1}"
            yield finding("open", "replay", "pairs of checkpoints of every attempt", actual)
    for replay in found.replays:
        yield from _loss_findings(entry, replay, tolerance)
        yield from _update_findings(entry, replay, tolerance)
        yield from _state_findings(entry, replay)


def _loss_findings(entry: RoundEvidence, replay: ReplayedSteps, tolerance: ReplayTolerance) -> Findings:
    last = min((step.step for step in replay.steps), default=0) + NUM_CLOSE_STEPS
    differences = [
        abs(step.replayed - step.reported) / max(abs(step.reported), 1e-12)
        if step.replayed is not None and step.reported is not None
        else math.nan
        for step in replay.steps
        if step.step < last
    ]
    difference = sum(differences) / len(differences) if differences else math.nan
    if not difference <= tolerance.loss:
        actual = f"the losses of the first of {replay.what} differ by {percent(difference, 3)} on average in the replay"
        expected = f"equal within {limit_percent(tolerance.loss)} ({tolerance.origin})"
        yield deviation(entry, "replayed-losses", expected, actual)
    correlation = loss_correlation(replay.steps)
    if correlation is not None and not correlation >= MIN_LOSS_CORRELATION:
        actual = f"the losses of {replay.what} change from step to step with a correlation of {correlation:.2f}"
        yield deviation(entry, "replayed-losses", f"at least {MIN_LOSS_CORRELATION:g} with the replay's", actual)


def _update_findings(entry: RoundEvidence, replay: ReplayedSteps, tolerance: ReplayTolerance) -> Findings:
    update = replay.update
    if update is None:
        return
    if not (update.replayed > 0 and math.isfinite(update.saved) and math.isfinite(update.difference)):
        yield deviation(entry, "replayed-update", "", f"the parameters' change over {replay.what} is not finite or 0")
        return
    difference = update.relative_difference
    if replay.num_steps <= NUM_CLOSE_STEPS:
        if difference > tolerance.update:
            actual = f"the parameters' change over {replay.what} differs by {percent(difference, 3)} from the replay's"
            expected = f"equal within {limit_percent(tolerance.update)} ({tolerance.origin})"
            yield deviation(entry, "replayed-update", expected, actual)
        return
    cosine = 1 - (1 - tolerance.cosine) * math.sqrt(replay.num_steps / MOST_STEPS)
    norms = NORM_TOLERANCE * max(1.0, replay.num_steps / 64)
    if abs(update.norms - 1) > norms or update.cosine < cosine:
        size = f"{update.norms:.2f} times the replay's, cosine {update.cosine:.2f}"
        actual = f"the parameters' change over {replay.what} is {size}"
        expected = f"within {limit_percent(norms)} of it, cosine at least {cosine:.2f}"
        yield deviation(entry, "replayed-update", expected, actual)


def _state_findings(entry: RoundEvidence, replay: ReplayedSteps) -> Findings:
    """Compare buffers and optimizer state at the end, from which later steps go on."""
    update = replay.update.relative_difference if replay.update is not None else 0.0
    for kind, squares in replay.state.items():
        if kind == "buffers" and replay.start is None:
            continue  # a vendor may move them before the first steps, by a pass that warms up
        least, per_update, most = _STATE_TOLERANCES["buffers" if kind == "buffers" else "optimizer"]
        limit = min(least + per_update * update, most)
        difference = squares.relative_difference
        if not difference <= limit:
            actual = f"{kind} after {replay.what} differ by {percent(difference, 3)} from the replay's"
            yield deviation(entry, "replayed-update", f"equal within {limit_percent(limit)}", actual)


def loss_correlation(steps: Iterable[ReplayedStep]) -> float | None:
    """Return the lowest correlation of any rank between the reported and replayed losses' changes from step to step.

    It shows whether each step computed its own batch. None where losses are missing, constant or too few.
    """
    of_ranks: dict[int, list[tuple[float, float]]] = {}
    for step in steps:
        if step.reported is None or step.replayed is None:
            return None
        of_ranks.setdefault(step.rank, []).append((step.reported, step.replayed))
    lowest: float | None = None
    for losses in of_ranks.values():
        if len(losses) < 2 * NUM_CLOSE_STEPS:
            return None
        changes = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(losses)]
        try:
            correlation = statistics.correlation(*zip(*changes, strict=True))
        except statistics.StatisticsError:
            return None
        lowest = correlation if lowest is None else min(lowest, correlation)
    return lowest


def _text(number: float | None) -> str:
    return "no finite value" if number is None else f"{number:.6g}"
