"""The input of the rules: the rounds of a case and the records that the run stored with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVarTuple

from pydantic import TypeAdapter, ValidationError

from accelmark.results.read.round_dir import Reevaluation, read_reevaluation, reevaluation_dir
from accelmark.results.schema import Finding, RoundResult, finding
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import JobSpec
from accelmark.spec.layers import flatten, may_change
from accelmark.spec.log import records
from accelmark.spec.log.events import Started
from accelmark.spec.model import Spec
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import case_hash, find, folders, load_case, load_vendor
from accelmark.spec.plugins.vendor import VendorSpec

_DATA: Final[TypeAdapter[dict[str, records.DataRecord]]] = TypeAdapter(dict[str, records.DataRecord])


class Standard(NamedTuple):
    """The standard case on this machine; ``sha256`` is over its files of the round's task."""

    spec: CaseSpec
    sha256: str
    is_shipped: bool


class RoundEvidence(NamedTuple):
    """One round."""

    result: RoundResult
    job: JobSpec | None
    standard: Standard | None = None
    """The case of the run's name and version; None where this machine has none."""
    shipped_vendor: VendorSpec | None = None
    started: Started | None = None
    """INIT_END of rank 0; None for inference, or where the rank did not write it."""
    data: Mapping[str, records.DataRecord] | None = None
    reevaluation: Reevaluation | None = None
    adaptations: tuple[records.AdaptationRecord, ...] = ()
    """What each host executed of the vendor's folder."""
    environments: tuple[records.EnvironmentRecord, ...] = ()
    """The environment of the ranks on each host, and of the evaluation job's ranks, where they were recorded."""

    @property
    def number(self) -> int:
        """Number of the round, from 1."""
        return self.result.round

    @property
    def size(self) -> Literal["mini", "standard"]:
        """Size of the case; ``mini`` where this machine does not have it."""
        return self.standard.spec.size if self.standard is not None else "mini"


class Evidence(NamedTuple):
    """All rounds of one key."""

    run_dir: Path
    slug: str
    """The key's directory in it; empty without a round."""
    rounds: Sequence[RoundEvidence]
    num_planned: int

    @property
    def succeeded(self) -> list[RoundEvidence]:
        """The rounds that succeeded."""
        return [entry for entry in self.rounds if entry.result.state == "succeeded"]

    def all_rounds(self) -> Iterator[tuple[RoundEvidence]]:
        """Yield every round."""
        yield from ((entry,) for entry in self.rounds)

    def succeeded_rounds(self) -> Iterator[tuple[RoundEvidence]]:
        """Yield the rounds that succeeded."""
        yield from ((entry,) for entry in self.succeeded)


def deviation(entry: RoundEvidence, rule: str, expected: str, actual: str) -> Finding:
    """Return a finding about a changed workload: an error, or open where the run was started with --open."""
    return finding("open" if "open" in entry.result.marks else "error", rule, expected, actual)


def changed_settings(
    entry: RoundEvidence, standard: Mapping[str, Any], actual: Spec, mutable: Sequence[str]
) -> Findings:
    """Report settings that differ from the case's, which are checked by the model of the ``actual`` ones."""
    try:
        fixed = flatten(type(actual).model_validate(standard).model_dump(mode="json"))
    except ValidationError:
        return
    forced = {name for name, setting in entry.result.settings.items() if setting.forced}
    changed = [
        f"{name} is {value} instead of {fixed.get(name)}"
        for name, value in flatten(actual.model_dump(mode="json")).items()
        if value != fixed.get(name) and not may_change(name, mutable) and name not in forced
    ]
    if changed:
        yield deviation(entry, "settings-changed", "the settings of case.yaml", "; ".join(changed))


Ts = TypeVarTuple("Ts")
Findings = Iterator[Finding]
Rule = Callable[[Evidence], Findings]


def for_each(
    select: Callable[[Evidence], Iterable[tuple[RoundEvidence, *Ts]]], *checks: Callable[[RoundEvidence, *Ts], Findings]
) -> Rule:
    """Return the rule that applies ``checks``, each of one round, to the rounds that ``select`` returns."""

    def rule(evidence: Evidence) -> Findings:
        for parts in select(evidence):
            for check in checks:
                yield from (finding.model_copy(update={"round": parts[0].number}) for finding in check(*parts))

    return rule


def gather_evidence(run_dir: Path, rounds: Mapping[str, RoundResult], num_planned: int) -> Evidence:
    """Read the records of the rounds of one key; unreadable records are None, which the rules report."""
    first = next(iter(rounds.values()), None)
    standard: Standard | None = None
    vendor: VendorSpec | None = None
    if first is not None:
        vendor = _shipped_vendor(first.vendor)
        with suppress(AccelmarkError):
            folder, spec = find("cases", first.key.model), load_case(first.key.model)
            if spec.version == first.case_version:
                standard = Standard(spec, case_hash(folder.path, first.task), folder.origin == "accelmark")
    entries = [_round(run_dir / name, result, standard, vendor) for name, result in rounds.items()]
    slug = next((name.split("/")[0] for name in rounds), "")
    return Evidence(run_dir, slug, sorted(entries, key=lambda entry: entry.number), num_planned)


def _round(round_dir: Path, result: RoundResult, standard: Standard | None, vendor: VendorSpec | None) -> RoundEvidence:
    data: dict[str, records.DataRecord] | None = None
    with suppress(OSError, ValidationError):
        data = _DATA.validate_json((round_dir / records.DATA_FILE).read_bytes())
    started: Started | None = None
    with suppress(ValidationError):  # an empty one is no record
        started = Started.model_validate(result.environment.started)
    adaptations = map(records.AdaptationRecord.stored, sorted(round_dir.glob(f"*_noderank*/{records.ADAPTATION_FILE}")))
    places = (round_dir, reevaluation_dir(round_dir))
    files = (path for place in places for path in sorted(place.glob(f"*_noderank*/{records.ENVIRONMENT_FILE}")))
    environments = map(records.EnvironmentRecord.stored, files)
    return RoundEvidence(
        result=result,
        job=JobSpec.stored(round_dir / "job.json"),
        standard=standard,
        shipped_vendor=vendor,
        started=started,
        data=data,
        reevaluation=read_reevaluation(round_dir),
        adaptations=tuple(filter(None, adaptations)),
        environments=tuple(filter(None, environments)),
    )


def described_hardware() -> set[str]:
    """Return the names, in lower case, of the chips that AccelMark's vendors describe."""
    vendors = filter(None, map(_shipped_vendor, folders("vendors")))
    return {name for vendor in vendors for chip in vendor.chips for name in chip.key_names}


def _shipped_vendor(name: str) -> VendorSpec | None:
    with suppress(AccelmarkError):
        return load_vendor(name) if find("vendors", name).origin == "accelmark" else None
    return None
