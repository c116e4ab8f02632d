"""Verify a run: recompute every figure from events and telemetry, and compare with the stored results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from accelmark.audit.evidence import RoundEvidence
from accelmark.audit.provenance import own_hash
from accelmark.audit.reevaluation import reevaluation_findings, replay_findings
from accelmark.audit.verdict import audit_case
from accelmark.results.read.round_dir import Reevaluation, read_job, read_reevaluation, reevaluation_dir
from accelmark.results.rounds.summary import gather, round_result
from accelmark.results.schema import CaseResult, Finding, RoundResult, Summary
from accelmark.results.store import loaded_run
from accelmark.results.store.bundle import SignatureState, Trust, check_manifest, check_signature
from accelmark.spec.errors import RunError
from accelmark.spec.job import TrainJob
from accelmark.spec.log.records import SOURCE_FILE, SourceRecord

TOLERANCE: Final = 1e-9
"""Relative difference between two machines' floating-point arithmetic."""


class Verification(NamedTuple):
    """The result of verifying a run."""

    summary: Summary
    changed: tuple[str, ...]
    figure_differences: tuple[str, ...]
    """Stored figures and facts of rounds that differ from the recomputed ones, and data from the reader's."""
    verdict_differences: tuple[str, ...]
    """Stored findings and verdicts that differ. A later AccelMark may judge the same figures differently."""
    num_figures: int
    signature: SignatureState
    is_same_version: bool
    """Whether the AccelMark that ran has the same files as this one."""

    @property
    def differences(self) -> tuple[str, ...]:
        """Stored results that differ from the recomputed ones."""
        return (*self.figure_differences, *self.verdict_differences)

    @property
    def is_intact(self) -> bool:
        """Whether no file was edited, no signature is broken, and all results could be reproduced."""
        return not self.changed and not self.differences and self.signature.status != "broken"


class CheckedAgain(NamedTuple):
    """The result of evaluating or replaying a finished round again."""

    round: str
    found: Reevaluation
    findings: tuple[Finding, ...]
    counts: bool
    """Whether the figures use its metrics; false for a repeated evaluation."""

    @property
    def is_reproduced(self) -> bool:
        """Whether everything was as training reported it."""
        return not any(finding.severity in ("error", "open") for finding in self.findings)

    def values(self) -> dict[str, Any]:
        """Return the result for ``--json``."""
        return {
            "round": self.round,
            "metrics": self.found.metrics,
            "num_replayed_steps": sum(replay.num_steps for replay in self.found.replays),
            "duration_s": self.found.duration_s,
            "findings": [finding.model_dump(mode="json") for finding in self.findings],
        }


def checked_again(places: Mapping[Path, Path]) -> list[CheckedAgain]:
    """Compare evaluation jobs with their rounds (directory of each round -> directory of its evaluation job)."""
    checked = []
    for round_dir, place in places.items():
        work, reevaluation = read_job(round_dir).work, read_reevaluation(round_dir, place)
        if reevaluation is None or not isinstance(work, TrainJob):
            raise RunError(f"{place}: the evaluation job left no records")
        result = loaded_run.load_round(round_dir / loaded_run.RESULT_FILE)
        entry = RoundEvidence(result, read_job(round_dir))
        findings = [*reevaluation_findings(entry, reevaluation), *replay_findings(entry, work, reevaluation)]
        name = f"{round_dir.parent.name}/{round_dir.name}"
        counts = work.is_checked and place == reevaluation_dir(round_dir)
        checked.append(CheckedAgain(name, reevaluation, tuple(findings), counts))
    return checked


def verify_run(run_dir: Path, trust: Trust | None = None) -> Verification:
    """Recompute a run and compare; writes nothing into it. Raises RunError where there is nothing to compare with."""
    loaded_run.require_ended(run_dir)
    changed = tuple(check_manifest(run_dir))
    stored = loaded_run.load_summary(run_dir / loaded_run.SUMMARY_FILE)
    summary, rounds = gather(run_dir, audit_case, round_result)
    source = SourceRecord.stored(run_dir / SOURCE_FILE)
    same = source is not None and source.sha256 == own_hash()
    figures, verdicts = _summary_differences(stored, summary)
    for name, computed in rounds.items():
        try:
            before = loaded_run.load_round(run_dir / name / loaded_run.RESULT_FILE)
        except RunError as error:
            figures.append(str(error))
            continue
        facts = _round_facts(computed)
        if not same:  # a later AccelMark may have figures that this run's had not
            facts = {fact: value for fact, value in facts.items() if fact in _round_facts(before)}
        figures += _differences(name, _round_facts(before), facts)
        # Texts of findings change between versions of AccelMark; rules and severities do not.
        verdicts += _differences(name, _finding_counts(before), _finding_counts(computed), absent=0)
    num_figures = sum(len(result.figures) for result in rounds.values())
    num_figures += sum(len(case.figures) for case in summary.cases)
    signature = check_signature(run_dir, trust)
    return Verification(summary, changed, tuple(figures), tuple(verdicts), num_figures, signature, same)


def _round_facts(result: RoundResult) -> dict[str, Any]:
    figures: dict[str, Any] = {name: figure.value for name, figure in result.figures.items()}
    facts = ("key", "state", "converged", "precision", "marks", "num_steps", "num_samples", "num_devices", "target")
    return figures | {fact: getattr(result, fact) for fact in facts}


def _finding_counts(result: RoundResult) -> Counter[str]:
    return Counter(f"findings of rule {finding.rule} with severity {finding.severity}" for finding in result.findings)


def _summary_differences(stored: Summary, computed: Summary) -> tuple[list[str], list[str]]:
    """Return the figures and facts that differ, and the verdicts."""
    before, after = ({"state": summary.state, "vendor": summary.vendor} for summary in (stored, computed))
    facts, verdicts = list(_differences("summary", before, after)), list[str]()
    by_rounds = {(case.key, case.rounds): case for case in computed.cases}
    for case in stored.cases:
        other = by_rounds.pop((case.key, case.rounds), None)
        if other is None:
            facts.append(f"summary: {case.key}: the run has no such case")
            continue
        facts += _differences(f"summary: {case.key}", _case_facts(case), _case_facts(other))
        if case.verdict != other.verdict:
            reasons = "; ".join(other.reasons) or "no findings against it"
            changed = f"stored {case.verdict}, recomputed {other.verdict}"
            verdicts.append(f"summary: {case.key}: verdict: {changed} ({reasons})")
    facts += (f"summary: {key}: is missing" for key, _ in by_rounds)
    return facts, verdicts


def _case_facts(case: CaseResult) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(case, name) for name in ("state", "converged", "marks", "unit")}
    return fields | {name: spread.mean for name, spread in case.figures.items()}


def _differences(
    where: str, stored: Mapping[str, Any], computed: Mapping[str, Any], absent: int | None = None
) -> Iterator[str]:
    for name in dict.fromkeys([*stored, *computed]):
        before, after = stored.get(name, absent), computed.get(name, absent)
        both = isinstance(before, float) and isinstance(after, float)
        if not (math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=1e-12) if both else before == after):
            yield f"{where}: {name}: stored {_text(before)}, recomputed {_text(after)}"


def _text(value: Any) -> str:
    return "null" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)
