"""Evidence for the rules: the rounds of a case and the records that the run stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from accelmark.results.schema import Finding, RoundResult, Severity
from accelmark.spec.case import CaseSpec
from accelmark.spec.catalog import Folder, find, load_case, load_vendor, tree_hash
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.events import Inspected, Started
from accelmark.spec.evidence import ADAPTATION_FILE, DATA_FILE, SOURCE_FILE, AdaptationRecord, DataRecord, SourceRecord
from accelmark.spec.job import JobSpec
from accelmark.spec.model import Spec
from accelmark.spec.vendor import VendorSpec

S = TypeVar("S", bound=Spec)

_DATA: Final[TypeAdapter[dict[str, DataRecord]]] = TypeAdapter(dict[str, DataRecord])


@final
@dataclass(frozen=True, slots=True)
class RoundEvidence:
    """One round."""

    result: RoundResult
    job: JobSpec | None
    """null where ``job.json`` cannot be read any more."""
    started: Started | None = None
    """What rank 0 told of itself; null for inference, and where it did not get so far."""
    inspected: Inspected | None = None
    """What all ranks saw of a vendor's code; null where they saw none, or did not come to the end."""
    data: Mapping[str, DataRecord] | None = None
    """null where the run did not write down what data it used."""
    adaptations: tuple[AdaptationRecord, ...] = ()
    """What each host carried out of the vendor's folder."""

    @property
    def number(self) -> int:
        """Number of the round, from 1."""
        return self.result.round

    @property
    def is_open(self) -> bool:
        """Whether the run declared itself open."""
        return "open" in self.result.marks


@final
@dataclass(frozen=True, slots=True)
class Standard:
    """The standard case as it is known here."""

    spec: CaseSpec
    sha256: str
    is_ours: bool
    """Whether AccelMark ships it."""


@final
@dataclass(frozen=True, slots=True)
class Evidence:
    """All rounds of one key."""

    rounds: Sequence[RoundEvidence]
    num_wanted: int
    standard: Standard | None
    """The case of that name and version on this machine; null where there is none."""
    source: SourceRecord | None
    shipped_vendor: VendorSpec | None = None
    """The vendor of the run as AccelMark ships it; null where it ships none of that name."""

    @property
    def good(self) -> list[RoundEvidence]:
        """The rounds that succeeded."""
        return [entry for entry in self.rounds if entry.result.state == "succeeded"]

    def shipped_module(self, framework: str) -> str | None:
        """Return the module that registers the vendor's device with ``framework``, as AccelMark ships the vendor."""
        device = self.shipped_vendor.frameworks.get(framework) if self.shipped_vendor is not None else None
        return device.module if device is not None else None

    @property
    def is_open(self) -> bool:
        """Whether any round was declared open."""
        return any(entry.is_open for entry in self.rounds)


def gather_evidence(run_dir: Path, rounds: Mapping[str, RoundResult], num_wanted: int) -> Evidence:
    """Read the records of the rounds of one key; what cannot be read is absent, which the rules tell."""
    entries = [_round(run_dir / name, result) for name, result in rounds.items()]
    return Evidence(
        rounds=sorted(entries, key=lambda entry: entry.number),
        num_wanted=num_wanted,
        standard=_standard(entries),
        source=_parsed(SourceRecord, run_dir / SOURCE_FILE),
        shipped_vendor=_shipped_vendor(entries),
    )


def _round(round_dir: Path, result: RoundResult) -> RoundEvidence:
    is_train = result.task == "train"
    try:
        data = _DATA.validate_json((round_dir / DATA_FILE).read_bytes())
    except (OSError, ValidationError):
        data = None
    records = (_parsed(AdaptationRecord, path) for path in sorted(round_dir.glob(f"*_noderank*/{ADAPTATION_FILE}")))
    return RoundEvidence(
        result=result,
        job=_parsed(JobSpec, round_dir / "job.json"),
        started=_told(Started, result.environment.started) if is_train else None,
        inspected=_told(Inspected, result.environment.inspected) if is_train else None,
        data=data,
        adaptations=tuple(record for record in records if record is not None),
    )


def _told(model: type[S], value: Mapping[str, Any]) -> S | None:
    try:
        return model.model_validate(value) if value else None
    except ValidationError:
        return None


def _parsed(model: Any, path: Path) -> Any:
    try:
        return model.model_validate(from_json(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _standard(entries: Sequence[RoundEvidence]) -> Standard | None:
    if not entries:
        return None
    result = entries[0].result
    try:
        folder: Folder = find("cases", result.key.model)
        spec = load_case(result.key.model)
    except AccelmarkError:
        return None
    if spec.version != result.case_version:
        return None
    return Standard(spec, tree_hash(folder.path), folder.origin == "accelmark")


def _shipped_vendor(entries: Sequence[RoundEvidence]) -> VendorSpec | None:
    if not entries:
        return None
    name = entries[0].result.vendor
    try:
        return load_vendor(name) if find("vendors", name).origin == "accelmark" else None
    except AccelmarkError:
        return None


def finding(severity: Severity, rule: str, expected: str, actual: str, entry: RoundEvidence | None = None) -> Finding:
    """Return a finding, about one round where ``entry`` is given."""
    number = entry.number if entry is not None else None
    return Finding(severity=severity, rule=rule, expected=expected, actual=actual, round=number)


def breach(rule: str, expected: str, actual: str, entry: RoundEvidence) -> Finding:
    """Return what changes the standard workload: an error, unless the run declared itself open."""
    return finding("open" if entry.is_open else "error", rule, expected, actual, entry)
