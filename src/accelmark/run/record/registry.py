"""The registry of runs: a log of this user on this machine, to which each run is appended before it starts.

Entries are numbered, so that a reader of some runs sees the number of others, and which failed or never ended.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

import accelmark
from accelmark.plan.plan import Plan
from accelmark.plan.request import ENVIRONMENT_FILE
from accelmark.results.schema import Summary
from accelmark.results.store.files import write_atomic, write_errors
from accelmark.results.store.loaded_run import MANIFEST_FILE, PLAN_FILE
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import AccelmarkError, Problem, RequestError, SpecError
from accelmark.spec.log.records import (
    REGISTRATION_FILE,
    SOURCE_FILE,
    VENDOR_CODE_DIR,
    EarlierRun,
    Registration,
    SourceRecord,
)
from accelmark.spec.model import json_objects
from accelmark.spec.plugins.catalog import case_hash, files_hash, find, tree_files, tree_hash

STATE_VARIABLE: Final = "ACCELMARK_STATE"
_LOG_FILE: Final = "runs.jsonl"


def registry_file() -> Path:
    """Return ``$ACCELMARK_STATE/runs.jsonl``, else that in ``$XDG_STATE_HOME/accelmark`` or ``~/.local/state``."""
    given = os.environ.get(STATE_VARIABLE)
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    state = base if base.is_absolute() else Path.home() / ".local/state"
    return (Path(given).expanduser() if given else state / "accelmark") / _LOG_FILE


def register(plan: Plan, run_dir: Path) -> None:
    """Append a run to the registry before it starts, and write ``registration.json``, with the reason if that fails."""
    work = [
        (job.job.key.model_dump(), job.job.round, job.job.work.model_dump(mode="json"), job.job.case.sha256)
        for job in plan.jobs
    ]
    fields: dict[str, Any] = {
        "at": utc_now(),
        "nonce": secrets.token_hex(16),
        "plan_sha256": _sha256((run_dir / PLAN_FILE).read_bytes()),
        "work_sha256": _sha256(json.dumps([plan.source_sha256, plan.vendor_sha256, work]).encode()),
    }
    try:
        with _opened() as (entries, append):
            starts = [line for line in entries if line.get("kind") == "start"]
            number = len(starts) + 1
            previous = append({"kind": "start", **fields, "run": str(run_dir), "number": number})
    except OSError as error:
        registration = Registration(**fields, reason=f"{registry_file()}: {error.strerror or error}")
    else:
        ends = {line.get("nonce"): line for line in entries if line.get("kind") == "end"}
        same = [line for line in starts if line.get("work_sha256") == fields["work_sha256"]]
        earlier = tuple(
            EarlierRun(number=line["number"], at=line["at"], ended=ends.get(line["nonce"], {}).get("verdicts"))
            for line in same[-50:]
        )
        first = _sha256(json.dumps(starts[0]).encode())[:16] if starts else None
        registration = Registration(**fields, log=first, number=number, previous=previous, earlier=earlier)
    write_atomic(run_dir / REGISTRATION_FILE, registration.model_dump_json(indent=2))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def register_plan(run_dir: Path) -> None:
    """Append the plan of a search with its next jobs to the registry, once; a removed registry is ignored."""
    registration = Registration.stored(run_dir / REGISTRATION_FILE)
    digest = _sha256((run_dir / PLAN_FILE).read_bytes())
    if registration is None or registration.plan_sha256 == digest:
        return
    if registration.number is not None:
        with contextlib.suppress(OSError), _opened() as (_, append):
            append({"kind": "plan", "at": utc_now(), "nonce": registration.nonce, "plan_sha256": digest})
    updated = registration.model_copy(update={"plan_sha256": digest})
    write_atomic(run_dir / REGISTRATION_FILE, updated.model_dump_json(indent=2))


def register_end(run_dir: Path, summary: Summary) -> None:
    """Append the end of a run with its verdicts and the hash of its manifest; a removed registry is ignored."""
    registration = Registration.stored(run_dir / REGISTRATION_FILE)
    if registration is None or registration.number is None:
        return
    verdicts = ", ".join(dict.fromkeys(case.verdict for case in summary.cases)) or summary.state
    manifest = _sha256((run_dir / MANIFEST_FILE).read_bytes())
    entry = {"kind": "end", "at": utc_now(), "nonce": registration.nonce, "verdicts": verdicts}
    with contextlib.suppress(OSError), _opened() as (_, append):
        append(entry | {"manifest_sha256": manifest})


def require_original(run_dir: Path) -> None:
    """Check that a run is not a copy of another directory, whose jobs on hosts it would end; a moved one is none.

    Raises RequestError: the directory where the run was started still exists.
    """
    registration = Registration.stored(run_dir / REGISTRATION_FILE)
    if registration is None or registration.number is None:
        return
    with contextlib.suppress(OSError), _opened() as (entries, _):
        starts = (line for line in entries if line.get("nonce") == registration.nonce and line.get("kind") == "start")
        for path in (Path(line["run"]) for line in starts):
            owner = None if path.resolve() == run_dir.resolve() else Registration.stored(path / REGISTRATION_FILE)
            if owner is not None and owner.nonce == registration.nonce:
                raise RequestError(f"{run_dir}: is a copy of the run {path}, which owns its jobs: use that directory")


@contextmanager
def _opened() -> Iterator[tuple[list[dict[str, Any]], Callable[[dict[str, Any]], str]]]:
    """Lock the registry; yields its entries, and what appends one and returns the hash of the line before it."""
    path = registry_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        lines = path.read_bytes().splitlines()

        def append(entry: dict[str, Any]) -> str:
            previous = _sha256(lines[-1]) if lines else ""
            os.write(descriptor, json.dumps({**entry, "previous": previous}).encode() + b"\n")
            os.fsync(descriptor)
            return previous

        yield list(json_objects(lines)), append
    finally:
        os.close(descriptor)


def record_start(plan: Plan, run_dir: Path) -> None:
    """Write ``source.json``, ``registration.json`` and ``vendor/``. Raises RunError: one cannot be written.

    ``vendor/`` is the vendor's folders for the cases; of a vendor that is not AccelMark's, also the rest.
    """
    write_atomic(run_dir / SOURCE_FILE, source_record().model_dump_json(indent=2))
    files: dict[str, bytes] = {}
    with contextlib.suppress(AccelmarkError):
        folder = find("vendors", plan.vendor)
        own = () if folder.origin == "accelmark" else tree_files(folder.path, whole=True)
        files |= {name: content for name, content in own if not name.startswith("cases/")}
    for adapted in filter(None, (job.job.adaptation for job in plan.jobs)):
        copied = tree_files(adapted.path, whole=True)
        files |= {f"cases/{adapted.path.name}/{name}": content for name, content in copied}
    for name, content in files.items():
        path = run_dir / VENDOR_CODE_DIR / name
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if path.name == ENVIRONMENT_FILE:
                path.chmod(0o600)  # it may contain secrets
    register(plan, run_dir)


def source_record(package: Path | None = None) -> SourceRecord:
    """Describe the AccelMark in ``package`` (default: the running one)."""
    package = package or Path(accelmark.__file__).parent
    contents = list(tree_files(package))
    files = {name: _sha256(content)[:16] for name, content in contents}
    common: dict[str, Any] = {"version": accelmark.__version__, "sha256": files_hash(contents), "files": files}
    with contextlib.suppress(PackageNotFoundError):
        installed = distribution("accelmark")
        has_package = any(str(file) == "accelmark/__init__.py" for file in installed.files or ())  # not where editable
        if has_package and Path(str(installed.locate_file("accelmark"))).resolve() == package.resolve():
            return SourceRecord(kind="wheel", modified=_differing(installed, package), **common)
    commit = _git(package, "rev-parse", "HEAD")
    if commit is None:
        reason = "its directory is neither installed from a wheel nor a git checkout"
        return SourceRecord(kind="folder", reason=reason, **common)
    status = _git(package, "status", "--porcelain", "--untracked-files=all", "--", ".") or ""
    modified = tuple(line[3:] for line in status.splitlines() if line[3:] and not line.endswith(".pyc"))
    return SourceRecord(kind="checkout", commit=commit.strip(), modified=modified, **common)


def _differing(installed: Distribution, package: Path) -> tuple[str, ...]:
    """Return files that were changed, removed or added since the wheel's RECORD."""
    files = {str(file): file.hash for file in installed.files or ()}
    recorded = {name: digest for name, digest in files.items() if name.startswith("accelmark/")}
    present = {
        f"accelmark/{path.relative_to(package).as_posix()}": path for path in package.rglob("*") if path.is_file()
    }
    differing = recorded.keys() ^ present.keys()
    for name in recorded.keys() & present.keys():
        if (known := recorded[name]) is not None:
            digest = hashlib.new(known.mode, present[name].read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != known.value:
                differing.add(name)
    return tuple(sorted(name for name in differing if not name.endswith(".pyc")))


def _git(directory: Path, *arguments: str) -> str | None:
    """Return git's output; None where there is no git or no checkout."""
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def require_unchanged(plan: Plan, where: str) -> None:
    """Check that cases, vendor and AccelMark are those that the run was planned with.

    Raises SpecError: with everything that has changed, since a resumed run must not mix results of different code.
    """
    hint = "start a new run"
    problems: list[Problem] = []
    whole = partial(tree_hash, whole=True)
    source = Path(accelmark.__file__).parent
    folders: dict[tuple[Path, str], Callable[[Path], str]] = {}
    for job in (planned.job for planned in plan.jobs):
        folders |= {(ref.path, ref.sha256): whole for ref in (job.extern, job.adaptation) if ref is not None}
        folders[job.case.path, job.case.sha256] = partial(case_hash, task=job.work.task)
    try:
        folders[find("vendors", plan.vendor).path, plan.vendor_sha256] = whole
    except AccelmarkError as error:
        problems.append(Problem(where, plan.vendor, str(error)))
    folders[source, plan.source_sha256] = tree_hash
    for (path, sha256), hashed in folders.items():
        if not path.is_dir() or hashed(path) != sha256:
            what = "has changed" if path.is_dir() else "was removed"
            name = "AccelMark" if path == source else str(path)
            problems.append(Problem(where, name, f"{what} since the run was planned", hint))
    if problems:
        raise SpecError(problems)
