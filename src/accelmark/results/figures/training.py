"""Compute the figures of a training round from its timeline: each is a value, or null with a reason.

Figures that the log of an external trainer lacks the data for are null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from accelmark.results.figure_names import FigureName as F
from accelmark.results.figures.timeline import Timeline
from accelmark.results.read.reevaluation import Reevaluation
from accelmark.results.schema import Figure
from accelmark.spec.job import JobSpec, TrainingWork, TrainJob
from accelmark.spec.plugins.case import Target
from accelmark.spec.plugins.trainer import TrainerSpec

Figures = dict[F, Figure]

FLOPS_TOLERANCE: Final = 0.05
"""Relative difference of the counted FLOPs from the case's formula that causes a warning."""


_WINDOWS_ONLY: Final = "the framework times windows of steps, not single steps"

_COMPARATORS: Final = {"at_least": "≥", "at_most": "≤"}


def value(number: float | None, reason: str) -> Figure:
    """Return a figure; ``reason`` applies where ``number`` is None or not finite."""
    if number is None or number - number != 0:
        return Figure(value=None, reason=reason)
    return Figure(value=number)


def ratio(over: float | None, under: float | None, reason: str) -> Figure:
    """Return a quotient; null with ``reason`` where an operand is None or the divisor is not positive."""
    return value(over / under if over is not None and under and under > 0 else None, reason)


def no_work(timeline: Timeline) -> str:
    """Return the reason of figures where nothing was trained."""
    return "training did not start" if timeline.init_s is None else "no window of steps was completed"


def time_figures(timeline: Timeline, units: int, num_devices: int) -> Figures:
    """Return times of the lead rank, throughput of all ranks (in units of the case), and percentiles of step times."""
    began = timeline.init_s is not None
    training_s = timeline.train_s - timeline.eval_s
    why = no_work(timeline)
    why_steps = _WINDOWS_ONLY if timeline.num_steps and not len(timeline.step_ms) else why
    per_second = ratio(units or None, training_s, why)
    figures: Figures = {
        F.E2E_TIME: value(timeline.e2e_s, why),
        F.INIT_TIME: value(timeline.init_s, why),
        F.RAW_TRAIN_TIME: value(timeline.train_s if began else None, why),
        F.TRAIN_NO_EVAL_TIME: value(training_s if began else None, why),
        F.PURE_COMPUTE_TIME: value(timeline.compute_s or None, why_steps),
        F.THROUGHPUT_WHOLE: ratio(units or None, timeline.train_s, why),
        F.THROUGHPUT_TRAIN: per_second,
        F.THROUGHPUT_CORE: ratio(units or None, timeline.compute_s, why_steps),
        F.THROUGHPUT_PER_DEVICE: ratio(per_second.value, num_devices, why),
        F.DATA_WAIT_SHARE: ratio(timeline.data_wait_s if units else None, training_s, why),
    }
    return figures | _step_figures(timeline, why_steps)


def _step_figures(timeline: Timeline, why: str) -> Figures:
    names = (F.STEP_P50, F.STEP_P90, F.STEP_P99)
    if not len(timeline.step_ms):
        return {name: value(None, why) for name in names}
    percentiles = np.percentile(timeline.step_ms, (50, 90, 99))
    return {name: value(float(p), "a step's time is not finite") for name, p in zip(names, percentiles, strict=True)}


def outcome_figures(timeline: Timeline, train: TrainingWork, checked: Reevaluation | None) -> Figures:
    """Return loss, metric and time to target; metrics are those that a fresh process found, where there was one."""
    steps = timeline.num_steps
    loss = value(timeline.final_loss, f"the loss of step {steps} is not finite" if steps else no_work(timeline))
    target = train.target
    if train.settings.loader.synthetic:
        metric = to_target = value(None, "synthetic data has no accuracy")
    elif target is None:
        metric = to_target = value(None, "the case states no target")
    elif not timeline.evaluations:
        metric = to_target = value(None, "no evaluation was run")
    else:
        last = timeline.evaluations[-1].evaluation
        goal = f"{target.metric} {_COMPARATORS[target.direction]} {target.value:g}"
        metrics = last.metrics if checked is None or not is_checked(train) else checked.metrics or {}
        unknown = "the weights were not evaluated after training" if _is_unevaluated(train, checked) else ""
        metric = value(metrics.get(target.metric), unknown or f"the last evaluation has no finite {target.metric}")
        to_target = value(first_hit(timeline, train, checked), unknown or f"no evaluation reached {goal}")
    return {F.FINAL_LOSS: loss, F.FINAL_METRIC: metric, F.TIME_TO_TARGET: to_target}


