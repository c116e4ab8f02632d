"""Compute the result of a training round: figures, findings, the slowest rank and the reference loss curve."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from accelmark.results import schema
from accelmark.results.figures import FigureName as F
from accelmark.results.figures import figures_of
from accelmark.results.read import round_dir as reading
from accelmark.results.read.round_dir import NodeDir, Reevaluation, SavedCheckpoints, node_dirs, read_job, read_json
from accelmark.results.rounds import hosts as recorded
from accelmark.results.rounds.consumption import HostSamples, consumption_figures, telemetry_series
from accelmark.results.rounds.timeline import Timeline, curves_of, histogram, read_timeline
from accelmark.results.schema import Figure, Figures, Finding, finding, ratio, value
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RunError
from accelmark.spec.job import ExternalJob, JobSpec, TrainingWork, TrainJob
from accelmark.spec.layers import flatten
from accelmark.spec.log.records import DATA_FILE
from accelmark.spec.number_format import counted, duration, limit_percent, percent
from accelmark.spec.plugins.case import ReferenceLoss, Target
from accelmark.spec.plugins.programs import TrainerSpec

FLOPS_TOLERANCE: Final = 0.05
"""Relative difference of the counted FLOPs from the case's formula that causes a warning."""


def no_work(timeline: Timeline) -> str:
    """Return the reason of figures where nothing was trained."""
    return "training did not start" if timeline.init_s is None else "no window of steps was completed"


def time_figures(timeline: Timeline, units: int, num_devices: int) -> Figures:
    """Return times of the lead rank, throughput of all ranks (in units of the case), and percentiles of step times."""
    began = timeline.init_s is not None
    training_s = timeline.train_s - timeline.eval_s
    why = no_work(timeline)
    windows_only = timeline.num_steps and not len(timeline.step_ms)
    why_steps = "the framework times windows of steps, not single steps" if windows_only else why
    warmup_s = sum(part.time_s for part in timeline.warm_ups)
    share_after = 1 - sum(part.num_steps for part in timeline.warm_ups) / max(timeline.num_steps, 1)
    steady = ratio(units * share_after or None, training_s - warmup_s, why)
    bounded = "a third of the steps: until then, step time did not settle"
    is_bounded = any(part.is_bounded for part in timeline.warm_ups)
    figures: Figures = {
        F.E2E_TIME: value(timeline.e2e_s, why),
        F.INIT_TIME: value(timeline.init_s, why),
        F.WARMUP_TIME: Figure(value=warmup_s, reason=bounded if is_bounded else None) if units else value(None, why),
        F.RAW_TRAIN_TIME: value(timeline.train_s if began else None, why),
        F.TRAIN_NO_EVAL_TIME: value(training_s if began else None, why),
        F.PURE_COMPUTE_TIME: value(timeline.compute_s or None, why_steps),
        F.THROUGHPUT_WHOLE: ratio(units or None, timeline.train_s, why),
        F.THROUGHPUT_TRAIN: ratio(units or None, training_s, why),
        F.THROUGHPUT_STEADY: steady,
        F.THROUGHPUT_CORE: ratio(units or None, timeline.compute_s, why_steps),
        F.THROUGHPUT_PER_DEVICE: ratio(steady.value, num_devices, why),
        F.DATA_WAIT_SHARE: ratio(timeline.data_wait_s if units else None, training_s, why),
    }
    steps = (F.STEP_P50, F.STEP_P90, F.STEP_P99)
    percentiles = np.percentile(timeline.step_ms, (50, 90, 99)) if len(timeline.step_ms) else (None,) * 3
    why_steps = "a step's time is not finite" if len(timeline.step_ms) else why_steps
    return figures | {name: value(ms, why_steps) for name, ms in zip_strict(steps, percentiles)}


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
        _, last = timeline.evaluations[-1]
        metrics = last.metrics if checked is None or not is_checked(train) else checked.metrics or {}
        unknown = "the weights were not evaluated after training" if _is_unevaluated(train, checked) else ""
        metric = value(metrics.get(target.metric), unknown or f"the last evaluation has no finite {target.metric}")
        to_target = value(first_hit(timeline, train, checked), unknown or f"no evaluation reached {target.text}")
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
        metrics = None if checked is None else checked.claimed or checked.metrics
        metric = None if metrics is None else metrics.get(target.metric)
        if metric is None or not target.reached(metric):
            return None
    return _reported_hit(timeline, target)


