"""Compute the figures of an inference run from its windows, and the reasons that make it invalid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from accelmark.results.schema import Figure
from accelmark.spec.log.inference import AnswerCheck, ForwardWindow, RepeatCheck
from accelmark.spec.number_format import limit_percent, percent
from accelmark.spec.settings.inference import ANSWER_LIMITS, InferPrecision, Reference

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


class PhaseFigures(NamedTuple):
    """Speed of one phase: validation or inference."""

    whole: Figure
    """Items per second with data loading and evaluation."""
    core: Figure
    """Items per second of computation and copies to and from the device."""
    latency_ms: Mapping[str, Figure]
    """Percentiles over full batches."""
    declared: Figure
    """Share of the calls' time that the engine declared as not inference."""


def phase_figures(windows: Sequence[ForwardWindow], batch_size: int, absent: str) -> PhaseFigures:
    """Return the figures of one phase; ``absent`` is the reason where it has no windows."""
    items = sum(sum(window.items) for window in windows)
    if not items:
        none = Figure(value=None, reason=absent)
        return PhaseFigures(none, none, dict.fromkeys(PERCENTILES, none), none)
    other_ms = sum(sum(window.not_inference_ms) for window in windows)
    wall_ms = sum(window.wall_ms for window in windows) - other_ms
    core_ms = sum(_computed_ms(window) for window in windows)
    latencies = full_batch_latencies(windows, batch_size)
    return PhaseFigures(
        whole=_rate(items, wall_ms),
        core=_rate(items, core_ms),
        latency_ms={name: percentile(latencies, share) for name, share in PERCENTILES.items()},
        declared=Figure(value=other_ms / (other_ms + core_ms) if other_ms + core_ms > 0 else 0.0),
    )


def _computed_ms(window: ForwardWindow) -> float:
    return sum(window.latency_ms) if window.computed_ms is None else window.computed_ms


def crossing_share(windows: Sequence[ForwardWindow]) -> float | None:
    """Return the part of the windows that is outside of the engine's calls; None where it was not measured."""
    crossings = [window.crossing_ms for window in windows if window.crossing_ms is not None]
    total_ms = sum(_computed_ms(window) + sum(window.not_inference_ms) for window in windows)
    return sum(crossings) / total_ms if crossings and total_ms > 0 else None


def full_batch_latencies(windows: Iterable[ForwardWindow], batch_size: int) -> list[float]:
    """Return the latency in ms of each full batch, sorted."""
    return sorted(
        latency
        for window in windows
        for count, latency in zip(window.items, window.latency_ms, strict=True)
        if count == batch_size
    )


