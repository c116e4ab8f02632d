"""``accelmark train CASE --write-reference``: store the loss curve of a run as the case's reference."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

import accelmark
from accelmark.cli import options
from accelmark.plan.plan import Plan
from accelmark.results.rounds.training import reference_of
from accelmark.results.store.files import write_atomic
from accelmark.spec.errors import RequestError
from accelmark.spec.job import TrainJob
from accelmark.spec.plugins.case import REFERENCE_FILE
from accelmark.spec.plugins.catalog import find, load_case


def reference_file(plan: Plan, given: Path | None) -> Path:
    """Return the file for the reference of a plan's only key, before it is started.

    Raises RequestError: the run cannot give a reference, or the file exists or cannot be written.
    """
    job = plan.jobs[0].job
    if not isinstance(job.work, TrainJob) or job.work.settings.loader.synthetic or plan.open:
        raise RequestError(
            "--write-reference needs the case's own settings and data: not --synthetic, --open or a trainer"
        )
    path = given or find("cases", job.key.model).path / REFERENCE_FILE
    known = load_case(job.key.model).train
    if given is None and known is not None and known.reference_loss is not None:
        source = known.reference_loss.source
        raise RequestError(
            f"{path}: the case has a reference ({source}); remove it, or name a file with --reference-file"
        )
    if path.exists() or not os.access(path.parent, os.W_OK):
        what = "exists already" if path.exists() else f"{path.parent} is not a directory that can be written to"
        raise RequestError(f"{path}: {what}; name another file with --reference-file")
    return path


def write_reference(run: Path, plan: Plan, path: Path, *, as_json: bool) -> None:
    """Write the loss curve of the first round of a finished run."""
    curve = reference_of(run / plan.jobs[0].directory, accelmark.__version__)
    head = f"# Written by 'accelmark train {plan.jobs[0].job.key} --write-reference'.\n"
    values = curve.model_dump(mode="json")
    write_atomic(path, head + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120))
    if not as_json:
        options.echo_wrapped(f"reference loss: {len(curve.steps)} steps up to {curve.steps[-1]}, written to {path}")