def _reported_hit(timeline: Timeline, target: Target) -> float | None:
    """Return the same by the evaluations in the ranks alone."""
    metrics = ((time_s, evaluation.metrics.get(target.metric)) for time_s, evaluation in timeline.evaluations)
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
    points = zip_strict(reference.steps, reference.loss)
    errors = [abs(float(timeline.losses[step - 1]) - expected) / abs(expected) for step, expected in points]
    mean = sum(errors) / len(errors)
    return mean if mean == mean else None


def compute_figures(job: JobSpec, timeline: Timeline, per_device: Figure, precision: str) -> Figures:
    """Return model FLOPs, model TFLOP/s per device, and MFU against the chip's peak and the probe's ceiling."""
    finished, started = timeline.lead.end.finished, timeline.lead.end.started
    if finished is None:
        flops = value(None, f"rank {timeline.lead.end.rank} wrote no FINISHED event, which has the model's FLOPs")
    elif not finished.flops_per_sample and finished.flops_per_sample_formula:
        flops = Figure(value=finished.flops_per_sample_formula, reason="from the case's formula; they were not counted")
    else:
        unknown = "the model's FLOPs could not be counted and the case has no formula"
        flops = value(finished.flops_per_sample or None, unknown)
    reason = flops.reason or no_work(timeline)
    achieved = None
    if flops.value is not None and per_device.value is not None:
        achieved = per_device.value * flops.value / job.work.units_per_sample / 1e12
    elif flops.value is not None:
        reason = per_device.reason or reason
    peak: float | None = getattr(job.chip.peaks, precision, None) if job.chip is not None else None
    no_peak = reason
    if job.chip is None:
        named = f"the device {started.device_name!r}" if started and started.device_name else job.key.hardware
        no_peak = f"the peak of {named} is unknown: vendor {job.vendor} does not describe this chip"
    elif peak is None:
        no_peak = f"vendor {job.vendor} states no dense {precision} peak for {job.chip.title}"
    ceiling, no_ceiling = measured_ceiling(job, precision)
    rates = {F.ACHIEVED_TFLOPS: value(achieved, reason), F.MFU: ratio(achieved, peak, no_peak)}
    measured = ratio(achieved, ceiling, reason if achieved is None else no_ceiling)
    return {F.FLOPS_PER_SAMPLE: flops, **rates, F.MFU_MEASURED: measured}


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


_NEEDS_STEP_TIME: Final = (F.PURE_COMPUTE_TIME, F.THROUGHPUT_CORE, F.STEP_P50, F.STEP_P90, F.STEP_P99)
_NEEDS_EVALUATION_TIME: Final = (
    F.TRAIN_NO_EVAL_TIME, F.THROUGHPUT_TRAIN, F.THROUGHPUT_STEADY, F.THROUGHPUT_PER_DEVICE,
)  # fmt: skip
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
    elif "(?P<duration>" not in log.evaluation:
        missing |= dict.fromkeys(_NEEDS_EVALUATION_TIME, f"{whose} does not give the time of an evaluation")
    return {name: Figure(value=None, reason=missing[name]) if name in missing else figures[name] for name in figures}


MAX_SHARE: Final = 0.02
"""Share of a step that one rank may cost the others."""


def times_of_ranks(timeline: Timeline, nodes: Iterable[NodeDir]) -> tuple[schema.RankTimes | None, str | None]:
    """Return where the time of each of several ranks went, or why that is not known."""
    if len(timeline.ranks) < 2:
        return None, None
    if len(timeline.own) != len(timeline.ranks):
        started = timeline.lead.end.started
        why = f"{len(timeline.own)} of {len(timeline.ranks)} ranks logged their own part of steps"
        return None, (started.own_part_unknown if started is not None else None) or why
    hosts = {rank: node.host for node in nodes for rank, _ in node.rank_logs()}
    rest_ms = {rank: (own.step_ms - own.own_ms) / own.num_steps for rank, own in timeline.own.items()}
    least_ms = min(rest_ms.values())
    ranks = []
    for rank, own in sorted(timeline.own.items()):
        data_wait_ms = own.data_wait_ms / max(1, own.num_waits)
        rank_time = schema.RankTime(
            rank=rank,
            host=hosts[rank],
            step_ms=own.step_ms / own.num_steps + data_wait_ms,
            data_wait_ms=data_wait_ms,
            own_ms=own.own_ms / own.num_steps,
            wait_ms=rest_ms[rank] - least_ms,
            longest_s=own.longest_ms / 1e3,
            num_steps=own.num_steps,
        )
        ranks.append(rank_time)
    return schema.RankTimes(ranks=tuple(ranks), straggler=find_straggler(tuple(ranks))), None


