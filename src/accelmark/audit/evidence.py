"""The input of the rules: the rounds of a case and the records that the run stored with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from accelmark.results.read.reevaluation import Reevaluation, read_reevaluation
from accelmark.results.schema import Finding, RoundResult, finding
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.events import Inspected, Started
from accelmark.spec.job import JobSpec
from accelmark.spec.model import Spec
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import find, load_case, load_vendor, tree_hash
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.records import ADAPTATION_FILE, DATA_FILE, SOURCE_FILE, AdaptationRecord, DataRecord, SourceRecord

S = TypeVar("S", bound=Spec)

_DATA: Final[TypeAdapter[dict[str, DataRecord]]] = TypeAdapter(dict[str, DataRecord])


@final
@dataclass(frozen=True, slots=True)
class RoundEvidence:
    """One round."""

    result: RoundResult
    job: JobSpec | None
    """None where ``job.json`` cannot be read."""
    started: Started | None = None
    """INIT_END of rank 0; None for inference, or where the rank did not write it."""
    inspected: Inspected | None = None
    """INSPECTED merged over all ranks; None where no rank inspected a vendor's code."""
    data: Mapping[str, DataRecord] | None = None
    """None where the run stored no record of its data."""
    reevaluation: Reevaluation | None = None
    """Result of the round's evaluation job; None where there was none."""
    adaptations: tuple[AdaptationRecord, ...] = ()
    """What each host executed of the vendor's folder."""

    @property
    def number(self) -> int:
        """Number of the round, from 1."""
        return self.result.round

    @property
    def is_open(self) -> bool:
        """Whether the run was started with --open."""
        return "open" in self.result.marks


@final
@dataclass(frozen=True, slots=True)
class Standard:
    """The standard case on this machine."""

    spec: CaseSpec
    sha256: str
    is_shipped: bool
    """Whether AccelMark ships it."""


@final
@dataclass(frozen=True, slots=True)
class Evidence:
    """All rounds of one key."""

    rounds: Sequence[RoundEvidence]
    num_planned: int
    standard: Standard | None
    """The case of the run's name and version; None where this machine has none."""
    source: SourceRecord | None
    shipped_vendor: VendorSpec | None = None
    """The vendor as AccelMark ships it; None where it ships none of that name."""

    @property
    def succeeded(self) -> list[RoundEvidence]:
        """The rounds that succeeded."""
        return [entry for entry in self.rounds if entry.result.state == "succeeded"]

    def shipped_module(self, framework: str) -> str | None:
        """Return the module that registers the vendor's device with ``framework``, as AccelMark ships the vendor."""
        device = self.shipped_vendor.frameworks.get(framework) if self.shipped_vendor is not None else None
        return device.module if device is not None else None


def deviation(rule: str, expected: str, actual: str, entry: RoundEvidence) -> Finding:
    """Return a finding about a changed workload: an error, or open where the run was started with --open."""
    return finding("open" if entry.is_open else "error", rule, expected, actual, entry.number)


def gather_evidence(run_dir: Path, rounds: Mapping[str, RoundResult], num_planned: int) -> Evidence:
    """Read the records of the rounds of one key; unreadable records are None, which the rules report."""
    entries = [_round(run_dir / name, result) for name, result in rounds.items()]
    return Evidence(
        rounds=sorted(entries, key=lambda entry: entry.number),
        num_planned=num_planned,
        standard=_standard(entries[0].result) if entries else None,
        source=_read(SourceRecord, run_dir / SOURCE_FILE),
        shipped_vendor=_shipped_vendor(entries[0].result.vendor) if entries else None,
    )


def _round(round_dir: Path, result: RoundResult) -> RoundEvidence:
    is_train = result.task == "train"
    try:
        data = _DATA.validate_json((round_dir / DATA_FILE).read_bytes())
    except (OSError, ValidationError):
        data = None
    records = (_read(AdaptationRecord, path) for path in sorted(round_dir.glob(f"*_noderank*/{ADAPTATION_FILE}")))
    return RoundEvidence(
        result=result,
        job=_read(JobSpec, round_dir / "job.json"),
        started=_parse(Started, result.environment.started) if is_train else None,
        inspected=_parse(Inspected, result.environment.inspected) if is_train else None,
        data=data,
        reevaluation=read_reevaluation(round_dir) if is_train else None,
        adaptations=tuple(record for record in records if record is not None),
    )


def _parse(model: type[S], value: Mapping[str, Any]) -> S | None:
    try:
        return model.model_validate(value) if value else None
    except ValidationError:
        return None


def _read(model: type[S], path: Path) -> S | None:
    try:
        return model.model_validate(from_json(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _standard(result: RoundResult) -> Standard | None:
    try:
        folder = find("cases", result.key.model)
        spec = load_case(result.key.model)
    except AccelmarkError:
        return None
    if spec.version != result.case_version:
        return None
    return Standard(spec, tree_hash(folder.path), folder.origin == "accelmark")


def _shipped_vendor(name: str) -> VendorSpec | None:
    try:
        return load_vendor(name) if find("vendors", name).origin == "accelmark" else None
    except AccelmarkError:
        return None
