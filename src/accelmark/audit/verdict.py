"""The verdict: every rule's findings on one case, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from accelmark.audit import inference, outcome, provenance, workload
from accelmark.audit.evidence import Evidence, gather_evidence
from accelmark.results.schema import CaseVerdict, Finding, RoundResult, Verdict

Rule = Callable[[Evidence], Iterator[Finding]]

RULES: Final[tuple[Rule, ...]] = (
    outcome.rounds_complete,
    outcome.target_reached,
    outcome.real_data,
    workload.settings,
    workload.model_structure,
    workload.model_computation,
    workload.initial_weights,
    workload.optimizer_type,
    workload.dataset,
    workload.precision,
    workload.work_done,
    workload.seeds,
    inference.case_contract,
    inference.model_structure,
    inference.engine_source,
    inference.accuracy_gate,
    inference.precision,
    inference.enough_measured,
    inference.declared_time,
    inference.loadgen,
    outcome.enough_duration,
    outcome.chip_identity,
    outcome.plausible_utilisation,
    outcome.in_one_go,
    provenance.source_tree,
    provenance.case_folder,
    provenance.loaded_before,
    provenance.hooks,
)

_ORDER: Final = {"error": 0, "open": 1, "warning": 2, "info": 3}


def judge_case(run_dir: Path, rounds: Mapping[str, RoundResult], num_wanted: int) -> CaseVerdict:
    """Judge the rounds of one key: the one place where a verdict is made. See :class:`results.judgement.Judge`."""
    return judge(gather_evidence(run_dir, rounds, num_wanted))


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """Return INVALID with an error among the findings, else OPEN with an open one, else VALID."""
    severities = {finding.severity for finding in findings}
    return "INVALID" if "error" in severities else "OPEN" if "open" in severities else "VALID"


def judge(evidence: Evidence) -> CaseVerdict:
    """Return VALID, OPEN (declared open, or a person has to look at what was changed) or INVALID, with all findings."""
    found = [finding for rule in RULES for finding in rule(evidence)]
    found += [
        seen.model_copy(update={"round": entry.number}) for entry in evidence.rounds for seen in entry.result.findings
    ]
    found = sorted(dict.fromkeys(found), key=lambda finding: (_ORDER[finding.severity], finding.round or 0))
    verdict = verdict_of(found)
    reasons = dict.fromkeys(str(finding) for finding in found if finding.severity in ("error", "open"))
    return CaseVerdict(
        verdict=verdict, reasons=tuple(reasons), findings=tuple(found), adaptation=provenance.adaptation_cost(evidence)
    )