def find_straggler(ranks: tuple[schema.RankTime, ...]) -> schema.Straggler | None:
    """Return the rank that costs the others more than :data:`MAX_SHARE` of a step, None where none does."""
    slowest = max(ranks, key=lambda rank: rank.busy_ms)
    others = [rank for rank in ranks if rank is not slowest]
    limit_ms = MAX_SHARE * median(rank.step_ms for rank in ranks)
    lost_ms = slowest.busy_ms - median(rank.busy_ms for rank in others)
    if lost_ms <= limit_ms:
        return None
    data_ms = slowest.data_wait_ms - median(rank.data_wait_ms for rank in others)
    same_host = [rank.busy_ms for rank in ranks if rank.host == slowest.host]
    elsewhere = [rank.busy_ms for rank in ranks if rank.host != slowest.host]
    return schema.Straggler(
        rank=slowest.rank,
        host=slowest.host,
        share=lost_ms / median(rank.step_ms for rank in ranks),
        cause="data" if data_ms > lost_ms / 2 else "computation",
        is_whole_host=len(same_host) > 1 and bool(elsewhere) and min(same_host) - median(elsewhere) > limit_ms,
        pause_s=slowest.longest_s if slowest.longest_s * 1e3 > lost_ms * slowest.num_steps / 2 else None,
    )


def straggler_text(straggler: schema.Straggler) -> str:
    """Return which rank or host is slow, in what, and its cost."""
    who = f"rank {straggler.rank} on host {straggler.host}"
    if straggler.pause_s is not None:
        what = "waited for data in one step" if straggler.cause == "data" else "paused in one step"
        return f"{who} {what}, for {duration(straggler.pause_s)}; the others waited for it"
    if straggler.is_whole_host:
        who = f"host {straggler.host} (all of its ranks; the slowest is rank {straggler.rank})"
    what = "waits longer for its data" if straggler.cause == "data" else "takes longer to compute"
    return f"{who} {what} than the others, which costs them {percent(straggler.share)} of each step"


_SLOW: Final = 1.5
_REPORTED_SHARE: Final = 0.01
"""Share of the steps' time that slow steps have to cost to be reported."""
_LOWER_CLOCK: Final = 0.95


def slow_steps(timeline: Timeline, hosts: HostSamples) -> tuple[float, dict[str, int]]:
    """Return the share of the lead rank's time that slow steps after warm-up cost, and how many have which cause.

    A cause is named where it was seen: a wait for data or a garbage collection of at least half of the excess, a
    checkpoint written just before, the allocator freeing its cache or a lower clock of a device in the same window.
    """
    causes: dict[str, int] = defaultdict(int)
    lost_ms = total_ms = 0.0
    for attempt, warm in zip_strict(timeline.attempts, timeline.warm_ups):
        steps, waits = (np.asarray(column, dtype=np.float64) for column in (attempt.step_ms, attempt.wait_ms))
        if len(steps) <= warm.num_steps:
            continue
        usual = float(np.median(steps[warm.num_steps :]))
        lengths = np.asarray(attempt.windows.lengths, dtype=np.int64)
        window_of = np.repeat(np.arange(len(lengths)), lengths)
        first = int(attempt.windows.steps[0] - lengths[0]) + 1
        total_ms += float(steps[warm.num_steps :].sum())
        for index in np.flatnonzero(steps > _SLOW * usual):
            if index < warm.num_steps:
                continue
            excess, window = float(steps[index]) - usual, int(window_of[index])
            lost_ms += excess
            end_s = attempt.windows.end_ms[window] / 1e3
            seen = {
                "wait for data": waits[index] >= excess / 2,
                "garbage collection": attempt.windows.gc_ms[window] >= excess / 2,
                "checkpoint": first + int(index) - 1 in attempt.saved_steps,
                "allocator freed its cache": attempt.windows.retries[window] > 0,
                "lower clock": _has_lower_clock(hosts, end_s - attempt.windows.wall_ms[window] / 1e3, end_s),
            }
            causes[next((cause for cause, is_seen in seen.items() if is_seen), "unknown")] += 1
    return lost_ms / total_ms if total_ms else 0.0, dict(causes)


