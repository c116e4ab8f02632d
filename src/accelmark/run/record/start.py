"""Record what a run starts with: AccelMark's source, the run's entry in the registry, and the vendor's code."""

from __future__ import annotations

from pathlib import Path

from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic
from accelmark.run.record.registry import register
from accelmark.run.record.source import source_record
from accelmark.run.record.vendor_code import copy_vendor_code
from accelmark.spec.records import SOURCE_FILE


def record_start(plan: Plan, run_dir: Path) -> None:
    """Write ``source.json``, ``registration.json`` and ``vendor/``. Raises RunError: one cannot be written."""
    write_atomic(run_dir / SOURCE_FILE, source_record().model_dump_json(indent=2))
    for job in plan.jobs:
        copy_vendor_code(run_dir, job.job)
    register(plan, run_dir)
