"""Cache of checks of frameworks, which plans of the same case, settings and code cite."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from accelmark.datasets.ensure import cache_directory
from accelmark.plan.plan import Plan
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.run.record.directory import safe_name
from accelmark.spec.equivalence import EquivalenceCheck, settings_hash
from accelmark.spec.job import JobSpec, TrainJob


def remember(check: EquivalenceCheck) -> Path:
    """Write a check to the cache and return its file; an earlier check of the same versions is replaced."""
    path = _cache(check.case) / f"{_name(check)}.json"
    make_directory(path.parent)
    write_atomic(path, check.model_dump_json(indent=2))
    return path


def _name(check: EquivalenceCheck) -> str:
    version = check.jobs[0].framework_version
    return safe_name(f"{check.framework}-{version}-{check.device_type}-{check.precision}-{check.settings_sha256[:12]}")


def _cache(case: str) -> Path:
    return cache_directory() / "checks" / safe_name(case)


def with_checks(plan: Plan) -> Plan:
    """Return the plan with the cached checks that apply to its jobs, for any version of their frameworks."""
    jobs = tuple(
        job.model_copy(
            update={"job": job.job.model_copy(update={"equivalence": _remembered(job.job, plan.source_sha256)})}
        )
        for job in plan.jobs
    )
    return plan.model_copy(update={"jobs": jobs})


def _remembered(job: JobSpec, source_sha256: str) -> tuple[EquivalenceCheck, ...]:
    if not isinstance(job.work, TrainJob) or job.has_vendors_code:
        return ()
    wanted = {
        "case_sha256": job.case.sha256,
        "source_sha256": source_sha256,
        "settings_sha256": settings_hash(job.work.settings),
        "framework": job.key.framework,
        "device_type": job.device_type,
    }
    found = filter(None, map(_read, sorted(_cache(job.case.name).glob("*.json"))))
    return tuple(check for check in found if all(getattr(check, name) == value for name, value in wanted.items()))


def _read(path: Path) -> EquivalenceCheck | None:
    try:
        return EquivalenceCheck.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
