"""A ledger of verified bundles: records are small JSON files, named by their content, that are only ever added."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from accelmark.audit.verify import verify_run
from accelmark.results.claims import load_result
from accelmark.results.comparison import changes_of, value_text
from accelmark.results.figures import HEADLINES, RATES, FigureName
from accelmark.results.prices import units_per_epoch
from accelmark.results.read.round_dir import read_json
from accelmark.results.schema import Mark, RoundResult, Task, Verdict
from accelmark.results.store.bundle import SUFFIX, Trust, file_sha256, is_bundle, unpack
from accelmark.results.store.files import make_directory, write_atomic, write_errors
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun, load_run
from accelmark.spec.errors import RequestError, RunError, first_error
from accelmark.spec.key import CaseKey
from accelmark.spec.log.records import REGISTRATION_FILE
from accelmark.spec.model import Spec

RECORDS: Final = "records"
BUNDLES: Final = "bundles"
SIGNERS: Final = "allowed_signers"
"""In a ledger: the keys of those who may sign, in the format of ssh-keygen's ALLOWED SIGNERS."""
AGREEMENT: Final = 0.05
"""Largest difference between the headline figures of two results that reproduce each other."""
_KEPT: Final = (*HEADLINES, *RATES.values(), FigureName.THROUGHPUT_PER_DEVICE, FigureName.MEAN_POWER)
_ID: Final = re.compile(r"\d{4}-\d{2}-\d{2}-[A-Za-z0-9._+-]+-[0-9a-f]{16}")
_WORDS: Final[tuple[tuple[Mark, str, str, str], ...]] = (
    ("synthetic", "data", "synthetic", "real"),
    ("open", "settings", "open", "closed"),
    ("partial", "length", "ended early", "whole"),
    ("partial_evaluation", "evaluation", "a part of the data", "all data"),
)
_REQUESTS: Final = ("prompts.", "slo.", "api")


class Measured(Spec):
    """A figure with its 95 % interval over rounds; one round has none."""

    value: FiniteFloat
    low: FiniteFloat | None = None
    high: FiniteFloat | None = None


class RecordedCase(Spec):
    """One case of a run."""

    key: CaseKey
    task: Task
    unit: str
    variant: str | None = None
    case_version: int
    precision: str
    vendor: str
    device: str
    num_devices: int
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    num_rounds: int
    work: dict[str, str]
    """Conditions that must be equal in results that are compared: version of the case, data, scale, …"""
    figures: dict[FigureName, Measured]
    units_per_epoch: float | None = None
    changed: tuple[str, ...] = ()
    """What the vendor changed of the standard case."""

    @property
    def headline(self) -> Measured | None:
        """The main figure of its task: a rate."""
        return self.figures.get(RATES[self.task])


class Evidence(Spec):
    """The file that a record is made from."""

    kind: Literal["bundle", "result file", "made up"]
    """``bundle``: everything was recomputed from it. ``result file``: nothing could be."""
    sha256: str
    where: str
    """Path in the ledger, or URL; empty: not published."""


class Record(Spec):
    """One run."""

    schema_version: Literal[1] = 1
    kind: Literal["result"] = "result"
    added_at: str
    by: str
    """Who adds it, as they say themselves."""
    note: str = ""
    run: str
    run_id: str
    """The same for all bundles of one run."""
    started_at: str
    accelmark_version: str
    evidence: Evidence
    signed_by: str | None
    """Name of the signer in ``allowed_signers``; null: unsigned."""
    registered: str
    """The run's entry in the registry of its user."""
    environment: dict[str, str]
    cases: tuple[RecordedCase, ...] = Field(min_length=1)
    reproduces: tuple[str, ...] = ()
    """Records of other signers that it agrees with."""


class Withdrawal(Spec):
    """A record that takes another one back."""

    schema_version: Literal[1] = 1
    kind: Literal["withdrawal"] = "withdrawal"
    added_at: str
    by: str
    record: str
    why: str = Field(min_length=1)


AnyRecord = Annotated[Record | Withdrawal, Field(discriminator="kind")]
_ADAPTER: Final[TypeAdapter[Record | Withdrawal]] = TypeAdapter(AnyRecord)