def latency_curve(ordered: Sequence[float] | npt.NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """Return (share of samples, latency in ms) in steps of 1 %, in finer steps from 99 %; ``ordered`` is sorted."""
    if not len(ordered):
        return ()
    last = len(ordered) - 1
    shares = [point / 100 for point in range(100)] + [1 - 10 ** (-nines / 10) for nines in range(20, 41)]
    indices = sorted({round(last * share) for share in shares} | {last})
    return tuple(((index + 1) / len(ordered), round(float(ordered[index]), 5)) for index in indices)


def _rate(items: int, took_ms: float) -> Figure:
    if took_ms <= 0:
        return Figure(value=None, reason="the engine declared all time as not inference")
    return Figure(value=items / (took_ms / 1000))


def percentile(ordered: Sequence[float], share: float) -> Figure:
    """Return the nearest-rank percentile; null where there are too few values for one to exceed it."""
    needed = math.ceil(1 / (1 - share) - 1e-9)
    if len(ordered) < needed:
        return Figure(value=None, reason=f"needs {needed} full batches, {len(ordered)} were measured")
    return Figure(value=ordered[math.ceil(share * len(ordered) - 1e-9) - 1])


def mfu(items_per_s: Figure, flops_per_item: float | None, peak_tflops: float | None) -> Figure:
    """Return the model's FLOP/s over the chip's dense peak for the precision used."""
    if items_per_s.value is None:
        return items_per_s
    if flops_per_item is None or peak_tflops is None:
        why = "the case states no flops" if flops_per_item is None else "the chip's peak at this precision is unknown"
        return Figure(value=None, reason=why)
    return Figure(value=items_per_s.value * flops_per_item / (peak_tflops * 1e12))


def invalid_reasons(
    *,
    metric: str,
    validation: float | None,
    inference: float | None,
    tolerance: float,
    reference: Reference | None,
    nonfinite_batches: int,
    repeat_check: RepeatCheck | None,
    answers: AnswerCheck | None = None,
    precision: InferPrecision = "fp32",
) -> tuple[str, ...]:
    """Return the reasons that make an inference run invalid.

    ``validation`` is the framework's metric on the data, ``inference`` the engine's over all its inputs, which differ
    slightly from the data; ``answers`` has the metrics of both on the same inputs. NaN is invalid; a metric that was
    not measured (None) is not, the rule ``accuracy-gate`` covers it.
    """
    reasons: list[str] = []
    if nonfinite_batches:
        reasons.append(f"{nonfinite_batches} batches have NaN or infinite outputs")
    for phase, value in (("validation", validation), ("inference", inference)):
        if value is not None and not math.isfinite(value):
            reasons.append(f"{metric} of {phase} is not finite")
    compared = answers.engine_metrics.get(metric) if answers is not None else None
    expected = answers.framework_metrics.get(metric) if answers is not None else None
    framework = validation if expected is None else expected
    for inputs, engine in (("the same inputs", compared), ("all inputs", inference)):
        if framework is not None and engine is not None and not abs(framework - engine) <= tolerance:
            reasons.append(
                f"{metric} is {engine:.4f} in the engine on {inputs} and {framework:.4f} in the framework, "
                f"a difference of more than {tolerance:g}"
            )
            break
    measured = validation if validation is not None else inference
    if reference is not None and measured is not None and not abs(measured - reference.value) <= reference.within:
        reasons.append(
            f"{metric} is {measured:.4f}, the reference is {reference.value:.4f} ± {reference.within:g} "
            f"({reference.source})"
        )
    if repeat_check is not None and repeat_check.suspicious:
        reasons.append(
            f"repeated items run {repeat_check.speedup:.2f} times as fast as new ones "
            f"(median of {repeat_check.num_batches} batches, limit {repeat_check.limit:g}): outputs may be cached"
        )
    if answers is not None and not nonfinite_batches:
        reasons += answer_reasons(answers, precision)
    return tuple(reasons)


def answer_reasons(answers: AnswerCheck, precision: InferPrecision, where: str = "") -> list[str]:
    """Return the reasons for which an engine's answers are not those of the model in ``precision``."""
    limits = ANSWER_LIMITS[precision]
    if not answers.num_items:
        return []
    reasons: list[str] = []
    for name, error, limit in (
        ("median", answers.median_error, limits.median_error), ("largest", answers.worst_error, limits.worst_error),
    ):  # fmt: skip
        if error is None or error > limit:
            value = "not finite" if error is None else f"{error:.2g}"
            reasons.append(
                f"the {name} error of the engine's answers{where} is {value} (limit for {precision}: {limit:g}), "
                f"against the framework's on {answers.num_items} inputs"
            )
    if answers.top1_agreement is not None and answers.top1_agreement < limits.top1_agreement:
        actual = (
            f"the engine's answers{where} have the framework's largest value in {percent(answers.top1_agreement, 4)} of"
        )
        reasons.append(f"{actual} the cases, at least {limit_percent(limits.top1_agreement)} expected for {precision}")
    if answers.sensitivity is not None and not limits.sensitivity <= answers.sensitivity:
        actual = f"the engine's answers follow small changes of the input by {percent(answers.sensitivity)}"
        reasons.append(f"{actual} (at least {limit_percent(limits.sensitivity)} expected): they may be looked up")
    return reasons
