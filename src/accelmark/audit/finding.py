"""Making findings."""

from __future__ import annotations

from accelmark.audit.evidence import RoundEvidence
from accelmark.results.schema import Finding, Severity


def finding(severity: Severity, rule: str, expected: str, actual: str, entry: RoundEvidence | None = None) -> Finding:
    """Return a finding, about one round where ``entry`` is given."""
    number = entry.number if entry is not None else None
    return Finding(severity=severity, rule=rule, expected=expected, actual=actual, round=number)


def breach(rule: str, expected: str, actual: str, entry: RoundEvidence) -> Finding:
    """Return what changes the standard workload: an error, unless the run declared itself open."""
    return finding("open" if entry.is_open else "error", rule, expected, actual, entry)
