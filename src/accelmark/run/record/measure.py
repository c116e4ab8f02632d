"""Compute and audit the results of a run."""

from __future__ import annotations

from pathlib import Path

from accelmark.results.schema import Summary


def measure_run(run_dir: Path, *, recompute: bool = False) -> Summary:
    """Write ``summary.json`` and ``MANIFEST.sha256``; see :func:`accelmark.results.rounds.summary.summarise`."""
    from accelmark.audit.verdict import audit_case
    from accelmark.results.rounds.summary import summarise

    return summarise(run_dir, audit_case, recompute=recompute)
