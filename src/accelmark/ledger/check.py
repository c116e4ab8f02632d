"""Add a verified bundle to a ledger, and verify a whole ledger again."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from accelmark.audit.verify import verify_run
from accelmark.ledger.record import (
    BUNDLES,
    RECORDS,
    SIGNERS,
    Entry,
    Evidence,
    Ledger,
    Record,
    Withdrawal,
    environment_of,
    read_ledger,
    recorded_cases,
    reproduced,
    write_record,
)
from accelmark.results.claims import load_result
from accelmark.results.read.round_dir import read_json
from accelmark.results.store.bundle import SUFFIX, file_sha256, is_bundle, unpack
from accelmark.results.store.files import make_directory, write_errors
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.results.store.signature import Trust
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.log.records import REGISTRATION_FILE

_ADDED: Final = ("added_at", "by", "note", "reproduces")
"""Fields of a record that its bundle does not determine."""
_MOST: Final = 3


class Checked(NamedTuple):
    """The result of verifying a ledger."""

    num_records: int
    num_verified: int
    """Records that were recomputed from their bundles."""
    num_other_version: int
    """Of these, records whose verdict this AccelMark cannot repeat, since its files differ from those that ran."""
    num_elsewhere: int
    """Records whose bundles are not here."""
    num_result_files: int
    num_made_up: int
    num_withdrawn: int
    problems: list[str]


def add_bundle(root: Path, bundle: Path, *, by: str, at: str | None = None, note: str = "") -> Path:
    """Verify a bundle and write its record; without an address ``at``, copy the bundle into the ledger.

    Returns the record's path. Raises RequestError or RunError, before anything is written, if the file is no bundle,
    is edited, was not registered, is INVALID (but for synthetic data), has a signature of an unknown key, or its run
    has a record already.
    """
    if not bundle.is_file() or not is_bundle(bundle):
        raise RequestError(f"{bundle}: is not a bundle: write it with 'accelmark bundle RUN'")
    digest = file_sha256(bundle)
    name = f"{BUNDLES}/{bundle.name.removesuffix(SUFFIX).removesuffix('.tar')}-{digest[:12]}{SUFFIX}"
    record = verified_record(root, bundle, Evidence(kind="bundle", sha256=digest, where=at or name), by=by, note=note)
    path = _add(root, record)
    if at is None:
        make_directory(root / BUNDLES)
        with write_errors(root / name):
            shutil.copyfile(bundle, root / name)
    return path


def add_result(root: Path, result: Path, *, by: str, at: str | None = None, note: str = "") -> Path:
    """Write a record of a ``result.json`` without a bundle, which says that nothing could be verified.

    Raises RunError if the file cannot be read, or its run has a record already.
    """
    run = load_result(result)
    digest = file_sha256(result)
    record = _record(
        run, Evidence(kind="result file", sha256=digest, where=at or ""), digest, None, "not known", by, note
    )
    return _add(root, record)


def withdraw(root: Path, name: str, *, by: str, why: str) -> Path:
    """Write a record that takes another one back. Raises RequestError if there is no such record, or it was already."""
    ledger = read_ledger(root)
    if name not in {entry.id for entry in ledger.valid}:
        state = "was withdrawn already" if name in ledger.withdrawn else "is not a record of this ledger"
        raise RequestError(f"{name}: {state}")
    if not why.strip():
        raise RequestError("--why: state the reason")
    return write_record(root, Withdrawal(added_at=_now(), by=by, record=name, why=why))


def _add(root: Path, record: Record) -> Path:
    entries = read_ledger(root).valid if (root / RECORDS).is_dir() else []
    for entry in entries:
        if entry.record.run_id == record.run_id:
            raise RequestError(f"{record.run}: the run has a record already: {entry.id}")
    return write_record(root, record.model_copy(update={"reproduces": tuple(reproduced(record, entries))}))


def verified_record(root: Path, bundle: Path, evidence: Evidence, *, by: str = "", note: str = "") -> Record:
    """Recompute everything in a bundle and return its record. Raises RequestError or RunError as :func:`add_bundle`."""
    record, problems = _recomputed(root, bundle, evidence, by, note)
    if problems:
        raise RunError(f"{bundle.name}: {problems[0]}; verify it with the AccelMark that ran")
    return record


def _recomputed(
    root: Path, bundle: Path, evidence: Evidence, by: str = "", note: str = ""
) -> tuple[Record, tuple[str, ...]]:
    """Return the record of a bundle, and the verdicts that another version of AccelMark gave and this one does not.

    Raises RequestError or RunError as :func:`add_bundle`.
    """
    signers = root / SIGNERS
    with tempfile.TemporaryDirectory(prefix="accelmark-ledger-") as directory:
        run_dir, edited = unpack(bundle, Path(directory))
        verified = verify_run(run_dir, Trust(allowed_signers=signers if signers.is_file() else None))
        signature = verified.signature
        problems = [*edited, *verified.changed, *verified.figure_differences]
        problems += verified.verdict_differences if verified.is_same_version else ()
        if signature.status not in ("unsigned", "trusted"):
            who = (
                "; its key is not in the ledger's allowed_signers"
                if signature.status in ("signed", "untrusted")
                else ""
            )
            problems.append(f"{signature.text}{who}")
        registration = read_json(run_dir / REGISTRATION_FILE)
        if not registration.get("nonce"):
            problems.append(f"{REGISTRATION_FILE} is missing: the run was not registered before it started")
        for case in verified.summary.measured:
            errors = [str(finding) for finding in case.findings if finding.severity == "error"]
            if case.verdict == "INVALID" and "synthetic" not in case.marks:
                problems.append(f"{case.key}: is INVALID: {'; '.join(errors[:_MOST])}")
        if problems:
            more = f"; and {len(problems) - _MOST} more" if len(problems) > _MOST else ""
            raise RunError(f"{bundle.name}: does not pass: {'; '.join(problems[:_MOST])}{more}")
        number = registration.get("number")
        entry = f"number {number}" if number is not None else f"in no registry: {registration.get('reason')}"
        signed_by = signature.text.removeprefix("signed by ") if signature.status == "trusted" else None
        run = load_run(run_dir, curves=False)
        record = _record(run, evidence, str(registration["nonce"]), signed_by, entry, by, note)
        return record, verified.verdict_differences


def _record(
    run: LoadedRun, evidence: Evidence, run_id: str, signed_by: str | None, registered: str, by: str, note: str
) -> Record:
    cases = recorded_cases(run)
    if not cases:
        raise RunError(f"{run.path}: has no round that could be read")
    summary = run.summary
    return Record(
        added_at=_now(), by=by, note=note, run=summary.run, run_id=run_id, started_at=summary.started_at,
        accelmark_version=summary.accelmark_version, evidence=evidence, signed_by=signed_by, registered=registered,
        environment=environment_of(run), cases=cases,
    )  # fmt: skip


def check_ledger(root: Path, since: str | None = None) -> Checked:
    """Verify all records again: their hashes, and from each bundle that is here everything that the record states.

    Rules and cases change, so the verdict of a run of another version is that which its bundle states; its figures
    are recomputed all the same, and an INVALID run is a problem for any version.

    ``since``: a commit; records that were changed or removed since then are problems, and the verdicts of those that
    were added must be repeated by this version. Raises RunError if there is no ledger, or git cannot compare.
    """
    ledger = read_ledger(root)
    added, not_appended = _changes(root, since) if since else (frozenset[str](), [])
    problems = [*ledger.problems, *not_appended]
    kinds = [entry.record.evidence.kind for entry in ledger.entries]
    num_verified = num_other_version = 0
    for entry in ledger.valid:
        bundle = root / entry.record.evidence.where
        if entry.record.evidence.kind == "bundle" and "://" not in entry.record.evidence.where:
            of_bundle, verdicts = _bundle_problems(root, entry, bundle)
            if verdicts and entry.id in added:
                of_bundle = [f"{entry.id}: {verdicts[0]}"]
            problems += of_bundle
            num_verified += not of_bundle
            num_other_version += bool(verdicts and not of_bundle)
    elsewhere = sum(
        entry.record.evidence.kind == "bundle" and "://" in entry.record.evidence.where for entry in ledger.entries
    )
    return Checked(
        len(ledger.entries), num_verified, num_other_version, elsewhere, kinds.count("result file"),
        kinds.count("made up"), len(ledger.withdrawn), problems,
    )  # fmt: skip


def _bundle_problems(root: Path, entry: Entry, bundle: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return the problems of a record's bundle, and the verdicts that only another version gives."""
    if not bundle.is_file():
        return [f"{entry.id}: its bundle {bundle} is missing"], ()
    if file_sha256(bundle) != entry.record.evidence.sha256:
        return [f"{entry.id}: its bundle {bundle} was changed"], ()
    try:
        again, verdicts = _recomputed(root, bundle, entry.record.evidence)
    except (RequestError, RunError) as error:
        return [f"{entry.id}: {error}"], ()
    stored, computed = (record.model_dump(exclude=set(_ADDED)) for record in (entry.record, again))
    if differing := [name for name in stored if stored[name] != computed[name]]:
        return [f"{entry.id}: its bundle gives another record: {', '.join(differing)}"], ()
    return [], verdicts


def _changes(root: Path, since: str) -> tuple[frozenset[str], list[str]]:
    """Return the records that were added since a commit, and the files that were changed or removed."""
    command = ["git", "-C", str(root), "diff", "--name-status", "--no-renames", since, "--", RECORDS, BUNDLES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"{root}: git cannot compare with {since}: {done.stderr.strip()}")
    added, problems = set(), []
    for line in done.stdout.splitlines():
        state, _, name = line.partition("\t")
        if state == "A":
            added.add(Path(name).stem)
        else:
            how = "removed" if state == "D" else "changed"
            problems.append(f"{name}: was {how} since {since}: records are only added")
    return frozenset(added), problems


def open_ledger(root: Path) -> Ledger:
    """Return a ledger for reading. Raises RunError with its first problem if it has any."""
    ledger = read_ledger(root)
    if ledger.problems:
        raise RunError(f"{ledger.problems[0]}; see 'accelmark ledger check {root}'")
    return ledger


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
