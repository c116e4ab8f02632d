"""Record what a run starts with (AccelMark's source, its registry entry, the vendor's code), and detect changes."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

import accelmark
from accelmark.plan.adaptation import ENVIRONMENT_FILE
from accelmark.plan.plan import Plan
from accelmark.results.store.files import write_atomic, write_errors
from accelmark.run.record.registry import register
from accelmark.spec.errors import AccelmarkError, Problem, SpecError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.records import SOURCE_FILE, VENDOR_CODE_DIR, SourceRecord
from accelmark.spec.plugins.catalog import case_hash, files_hash, find, tree_files, tree_hash

_GIT_TIMEOUT_S: Final = 20.0


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
    is_ours = folder.origin == "accelmark"
    own = () if is_ours else tree_files(folder.path, whole=True)
    files = [file for file in own if not file[0].startswith("cases/")]
    if job.adaptation is not None:
        prefix, copied = f"cases/{job.adaptation.name}", tree_files(job.adaptation.path, whole=True)
        files += [(f"{prefix}/{name}", content) for name, content in copied]
    for name, content in files:
        path = run_dir / VENDOR_CODE_DIR / name
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if path.name == ENVIRONMENT_FILE:
                path.chmod(0o600)  # it may contain secrets


def source_record(package: Path | None = None) -> SourceRecord:
    """Describe the AccelMark in ``package`` (default: the running one)."""
    package = package or Path(accelmark.__file__).parent
    contents = list(tree_files(package))
    sha256 = files_hash(contents)
    files = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in contents}
    version = accelmark.__version__
    installed = _installed(package)
    if installed is not None:
        return SourceRecord(
            kind="wheel", version=version, sha256=sha256, modified=_differing(installed, package), files=files
        )
    commit = _git(package, "rev-parse", "HEAD")
    if commit is None:
        reason = "its directory is neither installed from a wheel nor a git checkout"
        return SourceRecord(kind="folder", version=version, sha256=sha256, reason=reason, files=files)
    status = _git(package, "status", "--porcelain", "--untracked-files=all", "--", ".") or ""
    modified = tuple(line[3:] for line in status.splitlines() if line[3:] and not line.endswith(".pyc"))
    return SourceRecord(
        kind="checkout", version=version, sha256=sha256, commit=commit.strip(), modified=modified, files=files
    )


def _installed(package: Path) -> Distribution | None:
    """Return the installed distribution of these files; None for an editable installation."""
    try:
        installed = distribution("accelmark")
    except PackageNotFoundError:
        return None
    if not any(str(file) == "accelmark/__init__.py" for file in installed.files or ()):
        return None
    return installed if Path(str(installed.locate_file("accelmark"))).resolve() == package.resolve() else None


def _differing(installed: Distribution, package: Path) -> tuple[str, ...]:
    """Return files that were changed, removed or added since the wheel's RECORD."""
    files = {str(file): file.hash for file in installed.files or ()}
    recorded = {name: digest for name, digest in files.items() if name.startswith("accelmark/")}
    present = {
        f"accelmark/{path.relative_to(package).as_posix()}": path for path in package.rglob("*") if path.is_file()
    }
    differing = recorded.keys() ^ present.keys()
    for name in recorded.keys() & present.keys():
        digest = recorded[name]
        if digest is not None and _digest(present[name], digest.mode) != digest.value:
            differing.add(name)
    return tuple(sorted(name for name in differing if not name.endswith(".pyc")))


def _digest(path: Path, mode: str) -> str:
    digest = hashlib.new(mode, path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _git(directory: Path, *arguments: str) -> str | None:
    """Return git's output; None where there is no git or no checkout."""
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
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
    folders: dict[tuple[Path, str], tuple[str, Callable[[Path], str]]] = {
        (ref.path, ref.sha256): (str(ref.path), whole)
        for job in plan.jobs
        for ref in (job.job.extern, job.job.adaptation)
        if ref is not None
    }
    for job in plan.jobs:
        case = job.job.case
        folders[case.path, case.sha256] = str(case.path), partial(case_hash, task=job.job.work.task)
    try:
        vendor = find("vendors", plan.vendor).path
        folders[vendor, plan.vendor_sha256] = str(vendor), whole
    except AccelmarkError as error:
        problems.append(Problem(where, plan.vendor, str(error)))
    folders[Path(accelmark.__file__).parent, plan.source_sha256] = "AccelMark", tree_hash
    for (path, sha256), (name, hashed) in folders.items():
        if not path.is_dir() or hashed(path) != sha256:
            what = "has changed" if path.is_dir() else "was removed"
            problems.append(Problem(where, name, f"{what} since the run was planned", hint))
    if problems:
        raise SpecError(problems)
