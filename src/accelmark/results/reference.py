"""Make a case's reference loss curve from a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import numpy as np

from accelmark.results.figures.timeline import Timeline, read_timeline
from accelmark.results.read.round_dir import node_dirs, read_job, read_json
from accelmark.results.rounds.training import samples_per_step
from accelmark.spec.errors import RunError
from accelmark.spec.job import JobSpec, TrainingWork
from accelmark.spec.layers import flatten
from accelmark.spec.log.records import DATA_FILE
from accelmark.spec.plugins.case import ReferenceLoss

MAX_POINTS: Final = 100
"""Largest number of steps of a curve, evenly spaced."""
_DIGITS: Final = 6


def reference_of(round_dir: Path, accelmark_version: str) -> ReferenceLoss:
    """Return the loss curve of a training round with its settings and origin.

    Raises RunError if it did not train with AccelMark's loop on real data, or a loss is not finite.
    """
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
    bad = next((step for step, loss in zip(steps, losses, strict=True) if not math.isfinite(loss)), None)
    if bad is not None:
        raise RunError(f"{round_dir}: the loss of step {bad} is missing or not finite: it cannot be a reference")
    data = {name: str(record["fingerprint"]) for name, record in read_json(round_dir / DATA_FILE).items()}
    return ReferenceLoss(
        steps=tuple(steps),
        loss=tuple(float(f"{loss:.{_DIGITS}g}") for loss in losses),
        source=_source(round_dir, job, timeline, accelmark_version),
        samples_per_step=samples_per_step(job, work),
        data=data,
        settings=flatten(work.settings.model_dump(mode="json")),
    )


def _source(round_dir: Path, job: JobSpec, timeline: Timeline, accelmark_version: str) -> str:
    started = timeline.lead_end.started
    framework = f"{started.framework} {started.framework_version}" if started else job.framework
    device = job.chip.title if job.chip is not None else (started.device_name if started else None) or job.key.hardware
    scale = f"{job.key.world_size} ranks" if job.key.world_size > 1 else "1 rank"
    run = f"run {round_dir.parents[1].name}, {round_dir.parent.name}/{round_dir.name}"
    return f"{run}: {device}, {scale}, {framework}, {job.work.precision}, AccelMark {accelmark_version}"