def is_checked(train: TrainingWork) -> bool:
    """Return whether only metrics of the evaluation job count; not so in runs of earlier versions."""
    return isinstance(train, TrainJob) and train.is_checked


def _is_unevaluated(train: TrainingWork, checked: Reevaluation | None) -> bool:
    """Return whether metrics of the evaluation job are needed, and it has none."""
    return is_checked(train) and (checked is None or not (checked.claimed or checked.metrics))


def first_hit(timeline: Timeline, train: TrainingWork, checked: Reevaluation | None) -> float | None:
    """Return the raw training time at the end of the first evaluation that reached the target, or None.

    None too where the weights of that evaluation did not reach it in a fresh process.
    """
    target = train.target
    if target is None:
        return None
    if is_checked(train):
        found = None if checked is None else checked.claimed or checked.metrics
        metric = None if found is None else found.get(target.metric)
        if metric is None or not target.reached(metric):
            return None
    return _reported_hit(timeline, target)


def _reported_hit(timeline: Timeline, target: Target) -> float | None:
    """Return the raw training time at the end of the first evaluation in the ranks that reached the target, or None."""
    metrics = ((timed.time_s, timed.evaluation.metrics.get(target.metric)) for timed in timeline.evaluations)
    return next((time_s for time_s, metric in metrics if metric is not None and target.reached(metric)), None)


def converged(
    timeline: Timeline | None, train: TrainingWork, samples_per_step: int, checked: Reevaluation | None
) -> bool | None:
    """Return whether target and reference loss were reached.

    None without either, for synthetic data, and where ranks reached the target but the evaluation job has no metric.
    """
    reference = train.reference_loss
    reference = reference if reference is not None and reference.applies(samples_per_step) else None
    if train.settings.loader.synthetic or (train.target is None and reference is None):
        return None
    if timeline is None:
        return False
    if train.target is not None and first_hit(timeline, train, checked) is None:
        is_unknown = _is_unevaluated(train, checked) and _reported_hit(timeline, train.target) is not None
        return None if is_unknown else False
    error = reference_error(timeline, train)
    return reference is None or (error is not None and error <= reference.max_mean_relative_error)


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


def compute_figures(job: JobSpec, timeline: Timeline, per_device: Figure, precision: str) -> Figures:
    """Return model FLOPs, model TFLOP/s per device, and MFU against the chip's peak and the probe's ceiling."""
    flops = _flops_per_sample(timeline)
    reason = flops.reason or no_work(timeline)
    achieved = None
    if flops.value is not None and per_device.value is not None:
        achieved = per_device.value * flops.value / job.work.units_per_sample / 1e12
    elif flops.value is not None:
        reason = per_device.reason or reason
    peak, why_no_peak = _peak(job, timeline, precision)
    ceiling, why_no_ceiling = measured_ceiling(job, precision)
    return {
        F.FLOPS_PER_SAMPLE: flops,
        F.ACHIEVED_TFLOPS: value(achieved, reason),
        F.MFU: ratio(achieved, peak, why_no_peak or reason),
        F.MFU_MEASURED: ratio(achieved, ceiling, reason if achieved is None else why_no_ceiling),
    }


