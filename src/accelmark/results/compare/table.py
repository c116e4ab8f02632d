"""Many runs as one table: a row for each case of each run, a column for each fact and figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from accelmark.results.figures.definitions import FigureName
from accelmark.results.schema import CaseResult
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.errors import RequestError, nearest

Cell = str | int | float | bool | None
Row = dict[str, Cell]

FACTS: Final[dict[str, type]] = {
    "run": str, "path": str, "started_at": str, "state": str, "verdict": str, "converged": bool, "marks": str,
    "task": str, "case": str, "case_version": int, "model": str, "framework": str, "framework_version": str,
    "vendor": str, "chip": str, "scale": str, "nnodes": int, "nproc": int, "ranks": int, "variant": str,
    "precision": str, "rounds": int, "unit": str, "accelmark_version": str,
}  # fmt: skip
"""Columns that are no figures."""
HALF: Final = "_half95"
"""End of the column that holds half a figure's 95 % interval."""
COLUMNS: Final[dict[str, type]] = FACTS | {
    column: float for name in FigureName for column in (name.value, f"{name.value}{HALF}")
}
_MANY: Final = "marks"
"""The column whose cells hold any number of words."""
_SHORT: Final = {"hardware": "chip", "node": "nnodes", "ranks_per_host": "nproc"}


def rows_of(runs: Iterable[LoadedRun]) -> list[Row]:
    """Return one row for each case of ``runs``, oldest run first; every row has every column of COLUMNS."""
    ordered = sorted(runs, key=lambda run: (run.summary.started_at, str(run.path)))
    return [_row(run, case) for run in ordered for case in run.summary.cases]


def _row(run: LoadedRun, case: CaseResult) -> Row:
    rounds = run.rounds_of(case)
    first = rounds[0] if rounds else None
    key, summary = case.key, run.summary
    version = first.environment.started.get("framework_version") if first else None
    row: Row = {
        "run": summary.run, "path": str(run.path), "started_at": summary.started_at or None, "state": case.state,
        "verdict": case.verdict, "converged": case.converged, "marks": ", ".join(case.marks), "task": case.task,
        "case": key.case, "case_version": first.case_version if first else None, "model": key.model,
        "framework": key.framework, "framework_version": str(version) if version else key.framework_version,
        "vendor": summary.vendor, "chip": key.hardware, "scale": f"{key.nnodes}x{key.nproc}", "nnodes": key.nnodes,
        "nproc": key.nproc, "ranks": key.world_size, "variant": case.variant,
        "precision": first.precision if first else None,
        "rounds": max((spread.num_rounds for spread in case.figures.values()), default=0), "unit": case.unit,
        "accelmark_version": summary.accelmark_version,
    }  # fmt: skip
    for name in FigureName:
        spread = case.figures.get(name)
        row[name.value] = spread.mean if spread else None
        row[f"{name.value}{HALF}"] = (spread.ci95[1] - spread.ci95[0]) / 2 if spread and spread.ci95 else None
    return row


def column(name: str) -> str:
    """Return the column that a person means.

    Raises:
        RequestError: there is none of that name; the nearest is told.
    """
    name = _SHORT.get(name, name)
    if name not in COLUMNS:
        raise RequestError(f"{name!r} is not a column of the results: {nearest(name, COLUMNS)}")
    return name


def matching(runs: Iterable[LoadedRun], wanted: Iterable[tuple[str, str]]) -> list[LoadedRun]:
    """Return the runs with those of their cases alone whose columns hold what is wanted, letter case aside.

    ``a,b`` wants either; so does the whole text, where a cell holds commas. Marks are many in one cell: one of them is
    enough, and marks that are wanted by several entries are all wanted.

    Raises:
        RequestError: there is no such column, or one that holds a single value is named twice.
    """
    tests: list[tuple[str, frozenset[str]]] = []
    for name, text in wanted:
        name = column(name)
        if name != _MANY and any(name == before for before, _ in tests):
            raise RequestError(f"{name} is wanted twice, and no case has two: write {name}=A,B for either")
        parts = (text, *(part for part in text.split(",") if part.strip()))
        tests.append((name, frozenset(part.strip().lower() for part in parts)))
    found = []
    for run in runs:
        rows = [(case, _row(run, case)) for case in run.summary.cases]
        kept = tuple(case for case, row in rows if all(_words(name, row[name]) & accepted for name, accepted in tests))
        if kept:
            found.append(replace(run, summary=run.summary.model_copy(update={"cases": kept})))
    return found


def _words(name: str, value: Cell) -> frozenset[str]:
    text = "" if value is None else str(value).lower()
    return frozenset({text, *(text.split(", ") if name == _MANY else ())})


def grouped(rows: Iterable[Row], by: Sequence[str]) -> dict[tuple[Cell, ...], list[Row]]:
    """Return the rows by the values of some columns, groups in order of those values."""
    names = [column(name) for name in by]
    groups: dict[tuple[Cell, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return dict(sorted(groups.items(), key=lambda group: [(value is not None, _sortable(value)) for value in group[0]]))


def _sortable(value: Cell) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def to_csv(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table as CSV; what was not measured is empty, and no cell begins as a formula of a spreadsheet."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(heads)
    for row in rows:
        writer.writerow([_safe(value) for value in row])
    return out.getvalue()


def _safe(value: Cell) -> Cell:
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"} else value