def _has_lower_clock(hosts: HostSamples, begin_s: float, end_s: float) -> bool:
    for samples, _ in hosts.values() if len(hosts) == 1 else ():
        for columns in samples.devices.values():
            clocks = np.asarray(columns.get("sm_clock_mhz", ()), dtype=np.float64)
            times = np.asarray(samples.times(columns))[: len(clocks)]
            inside = clocks[(times >= begin_s) & (times <= end_s) & np.isfinite(clocks)]
            if len(inside) and inside.min() < _LOWER_CLOCK * np.nanmedian(clocks):
                return True
    return False


MAX_FASTER: Final = 0.1
"""Share of a step's time by which steps outside of all pairs may be faster than steps of the fastest pair."""


def pace_findings(timeline: Timeline, saved: SavedCheckpoints) -> Iterator[Finding]:
    """Report how many steps are outside of all pairs of checkpoints, and whether they are faster than those in pairs.

    A vendor's code can see when a pair is in progress, and leave out work where none is. The mean of the steps outside
    is compared with the median of the windows of each pair but the first, which has the slower first steps.
    """
    if saved.hashes is None:
        return
    last, lengths, wall_s = (timeline.windows[name] for name in ("steps", "lengths", "wall_s"))
    outside, paces = np.ones(len(last), dtype=bool), []
    for start, end in saved.hashes.pairs:
        inside = (last > saved.steps.get(start or "", 0)) & (last <= saved.steps.get(end, 0))
        outside &= ~inside
        if start is not None and inside.any():
            paces.append(float(np.median(wall_s[inside] / lengths[inside])))
    if not paces or not outside.any():
        return
    share = float(lengths[outside].sum() / lengths.sum())
    actual = f"{percent(share)} of the steps are in no pair: they cannot be replayed, and weights that vendor code "
    yield finding("warning", "replay", "every step in a pair of checkpoints", f"{actual}replaced there are not noticed")
    faster = 1 - float(wall_s[outside].sum() / lengths[outside].sum()) / min(paces)
    if faster > MAX_FASTER:
        expected = f"at most {limit_percent(MAX_FASTER)} faster than steps of the fastest pair of checkpoints"
        actual = f"steps outside of all pairs, which cannot be replayed, took {percent(faster)} less time"
        why = "work was left out, or the machine was busy in the pairs"
        yield finding("open", "replayed-pace", expected, f"{actual}: {why}")


MAX_POINTS: Final = 100
"""Largest number of steps of a reference curve, evenly spaced."""
REFERENCE_RULE: Final = "reference-loss"


def reference_of(round_dir: Path, accelmark_version: str) -> ReferenceLoss:
    """Return the loss curve of a training round with its settings and origin."""
    job = read_job(round_dir)
    timeline = read_timeline([log for node in node_dirs(round_dir) for log in node.rank_logs()])
    work = job.work
    if timeline is None or not isinstance(work, TrainingWork) or not len(timeline.losses):
        raise RunError(f"{round_dir}: has no losses to make a reference of")
    if work.settings.loader.synthetic:
        raise RunError(f"{round_dir}: was trained on synthetic data, whose losses are no reference")
    count = len(timeline.losses)
    steps = sorted({round(step) for step in np.linspace(1, count, min(count, MAX_POINTS))})
    losses = [float(timeline.losses[step - 1]) for step in steps]
    if not all(map(math.isfinite, losses)):
        raise RunError(f"{round_dir}: a loss is missing or not finite: it cannot be a reference")
    started = timeline.lead.end.started
    framework = f"{started.framework} {started.framework_version}" if started else job.framework
    device = job.chip.title if job.chip is not None else (started.device_name if started else None) or job.key.hardware
    run = f"run {round_dir.parents[1].name}, {round_dir.parent.name}/{round_dir.name}"
    scale = counted(job.key.world_size, "rank")
    return ReferenceLoss(
        steps=tuple(steps),
        loss=tuple(float(f"{loss:.6g}") for loss in losses),
        source=f"{run}: {device}, {scale}, {framework}, {work.precision}, AccelMark {accelmark_version}",
        samples_per_step=work.settings.samples_per_step(job.key.world_size),
        data={name: str(record["fingerprint"]) for name, record in read_json(round_dir / DATA_FILE).items()},
        settings=flatten(work.settings.model_dump(mode="json")),
    )


