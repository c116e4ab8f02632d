"""Tables of results in Markdown: for a terminal's pipe, and for the README of a case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from accelmark.report.numbers import NOTHING, figure, percent
from accelmark.report.view import half_interval
from accelmark.results.figures import FigureName
from accelmark.results.files import write_atomic
from accelmark.results.schema import CaseResult, Spread
from accelmark.results.store import LoadedRun
from accelmark.spec.errors import RunError

BEGIN: Final = "<!-- results: begin (written by accelmark, not by hand) -->"
END: Final = "<!-- results: end -->"

F = FigureName
_COLUMNS: Final = (
    ("Throughput", F.THROUGHPUT_TRAIN),
    ("Time to target", F.TIME_TO_TARGET),
    ("Final metric", F.FINAL_METRIC),
    ("MFU", F.MFU),
    ("Peak memory", F.PEAK_DEVICE_MEMORY),
    ("Energy", F.ENERGY),
)


def results_table(runs: Sequence[LoadedRun], model: str | None = None) -> str:
    """Return a table with one row for each case of ``runs`` (of ``model`` alone if given), newest last."""
    rows = [
        (run, case)
        for run in sorted(runs, key=lambda run: run.summary.started_at)
        for case in run.summary.cases
        if model is None or case.key.model == model
    ]
    shown = [(title, name) for title, name in _COLUMNS if any(_mean(case, name) is not None for _, case in rows)]
    heads = ["Case", "Scale", "Rounds", *(title for title, _ in shown), "Verdict", "Date"]
    lines = [_line(heads), _line(["---"] * 2 + ["---:"] * (1 + len(shown)) + ["---"] * 2)]
    lines += [_line(_cells(run, case, [name for _, name in shown])) for run, case in rows]
    return "\n".join(lines) + "\n"


def write_readme_table(readme: Path, runs: Sequence[LoadedRun], model: str) -> None:
    """Replace what stands between the markers of a README by the table of ``model``'s results.

    Raises:
        RunError: the file cannot be read, or lacks the markers.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{readme}: cannot be read: {error.strerror}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RunError(f"{readme}: lacks the markers {BEGIN!r} and {END!r} that the table goes between")
    write_atomic(readme, f"{before}{BEGIN}\n{results_table(runs, model)}{END}{after}")


def _mean(case: CaseResult, name: FigureName) -> float | None:
    spread = case.figures.get(name)
    return spread.mean if spread else None


def _cells(run: LoadedRun, case: CaseResult, names: Iterable[FigureName]) -> list[str]:
    key = case.key
    good = max((spread.num_rounds for spread in case.figures.values()), default=0)
    scale = f"{key.hardware} {key.nnodes}×{key.nproc}"
    marks = f" ({', '.join(mark.replace('_', ' ') for mark in case.marks)})" if case.marks else ""
    figures = [_cell(name, case.figures.get(name), case.unit) for name in names]
    return [key.case, scale, str(good), *figures, case.verdict + marks, run.summary.started_at[:10] or NOTHING]


def _cell(name: FigureName, spread: Spread | None, unit: str) -> str:
    if spread is None or spread.mean is None:
        return NOTHING
    half = half_interval(spread)
    return figure(name, spread.mean, unit) + (f" ± {percent(half)}" if half is not None else "")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
