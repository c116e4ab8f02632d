"""The inference section of a run's page: engines by precision and batch with their accuracy, and latency curves."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from accelmark.report.charts import latency_chart
from accelmark.results.figure_names import FigureName as F
from accelmark.results.schema import CaseResult, InferenceRound, RoundResult
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.number_format import NOTHING, digits, percent

_COLUMNS: Final = (
    ("Accuracy", F.INFERENCE_METRIC), ("Framework accuracy", F.VALIDATION_METRIC), ("Difference", F.METRIC_DIFFERENCE),
    ("Core, items/s", F.INFERENCE_CORE), ("Whole, items/s", F.INFERENCE_WHOLE), ("p50, ms", F.LATENCY_P50),
    ("p90, ms", F.LATENCY_P90), ("p99, ms", F.LATENCY_P99), ("p99.9, ms", F.LATENCY_P999),
    ("First call, ms", F.FIRST_CALL), ("Compilation, s", F.COMPILE_TIME), ("MFU", F.MFU),
)  # fmt: skip


class EngineRow(NamedTuple):
    """One engine at one precision and batch."""

    anchor: str
    case: CaseResult
    round: RoundResult
    """The first of the case."""
    inference: InferenceRound
    cells: list[tuple[str, str]]
    """(value, note or reason why there is none) in the order of the columns."""
    speedup: str
    """Core throughput relative to the framework's own."""


def inference_view(run: LoadedRun) -> dict[str, Any] | None:
    """Return the values of ``inference.html``, None where the run has no inference case."""
    rows = [
        _row(f"case-{number}", case.result, first, first.inference)
        for number, case in enumerate(run.cases, start=1)
        if (first := case.first) is not None and first.inference is not None
    ]
    if not rows:
        return None
    return {
        "heads": [head for head, _ in _COLUMNS],
        "rows": rows,
        "chart": latency_chart([(_label(row.case), row.inference.latency_curve) for row in rows]),
        "steps": [(_label(row.case), _steps(row.inference)) for row in rows],
    }


def _label(case: CaseResult) -> str:
    return f"{case.key.model} {case.variant or ''}".strip()


def _row(anchor: str, case: CaseResult, first: RoundResult, inference: InferenceRound) -> EngineRow:
    cells = []
    for _, name in _COLUMNS:
        spread = case.figures.get(name)
        mean = spread.mean if spread else None
        shown = NOTHING if mean is None else percent(mean, 3) if name is F.MFU else digits(mean)
        cells.append((shown, (spread.reason if spread else None) or ""))
    core, base = (case.figures[name].mean for name in (F.INFERENCE_CORE, F.VALIDATION_CORE))
    speedup = f"{digits(core / base, 3)}×" if core and base else NOTHING
    return EngineRow(anchor, case, first, inference, cells, speedup)


def _steps(inference: InferenceRound) -> list[str]:
    """Return the duration or reason of each of the seven steps."""
    lines: list[str] = []
    for stage in {stage.step: stage for stage in inference.stages}.values():
        took, why = f"{stage.duration_s:.2f} s", f"({stage.reason})"
        states = {"skipped": f"skipped {why}", "failed": f"failed after {took} {why}", "done": took}
        lines.append(f"{stage.number} {stage.step}: {states[stage.state]}")
    return lines