def train_round(round_dir: Path, job: JobSpec, work: TrainingWork, nodes: list[NodeDir]) -> schema.RoundResult:
    """Compute the result of a training round, even if it failed, was lost or is incomplete."""
    checked = reading.read_reevaluation(round_dir)
    timeline = read_timeline([log for node in nodes for log in node.rank_logs()])
    earlier = reading.earlier_attempts(round_dir)
    num_continued = len(timeline.lead.attempts) - 1 if timeline is not None else 0
    before = [node for attempt in earlier[len(earlier) - num_continued :] for node in node_dirs(attempt)]
    ends = [(end.rank, end.finished) for end in timeline.ranks if end.finished] if timeline else []
    errors = (f"rank {rank}: {end.message or end.end_reason}" for rank, end in ends if end.state != "completed")
    state, reason = recorded.job_state(round_dir, job, nodes, next(errors, None), has_events=timeline is not None)
    findings: list[Finding] = []
    hosts, no_telemetry = recorded.read_telemetry(nodes, timeline.train_spans if timeline else {}, findings, before)
    lead = timeline.lead.end if timeline else None
    precision = lead.started.precision if lead and lead.started else work.precision
    figures = {name: value(None, "no rank wrote an event") for name in figures_of("train")}
    per_step = work.settings.samples_per_step(job.key.world_size)
    rank_times = rank_times_unknown = None
    if timeline is not None:
        units = timeline.num_samples * work.units_per_sample
        figures = time_figures(timeline, units, job.key.world_size) | outcome_figures(timeline, work, checked)
        figures |= compute_figures(job, timeline, figures[F.THROUGHPUT_PER_DEVICE], precision)
        took_s = checked.duration_s if checked is not None else None
        figures[F.REEVALUATION_TIME] = value(took_s, "its weights were not evaluated after the round")
        peaks = [end.peak_device_memory_mib for _, end in ends if end.peak_device_memory_mib is not None]
        why = f"the framework reports no peak allocation on {job.device_type}"
        why = why if ends else "no rank wrote a FINISHED event, which has the peak allocation"
        figures[F.PEAK_DEVICE_MEMORY] = value(max(peaks, default=None), why)
        consumed, warnings = consumption_figures(hosts, units, job.device_type, no_telemetry)
        figures |= consumed
        if isinstance(work, ExternalJob):
            figures = limited_to_log(figures, work.trainer)
        findings += [finding("warning", "energy-cross-check", "", what) for what in warnings]
        findings += _log_findings(job, work, timeline)
        if len(timeline.lead.attempts) == 1 and earlier:
            actual = "the round was started again at step 1: figures are of its last attempt only"
            findings.append(finding("info", "resumed", "", actual))
        findings += recorded.contention_findings(nodes, {end.rank: end.finished for end in timeline.ranks})
        findings += recorded.log_findings(timeline, job, per_step) if isinstance(work, TrainJob) else ()
        findings += recorded.step_clock_findings(timeline, job.device_type)
        share, causes = slow_steps(timeline, hosts)
        if share > _REPORTED_SHARE:
            listed = ", ".join(f"{cause} {count}" for cause, count in causes.items())
            number = f"{counted(sum(causes.values()), 'step')} took more than {_SLOW} x the median"
            actual = f"{number}, which cost {percent(share)} of the time: {listed}"
            findings.append(finding("info", "slow-steps", "", actual))
        if job.has_vendors_code and state == "succeeded":
            findings += pace_findings(timeline, reading.saved_checkpoints(round_dir))
        rank_times, rank_times_unknown = times_of_ranks(timeline, nodes)
        if rank_times is not None and rank_times.straggler is not None:
            expected, slow = f"at most {limit_percent(MAX_SHARE)} of a step", straggler_text(rank_times.straggler)
            findings.append(finding("info", "stragglers", expected, slow))
    findings += recorded.agreement_findings(round_dir, job, nodes, timeline.times if timeline else {}, hosts)
    return recorded.round_of(
        job,
        (state, reason),
        nodes,
        findings,
        {"started": lead.started, "compiled": lead.compiled} if lead else {},
        synthetic=work.settings.loader.synthetic,
        partial_evaluation=work.settings.evaluate.max_batches is not None,
        resumed=timeline is not None and len(timeline.lead.attempts) > 1,
        task="train",
        converged=converged(timeline, work, per_step, checked),
        target=work.target,
        precision=precision,
        started_at=min((node.exit.started_at for node in (*before, *nodes) if node.exit), default=""),
        figures={name: figures[name] for name in figures_of("train")},
        curves=curves_of(timeline, work.units_per_sample, per_step) if timeline else {},
        step_ms_histogram=histogram(timeline.step_ms) if timeline else (),
        telemetry=telemetry_series(hosts),
        num_steps=timeline.num_steps if timeline else 0,
        num_samples=timeline.num_samples if timeline else 0,
        num_devices=job.key.world_size,
        rank_times=rank_times,
        rank_times_unknown=rank_times_unknown,
    )