class Entry(NamedTuple):
    """A record in a ledger."""

    id: str
    record: Record


class Ledger(NamedTuple):
    """All records of a directory, oldest first."""

    entries: list[Entry]
    withdrawn: dict[str, Withdrawal]
    """Record that was taken back -> why."""
    problems: list[str]
    """Files that are not valid records, and records that contradict others."""

    @property
    def valid(self) -> list[Entry]:
        """The records that were not withdrawn."""
        return [entry for entry in self.entries if entry.id not in self.withdrawn]


def write_record(root: Path, record: Record | Withdrawal) -> Path:
    """Write a record to a ledger; its name has the hash of its content. Raises RunError if it cannot be written."""
    text = record.model_dump_json(indent=1, exclude_defaults=True).replace(
        "{", f'{{\n "schema_version": {record.schema_version},\n "kind": "{record.kind}",', 1
    )
    date, subject = record.added_at, "withdrawal"
    if isinstance(record, Record):
        date, subject = record.started_at, record.cases[0].key.model
    path = root / RECORDS / date[:7] / f"{date[:10]}-{subject}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    make_directory(path.parent)
    write_atomic(path, text)
    return path


def read_ledger(root: Path) -> Ledger:
    """Read all records of a ledger. Raises RunError if the directory has none."""
    files = sorted((root / RECORDS).glob("*/*.json"))
    if not files:
        raise RunError(f"{root}: is not a ledger: it has no {RECORDS}/*/*.json")
    read: list[tuple[str, Record | Withdrawal]] = []
    problems: list[str] = []
    for file in files:
        try:
            raw = file.read_bytes()
            record = _ADAPTER.validate_json(raw)
        except OSError as error:
            problems.append(f"{file}: cannot be read: {error.strerror}")
        except ValidationError as error:
            problems.append(f"{file}: is not a record: {first_error(error)}")
        else:
            if not _ID.fullmatch(file.stem) or not file.stem.endswith(hashlib.sha256(raw).hexdigest()[:16]):
                problems.append(f"{file}: was changed: its name has another hash than its content")
            read.append((file.stem, record))
    results = (Entry(name, one) for name, one in read if isinstance(one, Record))
    entries = sorted(results, key=lambda one: one.record.started_at)
    withdrawn = {one.record: one for _, one in read if isinstance(one, Withdrawal)}
    names = {entry.id for entry in entries}
    problems += [f"{name}: a withdrawal names it, but there is no such record" for name in withdrawn.keys() - names]
    ledger = Ledger(entries, withdrawn, problems)
    runs: dict[str, str] = {}
    for entry in ledger.valid:
        first = runs.setdefault(entry.record.run_id, entry.id)
        if first != entry.id:
            problems.append(f"{entry.id}: is a second record of the run of {first}")
        for other in set(entry.record.reproduces) - names:
            problems.append(f"{entry.id}: reproduces {other}, which is not in the ledger")
    return ledger


def _work(case: LoadedCase, first: RoundResult) -> dict[str, str]:
    key, marks = case.result.key, case.result.marks
    work = {"version of the case": str(first.case_version), "scale": f"{key.nnodes} × {key.nproc}"}
    work |= {name: with_it if mark in marks else without for mark, name, with_it, without in _WORDS}
    if first.inference is not None:
        work |= {"precision": first.precision, "batch size": str(first.inference.batch_size)}
    if first.task == "serve":
        settings = {name: value_text(one.value) for name, one in first.settings.items() if name.startswith(_REQUESTS)}
        work |= {"precision": first.precision} | settings
    return work


def work_key(case: RecordedCase) -> tuple[object, ...]:
    """Return what two results have in common that can reproduce each other."""
    key = case.key
    return (key.model, case.task, key.hardware, case.unit, case.variant, case.precision, *sorted(case.work.items()))


def close(first: Measured | None, second: Measured | None) -> bool:
    """Return whether two figures are within :data:`AGREEMENT`, or their intervals overlap."""
    if first is None or second is None:
        return False
    if abs(first.value - second.value) <= AGREEMENT * max(first.value, second.value):
        return True
    lows, highs = (first.low, second.low), (first.high, second.high)
    return None not in (*lows, *highs) and max(low or 0 for low in lows) <= min(high or 0 for high in highs)


