"""Verify a run: recompute every figure from events and telemetry, and compare with the stored results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from accelmark.audit.verdict import audit_case
from accelmark.results.rounds.result import round_result
from accelmark.results.rounds.summary import gather
from accelmark.results.schema import CaseResult, Figure, RoundResult, Spread, Summary
from accelmark.results.store.loaded_run import RESULT_FILE, SUMMARY_FILE, load_round, load_summary
from accelmark.results.store.manifest import check_manifest
from accelmark.spec.errors import RunError

TOLERANCE: Final = 1e-9
"""Relative difference between two machines' floating-point arithmetic."""

_COMPARED: Final = (
    "key", "state", "converged", "precision", "marks", "num_steps", "num_samples", "num_devices", "target",
)  # fmt: skip
"""Fields of a round that are compared, besides figures and findings."""


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a run."""

    summary: Summary
    """Recomputed."""
    changed: tuple[str, ...]
    """Files that differ from the manifest."""
    differences: tuple[str, ...]
    """Stored results that differ from the recomputed ones."""
    num_figures: int
    """Figures that were recomputed and compared."""

    @property
    def is_intact(self) -> bool:
        """Whether no file was edited and all results could be reproduced."""
        return not self.changed and not self.differences


def verify_run(run_dir: Path) -> Verification:
    """Recompute a run and compare; writes nothing into it.

    Raises:
        RunError: ``run_dir`` is not a run, or has no summary to compare with.
    """
    changed = tuple(check_manifest(run_dir))
    stored = load_summary(run_dir / SUMMARY_FILE)
    summary, rounds = gather(run_dir, audit_case, round_result)
    differences: list[str] = []
    for name, result in rounds.items():
        differences += _round_differences(run_dir / name, name, result)
    differences += _summary_differences(stored, summary)
    num_figures = sum(len(result.figures) for result in rounds.values())
    num_figures += sum(len(case.figures) for case in summary.cases)
    return Verification(summary, changed, tuple(differences), num_figures)


def _round_differences(round_dir: Path, name: str, computed: RoundResult) -> Iterator[str]:
    try:
        stored = load_round(round_dir / RESULT_FILE)
    except RunError as error:
        yield str(error)
        return
    yield from _figure_differences(name, stored.figures, computed.figures)
    for field in _COMPARED:
        yield from _difference(f"{name}: {field}", getattr(stored, field), getattr(computed, field))
    # Texts of findings change between versions of AccelMark; rules and severities do not.
    for rule, severity in (counts := _counts(stored)) | (recomputed := _counts(computed)):
        where = f"{name}: findings of rule {rule} with severity {severity}"
        yield from _difference(where, counts[rule, severity], recomputed[rule, severity])


def _counts(result: RoundResult) -> Counter[tuple[str, str]]:
    return Counter((finding.rule, finding.severity) for finding in result.findings)


def _summary_differences(stored: Summary, computed: Summary) -> Iterator[str]:
    yield from _difference("summary: state", stored.state, computed.state)
    yield from _difference("summary: vendor", stored.vendor, computed.vendor)
    by_rounds = {(case.key, case.rounds): case for case in computed.cases}
    for case in stored.cases:
        other = by_rounds.pop((case.key, case.rounds), None)
        if other is None:
            yield f"summary: {case.key}: the run has no such case"
            continue
        yield from _case_differences(case, other)
    for key, _ in by_rounds:
        yield f"summary: {key}: is missing"


def _case_differences(stored: CaseResult, computed: CaseResult) -> Iterator[str]:
    where = f"summary: {stored.key}"
    for field in ("state", "converged", "marks", "unit"):
        yield from _difference(f"{where}: {field}", getattr(stored, field), getattr(computed, field))
    yield from _figure_differences(where, stored.figures, computed.figures)
    if stored.verdict != computed.verdict:
        reasons = "; ".join(computed.reasons) or "no findings against it"
        yield f"{where}: verdict: stored {stored.verdict}, recomputed {computed.verdict} ({reasons})"


def _figure_differences(
    where: str,
    stored: Mapping[Any, Figure] | Mapping[Any, Spread],
    computed: Mapping[Any, Figure] | Mapping[Any, Spread],
) -> Iterator[str]:
    for name in dict.fromkeys([*stored, *computed]):
        before, after = (_number(figures.get(name)) for figures in (stored, computed))
        if not _equal(before, after):
            yield f"{where}: {name}: stored {_text(before)}, recomputed {_text(after)}"


def _number(figure: Figure | Spread | None) -> float | None:
    if figure is None:
        return None
    return figure.value if isinstance(figure, Figure) else figure.mean


def _equal(one: float | None, two: float | None) -> bool:
    if one is None or two is None:
        return one is two
    return math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=1e-12)


def _text(number: float | None) -> str:
    return "null" if number is None else f"{number:.9g}"


def _difference(where: str, stored: Any, computed: Any) -> Iterator[str]:
    if stored != computed:
        yield f"{where}: stored {stored}, recomputed {computed}"
