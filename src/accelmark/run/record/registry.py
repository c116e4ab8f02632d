"""The registry of runs: a log of this user on this machine, to which each run is appended before it starts.

Entries are numbered, so that a reader of some runs sees the number of others, and which failed or never ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from accelmark.plan.plan import Plan
from accelmark.results.schema import Summary
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import MANIFEST_FILE, PLAN_FILE
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import RequestError
from accelmark.spec.log.records import REGISTRATION_FILE, EarlierRun, Registration

STATE_VARIABLE: Final = "ACCELMARK_STATE"
_LOG_FILE: Final = "runs.jsonl"
_MAX_EARLIER: Final = 50


def registry_file() -> Path:
    """Return ``$ACCELMARK_STATE/runs.jsonl``, else that in ``$XDG_STATE_HOME/accelmark`` or ``~/.local/state``."""
    given = os.environ.get(STATE_VARIABLE)
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = base if base.is_absolute() else Path.home() / ".local/state"
    return (Path(given).expanduser() if given else state / "accelmark") / _LOG_FILE


def register(plan: Plan, run_dir: Path) -> None:
    """Append a run to the registry before it starts, and write ``registration.json``; it states why where that fails.

    Raises RunError: ``registration.json`` cannot be written.
    """
    write_atomic(run_dir / REGISTRATION_FILE, _entry(plan, run_dir).model_dump_json(indent=2))


def _entry(plan: Plan, run_dir: Path) -> Registration:
    work = [
        (job.job.key.model_dump(), job.job.round, job.job.work.model_dump(mode="json"), job.job.case.sha256)
        for job in plan.jobs
    ]
    entry: dict[str, Any] = {
        "kind": "start",
        "at": utc_now(),
        "nonce": secrets.token_hex(16),
        "plan_sha256": hashlib.sha256((run_dir / PLAN_FILE).read_bytes()).hexdigest(),
        "work_sha256": hashlib.sha256(json.dumps([plan.source_sha256, plan.vendor_sha256, work]).encode()).hexdigest(),
        "run": str(run_dir),
    }
    fields = {name: entry[name] for name in ("at", "nonce", "plan_sha256", "work_sha256")}
    try:
        with _opened() as (descriptor, entries, previous):
            starts = [line for line in entries if line.get("kind") == "start"]
            entry["number"] = len(starts) + 1
            _append(descriptor, entry, previous)
    except OSError as error:
        return Registration(**fields, reason=f"{registry_file()}: {error.strerror or error}")
    ends = {line.get("nonce"): line for line in entries if line.get("kind") == "end"}
    same = [line for line in starts if line.get("work_sha256") == entry["work_sha256"]]
    earlier = tuple(
        EarlierRun(number=line["number"], at=line["at"], ended=ends.get(line["nonce"], {}).get("verdicts"))
        for line in same[-_MAX_EARLIER:]
    )
    first = hashlib.sha256(json.dumps(starts[0]).encode()).hexdigest()[:16] if starts else None
    return Registration(**fields, log=first, number=entry["number"], previous=previous, earlier=earlier)


def register_plan(run_dir: Path) -> None:
    """Append the plan of a search with its next jobs to the registry, once; a registry that is gone is no error.

    Raises RunError: ``registration.json`` cannot be written.
    """
    registration = _registration(run_dir)
    digest = hashlib.sha256((run_dir / PLAN_FILE).read_bytes()).hexdigest()
    if registration is None or registration.plan_sha256 == digest:
        return
    entry = {"kind": "plan", "at": utc_now(), "nonce": registration.nonce, "plan_sha256": digest}
    if registration.number is not None:
        with contextlib.suppress(OSError), _opened() as (descriptor, _, previous):
            _append(descriptor, entry, previous)
    updated = registration.model_copy(update={"plan_sha256": digest})
    write_atomic(run_dir / REGISTRATION_FILE, updated.model_dump_json(indent=2))


def _registration(run_dir: Path) -> Registration | None:
    """Read the registration of a run; None where it cannot be read."""
    try:
        return Registration.model_validate_json((run_dir / REGISTRATION_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def register_end(run_dir: Path, summary: Summary) -> None:
    """Append the end of a run with its verdicts and the hash of its manifest; a registry that is gone is no error."""
    registration = _registration(run_dir)
    if registration is None or registration.number is None:
        return
    verdicts = ", ".join(dict.fromkeys(case.verdict for case in summary.cases)) or summary.state
    entry = {
        "kind": "end",
        "at": utc_now(),
        "nonce": registration.nonce,
        "verdicts": verdicts,
        "manifest_sha256": hashlib.sha256((run_dir / MANIFEST_FILE).read_bytes()).hexdigest(),
    }
    with contextlib.suppress(OSError), _opened() as (descriptor, _, previous):
        _append(descriptor, entry, previous)


def require_original(run_dir: Path) -> None:
    """Check that a run is not a copy of another directory, whose jobs on hosts it would end; a moved one is none.

    Raises RequestError: the directory where the run was started still exists.
    """
    registration = _registration(run_dir)
    if registration is None or registration.number is None:
        return
    with contextlib.suppress(OSError), _opened() as (_, entries, _):
        starts = (line for line in entries if line.get("nonce") == registration.nonce and line.get("kind") == "start")
        for path in (Path(line["run"]) for line in starts):
            owner = None if path.resolve() == run_dir.resolve() else _registration(path)
            if owner is not None and owner.nonce == registration.nonce:
                raise RequestError(f"{run_dir}: is a copy of the run {path}, which owns its jobs: use that directory")


@contextmanager
def _opened() -> Iterator[tuple[int, list[dict[str, Any]], str]]:
    """Lock the registry; yields its descriptor, its entries and the hash of its last line."""
    path = registry_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        lines = path.read_bytes().splitlines()
        entries = []
        for line in lines:
            try:
                loaded = json.loads(line)
            except ValueError:
                continue  # the incomplete line of a killed writer
            entries += [loaded] if isinstance(loaded, dict) else []
        yield descriptor, entries, hashlib.sha256(lines[-1]).hexdigest() if lines else ""
    finally:
        os.close(descriptor)


def _append(descriptor: int, entry: dict[str, Any], previous: str) -> None:
    os.write(descriptor, json.dumps({**entry, "previous": previous}).encode() + b"\n")
    os.fsync(descriptor)
