"""Record what a run starts with: AccelMark's source, the run's entry in the registry, and the vendor's code."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accelmark.plan.adaptation import ENVIRONMENT_FILE
from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic, write_errors
from accelmark.run.record.registry import register
from accelmark.run.record.source import source_record
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.records import SOURCE_FILE, VENDOR_CODE_DIR
from accelmark.spec.plugins.catalog import find, tree_files

_SHIPPED: Final = "accelmark"
_CASES: Final = "cases"


def record_start(plan: Plan, run_dir: Path) -> None:
    """Write ``source.json``, ``registration.json`` and ``vendor/``. Raises RunError: one cannot be written."""
    write_atomic(run_dir / SOURCE_FILE, source_record().model_dump_json(indent=2))
    for job in plan.jobs:
        _copy_vendor_code(run_dir, job.job)
    register(plan, run_dir)


def _copy_vendor_code(run_dir: Path, job: JobSpec) -> None:
    """Copy the vendor's folder for the job's case to ``vendor/``; of a vendor that is not AccelMark's, also the rest.

    Raises RunError: a file cannot be written.
    """
    try:
        folder = find("vendors", job.vendor)
    except AccelmarkError:
        return
    adaptation = f"{_CASES}/{job.adaptation.name}/" if job.adaptation is not None else None
    for name, content in tree_files(folder.path):
        is_rest = folder.origin != _SHIPPED and not name.startswith(f"{_CASES}/")
        if is_rest or (adaptation is not None and name.startswith(adaptation)):
            path = run_dir / VENDOR_CODE_DIR / name
            with write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                if path.name == ENVIRONMENT_FILE:
                    path.chmod(0o600)  # it may contain secrets
