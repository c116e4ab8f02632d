"""The inference section of a run's page: engines by precision and batch with their accuracy, and latency curves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from accelmark.report.charts import LatencyChart, latency_chart
from accelmark.results.figure_names import FigureName
from accelmark.results.schema import CaseResult, RoundResult
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.number_format import NOTHING, digits, percent

F = FigureName

_COLUMNS: Final = (
    ("Accuracy", F.INFERENCE_METRIC), ("Framework accuracy", F.VALIDATION_METRIC), ("Difference", F.METRIC_DIFFERENCE),
    ("Core, items/s", F.INFERENCE_CORE), ("Whole, items/s", F.INFERENCE_WHOLE), ("p50, ms", F.LATENCY_P50),
    ("p90, ms", F.LATENCY_P90), ("p99, ms", F.LATENCY_P99), ("p99.9, ms", F.LATENCY_P999),
    ("First call, ms", F.FIRST_CALL), ("Compilation, s", F.COMPILE_TIME), ("MFU", F.MFU),
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine at one precision and batch."""

    anchor: str
    model: str
    engine: str
    precision: str
    batch: int
    verdict: str
    cells: tuple[tuple[str, str], ...]
    """(value, note or reason why there is none) in the order of the columns."""
    speedup: str
    """Core throughput relative to the framework's own."""


@final
@dataclass(frozen=True, slots=True)
class InferenceView:
    """The inference section of a page."""

    heads: tuple[str, ...]
    rows: tuple[EngineRow, ...]
    chart: LatencyChart | None
    steps: tuple[tuple[str, tuple[str, ...]], ...]
    """(label, duration or reason of each of the seven steps)."""


def inference_view(run: LoadedRun) -> InferenceView | None:
    """Return the inference section of a run, None where it has no inference case."""
    found = [
        (f"case-{number}", case, rounds[0])
        for number, case in enumerate(run.summary.cases, start=1)
        if case.task == "infer" and (rounds := run.rounds_of(case)) and rounds[0].inference is not None
    ]
    if not found:
        return None
    return InferenceView(
        heads=tuple(head for head, _ in _COLUMNS),
        rows=tuple(_row(*entry) for entry in found),
        chart=latency_chart(
            [(_label(case), result.inference.latency_curve) for _, case, result in found if result.inference]
        ),
        steps=tuple((_label(case), _steps(result)) for _, case, result in found),
    )


def _label(case: CaseResult) -> str:
    return f"{case.key.model} {case.variant or ''}".strip()


def _row(anchor: str, case: CaseResult, result: RoundResult) -> EngineRow:
    inference = result.inference
    assert inference is not None  # noqa: S101 - checked by the caller
    means = {name: spread.mean for name, spread in case.figures.items()}
    cells = []
    for _, name in _COLUMNS:
        spread = case.figures.get(name)
        mean = means.get(name)
        shown = NOTHING if mean is None else percent(mean, 3) if name is F.MFU else digits(mean)
        cells.append((shown, (spread.reason if spread is not None else None) or ""))
    core, base = means.get(F.INFERENCE_CORE), means.get(F.VALIDATION_CORE)
    return EngineRow(
        anchor=anchor,
        model=case.key.model,
        engine=inference.compiler or "framework only",
        precision=result.precision,
        batch=inference.batch_size,
        verdict=case.verdict,
        cells=tuple(cells),
        speedup=f"{digits(core / base, 3)}×" if core and base else NOTHING,
    )


def _steps(result: RoundResult) -> tuple[str, ...]:
    inference = result.inference
    assert inference is not None  # noqa: S101
    ended = {stage.step: stage for stage in inference.stages}
    lines: list[str] = []
    for step, stage in ended.items():
        if stage.state == "skipped":
            lines.append(f"{stage.number} {step}: skipped ({stage.reason})")
        elif stage.state == "failed":
            lines.append(f"{stage.number} {step}: failed after {stage.duration_s:.2f} s ({stage.reason})")
        else:
            lines.append(f"{stage.number} {step}: {stage.duration_s:.2f} s")
    return tuple(lines)
