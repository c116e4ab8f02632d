"""The records of a ledger: small JSON files, named by their content, that are only ever added."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from accelmark.results.comparison import changes_of, value_text
from accelmark.results.figures import HEADLINES, RATES, FigureName
from accelmark.results.prices import units_per_epoch
from accelmark.results.schema import Mark, RoundResult, Task, Verdict
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun
from accelmark.spec.errors import RunError, first_error
from accelmark.spec.key import CaseKey
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
    """Name of the device, as it reports it."""
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
    """UTC, ISO 8601."""
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

    @property
    def date(self) -> str:
        """The day on which the run started."""
        return self.started_at[:10]

    @property
    def subject(self) -> str:
        """Part of the record's name."""
        return self.cases[0].key.model


class Withdrawal(Spec):
    """A record that takes another one back."""

    schema_version: Literal[1] = 1
    kind: Literal["withdrawal"] = "withdrawal"
    added_at: str
    by: str
    record: str
    why: str = Field(min_length=1)

    @property
    def date(self) -> str:
        """The day on which it was added."""
        return self.added_at[:10]

    @property
    def subject(self) -> str:
        """Part of the record's name."""
        return "withdrawal"


AnyRecord = Annotated[Record | Withdrawal, Field(discriminator="kind")]
_ADAPTER: Final[TypeAdapter[Record | Withdrawal]] = TypeAdapter(AnyRecord)


class Entry(NamedTuple):
    """A record in a ledger."""

    id: str
    record: Record


class Ledger(NamedTuple):
    """All records of a directory, oldest first."""

    root: Path
    entries: list[Entry]
    withdrawn: dict[str, Withdrawal]
    """Record that was taken back -> why."""
    problems: list[str]
    """Files that are no valid record, and records that contradict others."""

    @property
    def valid(self) -> list[Entry]:
        """The records that were not withdrawn."""
        return [entry for entry in self.entries if entry.id not in self.withdrawn]


def write_record(root: Path, record: Record | Withdrawal) -> Path:
    """Write a record to a ledger; its name has the hash of its content. Raises RunError if it cannot be written."""
    text = record.model_dump_json(indent=1, exclude_defaults=True).replace(
        "{", f'{{\n "schema_version": {record.schema_version},\n "kind": "{record.kind}",', 1
    )
    name = f"{record.date}-{record.subject}-{_digest(text.encode())}"
    path = root / RECORDS / record.date[:7] / f"{name}.json"
    make_directory(path.parent)
    write_atomic(path, text)
    return path


def read_ledger(root: Path) -> Ledger:
    """Read all records of a ledger. Raises RunError if the directory has none."""
    files = sorted((root / RECORDS).glob("*/*.json"))
    if not files:
        raise RunError(f"{root}: is not a ledger: there are no {RECORDS}/*/*.json")
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
            if not _ID.fullmatch(file.stem) or not file.stem.endswith(_digest(raw)):
                problems.append(f"{file}: was changed: its name has another hash than its content")
            read.append((file.stem, record))
    entries = sorted(
        (Entry(name, one) for name, one in read if isinstance(one, Record)), key=lambda one: one.record.started_at
    )
    withdrawn = {one.record: one for _, one in read if isinstance(one, Withdrawal)}
    names = {entry.id for entry in entries}
    problems += [f"{name}: a withdrawal names it, but there is no such record" for name in withdrawn.keys() - names]
    ledger = Ledger(root, entries, withdrawn, problems)
    runs: dict[str, str] = {}
    for entry in ledger.valid:
        first = runs.setdefault(entry.record.run_id, entry.id)
        if first != entry.id:
            problems.append(f"{entry.id}: is a second record of the run of {first}")
        for other in set(entry.record.reproduces) - names:
            problems.append(f"{entry.id}: reproduces {other}, which is not in the ledger")
    return ledger


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:16]


def recorded_cases(run: LoadedRun) -> tuple[RecordedCase, ...]:
    """Return the cases of a run that have a round."""
    return tuple(_case(case, case.rounds[0]) for case in run.without_trials if case.rounds)


def _case(case: LoadedCase, first: RoundResult) -> RecordedCase:
    result = case.result
    figures = {
        name: Measured(value=spread.mean, low=spread.ci95 and spread.ci95[0], high=spread.ci95 and spread.ci95[1])
        for name in _KEPT
        if (spread := result.figures.get(name)) is not None and spread.mean is not None
    }
    return RecordedCase(
        key=result.key, task=result.task, unit=result.unit, variant=result.variant, case_version=first.case_version,
        precision=first.precision, vendor=first.vendor,
        device=str(first.environment.started.get("device_name") or (first.chip.title if first.chip else "unknown")),
        num_devices=first.num_devices, verdict=result.verdict, reasons=result.reasons, marks=result.marks,
        num_rounds=len(case.succeeded), work=_work(case, first), figures=figures,
        units_per_epoch=units_per_epoch(first), changed=changes_of(result.adaptation),
    )  # fmt: skip


def _work(case: LoadedCase, first: RoundResult) -> dict[str, str]:
    key, marks = case.result.key, case.result.marks
    work = {
        "version of the case": str(first.case_version),
        "scale": f"{key.nnodes} × {key.nproc}",
        **{name: with_it if mark in marks else without for mark, name, with_it, without in _WORDS},
    }
    if first.inference is not None:
        work |= {"precision": first.precision, "batch size": str(first.inference.batch_size)}
    if first.task == "serve":
        settings = {name: value_text(one.value) for name, one in first.settings.items() if name.startswith(_REQUESTS)}
        work |= {"precision": first.precision} | settings
    return work


def environment_of(run: LoadedRun) -> dict[str, str]:
    """Return a record's statements about the machine and software of a run."""
    first = next((result for case in run.cases for result in case.rounds), None)
    if first is None:
        return {}
    host: Mapping[str, Any] = next(iter(first.environment.hosts), {})
    started = first.environment.started
    values = {
        "os": host.get("os"), "python": host.get("python"), "cpu": (host.get("cpu") or {}).get("model"),
        "cores": (host.get("cpu") or {}).get("usable_cores"), "drivers": ", ".join(map(str, host.get("drivers") or ())),
        "framework": started.get("framework"), "framework version": started.get("framework_version"),
    }  # fmt: skip
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


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