def _flops_per_sample(timeline: Timeline) -> Figure:
    finished = timeline.lead_end.finished
    if finished is None:
        return value(None, f"rank {timeline.lead} wrote no FINISHED event, which has the model's FLOPs")
    if finished.flops_per_sample:
        return Figure(value=finished.flops_per_sample)
    if finished.flops_per_sample_formula:
        note = "from the case's formula; they could not be counted"
        return Figure(value=finished.flops_per_sample_formula, reason=note)
    return value(None, "the model's FLOPs could not be counted and the case has no formula")


def _peak(job: JobSpec, timeline: Timeline, precision: str) -> tuple[float | None, str | None]:
    """Return the chip's dense peak in TFLOP/s for the precision, or None and the reason."""
    if job.chip is None:
        started = timeline.lead_end.started
        named = f"the device {started.device_name!r}" if started and started.device_name else job.key.hardware
        return None, f"the peak of {named} is unknown: vendor {job.vendor} does not describe this chip"
    peak = getattr(job.chip.peaks, precision, None)
    if peak is None:
        return None, f"vendor {job.vendor} states no dense {precision} peak for {job.chip.title}"
    return float(peak), None


def measured_ceiling(job: JobSpec, precision: str) -> tuple[float | None, str]:
    """Return the matmul rate that the probe measured for ``precision`` in TFLOP/s, or None and the reason."""
    if job.ceilings is None:
        return None, "the device was not probed: run 'accelmark probe' to measure its ceilings"
    if job.ceilings.disturbed:
        busy = "; ".join(job.ceilings.disturbed)
        return None, f"the host was busy during the probe ({busy}): run 'accelmark probe' again on an idle host"
    rate = job.ceilings.matmul.get(precision)
    if rate is None or rate.value is None:
        return None, (rate.reason if rate is not None else None) or f"the probe did not measure {precision}"
    return rate.value, ""


def memory_figure(timeline: Timeline, device_type: str) -> Figure:
    """Return the largest allocation on any device, as reported by the framework."""
    finished = [end.finished for end in timeline.ranks if end.finished]
    peaks = [end.peak_device_memory_mib for end in finished if end.peak_device_memory_mib is not None]
    why = f"the framework reports no peak allocation on {device_type}"
    if not finished:
        why = "no rank wrote a FINISHED event, which has the peak allocation"
    return value(max(peaks, default=None), why)


_NEEDS_STEP_TIME: Final = (F.PURE_COMPUTE_TIME, F.THROUGHPUT_CORE, F.STEP_P50, F.STEP_P90, F.STEP_P99)
_NEEDS_EVALUATION_TIME: Final = (F.TRAIN_NO_EVAL_TIME, F.THROUGHPUT_TRAIN, F.THROUGHPUT_PER_DEVICE)
_NOT_IN_LOGS: Final = {
    **dict.fromkeys((F.FLOPS_PER_SAMPLE, F.ACHIEVED_TFLOPS, F.MFU, F.MFU_MEASURED), "the FLOPs of its model"),
    F.DATA_WAIT_SHARE: "waiting for data",
    F.PEAK_DEVICE_MEMORY: "its peak allocation",
}


def limited_to_log(figures: Mapping[F, Figure], trainer: TrainerSpec) -> dict[F, Figure]:
    """Return ``figures`` with null and the reason for each that cannot be computed from the trainer's log."""
    log, whose = trainer.log, f"the log of trainer {trainer.name}"
    missing = {name: f"{whose} does not give {what}" for name, what in _NOT_IN_LOGS.items()}
    if "step_time" not in log.step_groups():
        missing |= dict.fromkeys(_NEEDS_STEP_TIME, f"{whose} has no time of single steps")
    if "loss" not in log.step_groups():
        missing[F.FINAL_LOSS] = f"{whose} has no loss"
    if log.evaluation is None:
        missing[F.FINAL_METRIC] = f"{whose} has no evaluation"
    elif "duration" not in log.evaluation_groups():
        missing |= dict.fromkeys(_NEEDS_EVALUATION_TIME, f"{whose} does not give the time of an evaluation")
    return {name: Figure(value=None, reason=missing[name]) if name in missing else figures[name] for name in figures}