def reproduced(record: Record, entries: Iterable[Entry]) -> Iterator[str]:
    """Yield the names of the records of other signers that a signed record agrees with in a case."""
    for entry in entries:
        other = entry.record.signed_by
        if record.signed_by and other and other != record.signed_by:
            pairs = ((one, two) for one in record.cases for two in entry.record.cases)
            if any(work_key(one) == work_key(two) and close(one.headline, two.headline) for one, two in pairs):
                yield entry.id


def parties(entries: Iterable[Entry]) -> dict[tuple[str, int], int]:
    """Return how many signers have a result that agrees with each case (name of the record, number of the case)."""
    groups: dict[tuple[object, ...], list[tuple[str, int, str | None, Measured | None]]] = {}
    for entry in entries:
        for number, case in enumerate(entry.record.cases):
            groups.setdefault(work_key(case), []).append((entry.id, number, entry.record.signed_by, case.headline))
    return {
        (name, number): len({signer for _, _, signer, other in group if signer and close(rate, other)})
        for group in groups.values()
        for name, number, _, rate in group
    }


_ADDED: Final = ("added_at", "by", "note", "reproduces")
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
    evidence = Evidence(kind="bundle", sha256=digest, where=at or name)
    record, verdicts = _recomputed(root, bundle, evidence)
    if verdicts:
        raise RunError(f"{bundle.name}: {verdicts[0]}; verify it with the AccelMark that ran")
    path = _add(root, record, by, note)
    if at is None:
        make_directory(root / BUNDLES)
        with write_errors(root / name):
            shutil.copyfile(bundle, root / name)
    return path


def add_result(root: Path, result: Path, *, by: str, at: str | None = None, note: str = "") -> Path:
    """Write a record of a ``result.json`` without a bundle, which says that nothing could be verified."""
    digest = file_sha256(result)
    evidence = Evidence(kind="result file", sha256=digest, where=at or "")
    return _add(root, _record(load_result(result), evidence, digest, None, "not known"), by, note)


def withdraw(root: Path, name: str, *, by: str, why: str) -> Path:
    """Write a record that takes another one back. Raises RequestError if there is no such record, or it was already."""
    ledger = read_ledger(root)
    if name not in {entry.id for entry in ledger.valid}:
        state = "was withdrawn already" if name in ledger.withdrawn else "is not a record of this ledger"
        raise RequestError(f"{name}: {state}")
    if not why.strip():
        raise RequestError("--why: state the reason")
    return write_record(root, Withdrawal(added_at=_now(), by=by, record=name, why=why))


def _add(root: Path, record: Record, by: str, note: str) -> Path:
    entries = read_ledger(root).valid if (root / RECORDS).is_dir() else []
    for entry in entries:
        if entry.record.run_id == record.run_id:
            raise RequestError(f"{record.run}: the run has a record already: {entry.id}")
    added = {"by": by, "note": note, "reproduces": tuple(reproduced(record, entries))}
    return write_record(root, record.model_copy(update=added))


def _recomputed(root: Path, bundle: Path, evidence: Evidence) -> tuple[Record, tuple[str, ...]]:
    """Return the record of a bundle, and the verdicts that another version of AccelMark gave and this one does not."""
    signers = root / SIGNERS
    with tempfile.TemporaryDirectory(prefix="accelmark-ledger-") as directory:
        run_dir, edited = unpack(bundle, Path(directory))
        verified = verify_run(run_dir, Trust(allowed_signers=signers if signers.is_file() else None))
        signature = verified.signature
        problems = [*edited, *verified.changed, *verified.figure_differences]
        problems += verified.verdict_differences if verified.is_same_version else ()
        if signature.status in ("signed", "untrusted"):
            problems.append(f"{signature.text}; its key is not in the ledger's allowed_signers")
        elif signature.status not in ("unsigned", "trusted"):
            problems.append(signature.text)
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
        return _record(run, evidence, str(registration["nonce"]), signed_by, entry), verified.verdict_differences


