"""Compute the figures of a training round from its timeline: each is a value, or null with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from accelmark.results.figure_names import FigureName
from accelmark.results.figures.timeline import Timeline
from accelmark.results.schema import Figure
from accelmark.spec.job import JobSpec, TrainingWork

Figures = dict[FigureName, Figure]

FLOPS_TOLERANCE: Final = 0.05
"""Relative difference of the counted FLOPs from the case's formula that causes a warning."""


_WINDOWS_ONLY: Final = "the framework times windows of steps, not single steps"

_COMPARATORS: Final = {"at_least": "≥", "at_most": "≤"}


@final
@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work, in the unit that the case counts."""

    units: int
    units_per_sample: int
    num_devices: int
    """One rank a device."""
    no_work: str
    """The reason of figures where nothing was trained."""


def value(number: float | None, reason: str) -> Figure:
    """Return a figure; ``reason`` applies where ``number`` is None or not finite."""
    if number is None or number - number != 0:
        return Figure(value=None, reason=reason)
    return Figure(value=number)


def ratio(over: float | None, under: float | None, reason: str) -> Figure:
    """Return a quotient; null with ``reason`` where an operand is None or the divisor is not positive."""
    return value(over / under if over is not None and under and under > 0 else None, reason)


def work_of(job: JobSpec, timeline: Timeline) -> Work:
    """Return the units that all ranks trained."""
    per_sample = job.work.units_per_sample
    why = "no window of steps was completed" if timeline.init_s is not None else "training did not start"
    return Work(timeline.num_samples * per_sample, per_sample, job.key.world_size, why)


def time_figures(timeline: Timeline, work: Work) -> Figures:
    """Return times of the lead rank, throughput of all ranks, and percentiles of step times."""
    began = timeline.init_s is not None
    training_s = timeline.train_s - timeline.eval_s
    why = work.no_work
    why_steps = _WINDOWS_ONLY if timeline.num_steps and not len(timeline.step_ms) else why
    units = work.units or None
    per_second = ratio(units, training_s, why)
    figures: Figures = {
        FigureName.E2E_TIME: value(timeline.e2e_s, why),
        FigureName.INIT_TIME: value(timeline.init_s, "training did not start"),
        FigureName.RAW_TRAIN_TIME: value(timeline.train_s if began else None, "training did not start"),
        FigureName.TRAIN_NO_EVAL_TIME: value(training_s if began else None, "training did not start"),
        FigureName.PURE_COMPUTE_TIME: value(timeline.compute_s or None, why_steps),
        FigureName.THROUGHPUT_WHOLE: ratio(units, timeline.train_s, why),
        FigureName.THROUGHPUT_TRAIN: per_second,
        FigureName.THROUGHPUT_CORE: ratio(units, timeline.compute_s, why_steps),
        FigureName.THROUGHPUT_PER_DEVICE: ratio(per_second.value, work.num_devices, why),
        FigureName.DATA_WAIT_SHARE: ratio(timeline.data_wait_s if units else None, training_s, why),
    }
    return figures | _step_figures(timeline, why_steps)


def _step_figures(timeline: Timeline, why: str) -> Figures:
    import numpy as np

    names = (FigureName.STEP_P50, FigureName.STEP_P90, FigureName.STEP_P99)
    if not len(timeline.step_ms):
        return {name: Figure(value=None, reason=why) for name in names}
    percentiles = np.percentile(timeline.step_ms, (50, 90, 99))
    return {name: value(float(p), "a step's time is not finite") for name, p in zip(names, percentiles, strict=True)}


def outcome_figures(timeline: Timeline, work: Work, train: TrainingWork) -> Figures:
    """Return loss, metric and time to target."""
    loss_reason = work.no_work
    if timeline.num_steps:
        loss_reason = f"the loss of step {timeline.num_steps} is not finite"
    figures = {FigureName.FINAL_LOSS: value(timeline.final_loss, loss_reason)}
    target = train.target
    if train.settings.loader.synthetic:
        why = "synthetic data has no accuracy"
    elif target is None:
        why = "the case states no target"
    elif not timeline.evaluations:
        why = "no evaluation was run"
    else:
        why = ""
    if why or target is None:
        none = Figure(value=None, reason=why)
        return figures | {FigureName.FINAL_METRIC: none, FigureName.TIME_TO_TARGET: none}
    last = timeline.evaluations[-1].evaluation
    hit = first_hit(timeline, train)
    figures[FigureName.FINAL_METRIC] = value(
        last.metrics.get(target.metric), f"the last evaluation has no finite {target.metric}"
    )
    figures[FigureName.TIME_TO_TARGET] = value(
        None if hit is None else hit,
        f"no evaluation reached {target.metric} {_COMPARATORS[target.direction]} {target.value:g}",
    )
    return figures


def first_hit(timeline: Timeline, train: TrainingWork) -> float | None:
    """Return the raw training time at the end of the first evaluation that reached the target, or None."""
    if train.target is None:
        return None
    for timed in timeline.evaluations:
        metric = timed.evaluation.metrics.get(train.target.metric)
        if metric is not None and train.target.reached(metric):
            return timed.time_s
    return None


def converged(timeline: Timeline | None, train: TrainingWork) -> bool | None:
    """Return whether target and reference loss were reached; None without either, or for synthetic data."""
    if train.settings.loader.synthetic or (train.target is None and train.reference_loss is None):
        return None
    if timeline is None:
        return False
    if train.target is not None and first_hit(timeline, train) is None:
        return False
    error = reference_error(timeline, train)
    return train.reference_loss is None or (error is not None and error <= train.reference_loss.max_mean_relative_error)


def reference_error(timeline: Timeline, train: TrainingWork) -> float | None:
    """Return the mean relative error of the loss against the reference curve; None if steps are missing."""
    reference = train.reference_loss
    if reference is None or not reference.steps or max(reference.steps) > len(timeline.losses):
        return None
    errors = [
        abs(float(timeline.losses[step - 1]) - expected) / abs(expected)
        for step, expected in zip(reference.steps, reference.loss, strict=True)
    ]
    mean = sum(errors) / len(errors)
    return mean if mean == mean else None


def compute_figures(job: JobSpec, timeline: Timeline, work: Work, per_device: Figure, precision: str) -> Figures:
    """Return model FLOPs, model TFLOP/s per device, and MFU."""
    flops = _flops_per_sample(timeline)
    reason = flops.reason or work.no_work
    achieved = None
    if flops.value is not None and per_device.value is not None:
        achieved = per_device.value * flops.value / work.units_per_sample / 1e12
    elif flops.value is not None:
        reason = per_device.reason or work.no_work
    peak, why_no_peak = _peak(job, timeline, precision)
    return {
        FigureName.FLOPS_PER_SAMPLE: flops,
        FigureName.ACHIEVED_TFLOPS: value(achieved, reason),
        FigureName.MFU: ratio(achieved, peak, why_no_peak or reason),
    }


def mfu_measured(achieved: Figure, ceiling_tflops: float | None, reason: str) -> Figure:
    """Return ``achieved`` (TFLOP/s of one device) over the matmul rate that the probe measured."""
    return ratio(achieved.value, ceiling_tflops, achieved.reason or reason)


def _flops_per_sample(timeline: Timeline) -> Figure:
    finished = timeline.lead_end.finished
    if finished is None:
        return Figure(value=None, reason=f"rank {timeline.lead} wrote no FINISHED event, which has the model's FLOPs")
    if finished.flops_per_sample:
        return Figure(value=finished.flops_per_sample)
    if finished.flops_per_sample_formula:
        return Figure(
            value=finished.flops_per_sample_formula, reason="from the case's formula; they could not be counted"
        )
    return Figure(value=None, reason="the model's FLOPs could not be counted and the case has no formula")


def _peak(job: JobSpec, timeline: Timeline, precision: str) -> tuple[float | None, str | None]:
    """Return the chip's dense peak in TFLOP/s for the precision, or None and the reason."""
    if job.chip is None:
        started = timeline.lead_end.started
        device = started.device_name if started else None
        named = f"the device {device!r}" if device else f"{job.key.hardware}"
        return None, f"the peak of {named} is unknown: vendor {job.vendor} does not describe this chip"
    peak = getattr(job.chip.peaks, precision, None)
    if peak is None:
        name = f"{job.chip.name} {job.chip.variant}".strip()
        return None, f"vendor {job.vendor} states no dense {precision} peak for {name}"
    return float(peak), None


def memory_figure(timeline: Timeline, device_type: str) -> Figure:
    """Return the largest allocation on any device, as reported by the framework."""
    peaks = [
        end.finished.peak_device_memory_mib
        for end in timeline.ranks
        if end.finished and end.finished.peak_device_memory_mib is not None
    ]
    if peaks:
        return Figure(value=max(peaks))
    if not any(end.finished for end in timeline.ranks):
        return Figure(value=None, reason="no rank wrote a FINISHED event, which has the peak allocation")
    return Figure(value=None, reason=f"the framework reports no peak allocation on {device_type}")
