"""What every export hands over of a round: parameters, figures, and curves over steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from accelmark.results.schema import RoundResult
from accelmark.results.store.store import LoadedRun


@final
@dataclass(frozen=True, slots=True)
class RoundContents:
    """One round, flat."""

    name: str
    """Directory of the round, relative to the run."""
    parameters: dict[str, str]
    figures: dict[str, float]
    """Those that were measured."""
    curves: dict[str, tuple[tuple[int, float, float], ...]]
    """Name -> (step, wall time in unix seconds, value)."""
    tags: dict[str, str]


def contents_of(run: LoadedRun) -> Iterator[RoundContents]:
    """Yield every round of a run that could be read."""
    for case in run.summary.cases:
        for name in case.rounds:
            result = run.rounds.get(name)
            if result is not None:
                yield _contents(run, name, result, case.verdict)


def _contents(run: LoadedRun, name: str, result: RoundResult, verdict: str) -> RoundContents:
    begin = _unix(result.started_at)
    return RoundContents(
        name=name,
        parameters={setting: str(found.value) for setting, found in sorted(result.settings.items())},
        figures={figure.value: found.value for figure, found in result.figures.items() if found.value is not None},
        curves={
            curve: tuple((point.step, begin + point.time_s, point.value) for point in points if point.value is not None)
            for curve, points in result.curves.items()
        },
        tags={
            "accelmark.run": run.summary.run, "accelmark.key": str(result.key), "accelmark.round": str(result.round),
            "accelmark.verdict": verdict, "accelmark.state": result.state, "accelmark.vendor": result.vendor,
            "accelmark.case_version": str(result.case_version), "accelmark.marks": ", ".join(result.marks),
            "accelmark.version": run.summary.accelmark_version,
        },
    )  # fmt: skip


def _unix(text: str) -> float:
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
