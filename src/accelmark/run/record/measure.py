"""Compute and audit results."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accelmark.results.schema import RoundResult, Summary

RESULT_FILE: Final = "result.json"


def measure_round(round_dir: Path) -> RoundResult:
    """Compute a round's result and write ``result.json``."""
    from accelmark.results.rounds.summary import write_round

    return write_round(round_dir)


def measure_run(run_dir: Path, *, recompute: bool = False) -> Summary:
    """Write ``summary.json`` and ``MANIFEST.sha256`` of a run.

    Args:
        run_dir: the run.
        recompute: recompute every round from its events and telemetry.

    Raises:
        RunError: ``run_dir`` has no rounds, or a file cannot be written.
    """
    from accelmark.audit.verdict import audit_case
    from accelmark.results.rounds.summary import summarise

    return summarise(run_dir, audit_case, recompute=recompute)
