"""Computing a run anew: every figure from its events and telemetry, compared with what its results say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from accelmark.audit.verdict import judge_case
from accelmark.results.rounds.result import round_result
from accelmark.results.rounds.summary import gather
from accelmark.results.schema import CaseResult, Figure, RoundResult, Spread, Summary
from accelmark.results.store.loaded_run import RESULT_FILE, SUMMARY_FILE, load_round, load_summary
from accelmark.results.store.manifest import check_manifest
from accelmark.spec.errors import RunError

TOLERANCE: Final = 1e-9
"""Relative difference that another machine's arithmetic may make."""


_COMPARED: Final = (
    "key", "state", "converged", "precision", "marks", "num_steps", "num_samples", "num_devices", "target", "findings",
)  # fmt: skip
"""Of a round, beside its figures."""


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """What a look at the raw records says of a run."""

    summary: Summary
    """Computed anew."""
    changed: tuple[str, ...]
    """Files that are not as the manifest says."""
    differences: tuple[str, ...]
    """Where the results say something else than the raw records."""
    num_figures: int
    """Figures that were computed anew and compared."""

    @property
    def is_intact(self) -> bool:
        """Whether nothing was edited and every figure follows from the records."""
        return not self.changed and not self.differences


def verify_run(run_dir: Path) -> Verification:
    """Compute a run anew and compare; nothing in it is written.

    Raises:
        RunError: it is no run, or has no summary to compare with.
    """
    changed = tuple(check_manifest(run_dir))
    stored = load_summary(run_dir / SUMMARY_FILE)
    summary, rounds = gather(run_dir, judge_case, round_result)
    differences: list[str] = []
    for name, result in rounds.items():
        differences += _round_differences(run_dir / name, name, result)
    differences += _summary_differences(stored, summary)
    num_figures = sum(len(result.figures) for result in rounds.values())
    num_figures += sum(len(case.figures) for case in summary.cases)
    return Verification(summary, changed, tuple(differences), num_figures)


def _round_differences(round_dir: Path, name: str, anew: RoundResult) -> Iterator[str]:
    try:
        stored = load_round(round_dir / RESULT_FILE)
    except RunError as error:
        yield str(error)
        return
    yield from _figure_differences(name, stored.figures, anew.figures)
    for field in _COMPARED:
        yield from _difference(f"{name}: {field}", getattr(stored, field), getattr(anew, field))


def _summary_differences(stored: Summary, anew: Summary) -> Iterator[str]:
    yield from _difference("summary: state", stored.state, anew.state)
    yield from _difference("summary: vendor", stored.vendor, anew.vendor)
    by_rounds = {(case.key, case.rounds): case for case in anew.cases}
    for case in stored.cases:
        other = by_rounds.pop((case.key, case.rounds), None)
        if other is None:
            yield f"summary: {case.key}: no such case follows from the records"
            continue
        yield from _case_differences(case, other)
    for key, _ in by_rounds:
        yield f"summary: {key}: is left out"


def _case_differences(stored: CaseResult, anew: CaseResult) -> Iterator[str]:
    where = f"summary: {stored.key}"
    for field in ("state", "converged", "marks", "unit"):
        yield from _difference(f"{where}: {field}", getattr(stored, field), getattr(anew, field))
    yield from _figure_differences(where, stored.figures, anew.figures)
    if stored.verdict != anew.verdict:
        reasons = "; ".join(anew.reasons) or "nothing against it"
        yield f"{where}: verdict: {stored.verdict} is stated, {anew.verdict} follows from the records ({reasons})"


def _figure_differences(
    where: str, stored: Mapping[Any, Figure] | Mapping[Any, Spread], anew: Mapping[Any, Figure] | Mapping[Any, Spread]
) -> Iterator[str]:
    for name in dict.fromkeys([*stored, *anew]):
        said, found = (_number(figures.get(name)) for figures in (stored, anew))
        if not _equal(said, found):
            yield f"{where}: {name}: {_plain(said)} is stated, {_plain(found)} follows from the records"


def _number(figure: Figure | Spread | None) -> float | None:
    if figure is None:
        return None
    return figure.value if isinstance(figure, Figure) else figure.mean


def _equal(said: float | None, found: float | None) -> bool:
    if said is None or found is None:
        return said is found
    return math.isclose(said, found, rel_tol=TOLERANCE, abs_tol=1e-12)


def _plain(number: float | None) -> str:
    return "nothing" if number is None else f"{number:.9g}"


def _difference(where: str, said: Any, found: Any) -> Iterator[str]:
    if said != found:
        yield f"{where}: {said} is stated, {found} follows from the records"