def _log_findings(job: JobSpec, work: TrainingWork, timeline: Timeline) -> Iterable[Finding]:
    world = job.num_ranks
    if len(timeline.ranks) != world:
        yield finding("error", "ranks-missing", f"events of {world} ranks", f"events of {len(timeline.ranks)} ranks")
    for end in timeline.ranks:
        if end.malformed:
            lines = f" (lines {', '.join(map(str, end.malformed_lines))})" if end.malformed_lines else ""
            actual = f"rank {end.rank}: {end.malformed} malformed PerfLog lines{lines}"
            yield finding("warning", "log-unreadable", "", actual)
        if end.truncated:
            yield finding("warning", "log-incomplete", "", f"rank {end.rank}: the last line of its log is incomplete")
    for warning in dict.fromkeys(warning for end in timeline.ranks for warning in end.warnings):
        yield finding("warning", "rank-warning", "", warning)
    if bad := list(dict.fromkeys(error for end in timeline.ranks for error in end.bad_samples)):
        actual = f"{len(bad)} training samples cannot be read and were replaced by others: {'; '.join(bad)}"
        yield finding("open", "samples-replaced", "all training samples", actual)
    if timeline.nonfinite_step is not None:
        yield finding("error", "loss-not-finite", "", f"the loss of step {timeline.nonfinite_step} is NaN or infinite")
    finished = timeline.lead.end.finished
    flops, formula = (finished.flops_per_sample, finished.flops_per_sample_formula) if finished else (None, None)
    if flops and formula and abs(flops - formula) > FLOPS_TOLERANCE * formula:
        actual = f"{flops:.4g} FLOPs per sample were counted"
        yield finding("warning", "flops-mismatch", f"about {formula:.4g} by the case's formula", actual)
    yield from _reference_finding(job, work, timeline)


def _reference_finding(job: JobSpec, train: TrainingWork, timeline: Timeline) -> Iterable[Finding]:
    reference = train.reference_loss
    if train.settings.loader.synthetic:
        return
    if reference is None:
        if train.target is None:
            do = "'accelmark train CASE --write-reference' measures a reference loss curve"
            yield finding("info", REFERENCE_RULE, "", f"no reference yet: convergence was not judged; {do}")
        return
    per_step = train.settings.samples_per_step(job.key.world_size)
    if not reference.applies(per_step):
        expected, actual = f"{reference.samples_per_step} samples a step", f"{per_step}: losses were not compared"
        yield finding("warning", REFERENCE_RULE, expected, actual)
        return
    limit = reference.max_mean_relative_error
    error = reference_error(timeline, train)
    if error is None:
        actual = f"no finite loss at step {max(reference.steps)}, the last step of the reference curve"
    else:
        actual = f"mean relative error {percent(error)} against the reference loss ({reference.source})"
    followed = error is not None and error <= limit
    yield finding("info" if followed else "error", REFERENCE_RULE, f"at most {limit_percent(limit)}", actual)