def _record(run: LoadedRun, evidence: Evidence, run_id: str, signed_by: str | None, registered: str) -> Record:
    cases: list[RecordedCase] = []
    for case in run.without_trials:
        first, result = case.first, case.result
        if first is None:
            continue
        figures = {
            name: Measured(value=spread.mean, low=spread.ci95 and spread.ci95[0], high=spread.ci95 and spread.ci95[1])
            for name in _KEPT
            if (spread := result.figures.get(name)) is not None and spread.mean is not None
        }
        device = first.environment.started.get("device_name") or (first.chip.title if first.chip else "unknown")
        recorded = RecordedCase(
            key=result.key, task=result.task, unit=result.unit, variant=result.variant,
            case_version=first.case_version, precision=first.precision, vendor=first.vendor, device=str(device),
            num_devices=first.num_devices, verdict=result.verdict, reasons=result.reasons, marks=result.marks,
            num_rounds=len(case.succeeded), work=_work(case, first), figures=figures,
            units_per_epoch=units_per_epoch(first), changed=changes_of(result.adaptation),
        )  # fmt: skip
        cases.append(recorded)
    if not cases:
        raise RunError(f"{run.path}: has no round that could be read")
    environment = next(result for case in run.cases for result in case.rounds).environment
    host: Mapping[str, Any] = next(iter(environment.hosts), {})
    started, cpu = environment.started, host.get("cpu") or {}
    stated = {
        "os": host.get("os"), "python": host.get("python"), "cpu": cpu.get("model"), "cores": cpu.get("usable_cores"),
        "drivers": ", ".join(map(str, host.get("drivers") or ())), "framework": started.get("framework"),
        "framework version": started.get("framework_version"),
    }  # fmt: skip
    summary = run.summary
    return Record(
        added_at=_now(), by="", run=summary.run, run_id=run_id, started_at=summary.started_at,
        accelmark_version=summary.accelmark_version, evidence=evidence, signed_by=signed_by, registered=registered,
        cases=tuple(cases),
        environment={name: str(value) for name, value in stated.items() if value not in (None, "")},
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
    stated = [entry.record.evidence for entry in ledger.entries]
    kinds = [evidence.kind for evidence in stated]
    num_verified = num_other_version = 0
    for entry in ledger.valid:
        evidence = entry.record.evidence
        if evidence.kind == "bundle" and "://" not in evidence.where:
            problem, verdicts = _bundle_problem(root, entry, root / evidence.where)
            if verdicts and entry.id in added:
                problem = verdicts[0]
            problems += [f"{entry.id}: {problem}"] if problem else []
            num_verified += not problem
            num_other_version += bool(verdicts and not problem)
    elsewhere = sum(evidence.kind == "bundle" and "://" in evidence.where for evidence in stated)
    return Checked(
        len(ledger.entries), num_verified, num_other_version, elsewhere, kinds.count("result file"),
        kinds.count("made up"), len(ledger.withdrawn), problems,
    )  # fmt: skip


def _bundle_problem(root: Path, entry: Entry, bundle: Path) -> tuple[str, tuple[str, ...]]:
    if not bundle.is_file():
        return f"its bundle {bundle} is missing", ()
    if file_sha256(bundle) != entry.record.evidence.sha256:
        return f"its bundle {bundle} was changed", ()
    try:
        again, verdicts = _recomputed(root, bundle, entry.record.evidence)
    except (RequestError, RunError) as error:
        return str(error), ()
    stored, computed = (record.model_dump(exclude=set(_ADDED)) for record in (entry.record, again))
    differing = [name for name in stored if stored[name] != computed[name]]
    return (f"its bundle gives another record: {', '.join(differing)}", ()) if differing else ("", verdicts)


def _changes(root: Path, since: str) -> tuple[frozenset[str], list[str]]:
    command = ["git", "-C", str(root), "diff", "--name-status", "--no-renames", since, "--", RECORDS, BUNDLES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"{root}: git cannot compare with {since}: {done.stderr.strip()}")
    added, problems = set(), []
    for state, _, name in (line.partition("\t") for line in done.stdout.splitlines()):
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
