"""Decide the verdict on a case: VALID, OPEN or INVALID, from the findings of all rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from accelmark.audit import inference, provenance, reevaluation, rounds, serving
from accelmark.audit.evidence import Evidence, Rule, for_each, gather_evidence
from accelmark.results.rounds.summary import finding_texts
from accelmark.results.schema import CaseVerdict, Finding, RoundResult, Verdict

RULES: Final[tuple[Rule, ...]] = (
    rounds.rounds_complete, rounds.planned_rounds, rounds.registered, rounds.case_known, rounds.one_model,
    provenance.source_tree, provenance.case_folder, provenance.hooks,
    for_each(Evidence.succeeded_rounds, rounds.target_reached, rounds.plausible_convergence, rounds.real_data),
    for_each(Evidence.all_rounds, rounds.settings, rounds.external_trainer),
    for_each(Evidence.succeeded_rounds, rounds.dataset),
    rounds.same_dataset,
    for_each(Evidence.all_rounds, rounds.precision),
    rounds.seeds,
    for_each(Evidence.succeeded_rounds, reevaluation.reproduced),
    for_each(inference.inferences, inference.case_contract),
    inference.model_structure,
    for_each(inference.engines, inference.engine_source, inference.accuracy_gate, inference.answers,
             inference.precision),
    for_each(inference.inferences, inference.flops, inference.enough_measured),
    for_each(inference.engines, inference.time_outside_engine, inference.cache_check),
    for_each(inference.inferences, inference.declared_time, inference.loadgen),
    for_each(Evidence.succeeded_rounds, serving.case_contract),
    for_each(serving.served, serving.load_complete, serving.requests, serving.token_count, serving.client_limit,
             serving.served_answers, serving.server_start, serving.benchmarks, serving.result_cache,
             serving.steady_state, serving.loadgen, serving.speculative_decoding, serving.enough_measured),
    for_each(Evidence.succeeded_rounds, rounds.enough_duration),
    for_each(Evidence.all_rounds, rounds.framework_version),
    for_each(Evidence.succeeded_rounds, rounds.chip_identity, rounds.plausible_utilisation),
    for_each(Evidence.all_rounds, rounds.not_resumed, provenance.preloaded_code, provenance.numeric_switches,
             provenance.unchanged_files),
)  # fmt: skip
"""In the order of findings of the same severity: about all rounds, then about each."""

_ORDER: Final = {"error": 0, "open": 1, "warning": 2, "info": 3}


def verdict_of(findings: Iterable[Finding]) -> Verdict:
    """Return INVALID with an error among the findings, else OPEN with an open one, else VALID."""
    severities = {finding.severity for finding in findings}
    return "INVALID" if "error" in severities else "OPEN" if "open" in severities else "VALID"


def audit_case(run_dir: Path, results: Mapping[str, RoundResult], num_planned: int) -> CaseVerdict:
    """Audit the rounds of one key (directory relative to the run -> result); ``num_planned`` of them were planned.

    An error makes a case INVALID, an open finding makes it OPEN (a person has to decide).
    """
    evidence = gather_evidence(run_dir, results, num_planned)
    findings = [finding for rule in RULES for finding in rule(evidence)]
    for entry in evidence.rounds:
        findings += (finding.model_copy(update={"round": entry.number}) for finding in entry.result.findings)
    findings = sorted(dict.fromkeys(findings), key=lambda finding: (_ORDER[finding.severity], finding.round or 0))
    reasons, cost = tuple(finding_texts(findings, "error", "open")), provenance.adaptation_cost(evidence)
    return CaseVerdict(verdict=verdict_of(findings), reasons=reasons, findings=tuple(findings), adaptation=cost)
