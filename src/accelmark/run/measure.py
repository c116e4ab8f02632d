"""The one door from carrying out a run to what it came to: the files of the results room."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accelmark.results.schema import RoundResult, Summary
from accelmark.run.files import write_atomic

RESULT_FILE: Final = "result.json"
SUMMARY_FILE: Final = "summary.json"


def measure_round(round_dir: Path) -> RoundResult:
    """Compute a round's result and write ``result.json``."""
    from accelmark.results import round_result  # numerical libraries: not before they are needed

    result = round_result(round_dir)
    write_atomic(round_dir / RESULT_FILE, result.model_dump_json(indent=2))
    return result


def measure_run(run_dir: Path) -> Summary:
    """Compute the summary of a run and write ``summary.json``."""
    from accelmark.results import summarise  # numerical libraries: not before they are needed

    summary = summarise(run_dir)
    write_atomic(run_dir / SUMMARY_FILE, summary.model_dump_json(indent=2))
    return summary
