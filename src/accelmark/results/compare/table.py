"""Tabulate runs: one row per case of a run, one column per attribute and figure; filter, group and write CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from accelmark.results.figure_names import FigureName
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun
from accelmark.spec.errors import RequestError, nearest

Cell = str | int | float | bool | None
Row = dict[str, Cell]

ATTRIBUTES: Final[dict[str, type]] = {
    "run": str, "path": str, "started_at": str, "state": str, "verdict": str, "converged": bool, "marks": str,
    "task": str, "case": str, "case_version": int, "model": str, "framework": str, "framework_version": str,
    "vendor": str, "chip": str, "scale": str, "nnodes": int, "nproc": int, "ranks": int, "variant": str,
    "precision": str, "rounds": int, "unit": str, "accelmark_version": str,
}  # fmt: skip
"""Columns that are not figures."""
HALF: Final = "_half95"
"""Suffix of the column with half of a figure's 95 % interval."""
COLUMNS: Final[dict[str, type]] = ATTRIBUTES | {
    column: float for name in FigureName for column in (name.value, f"{name.value}{HALF}")
}
_LIST_COLUMN: Final = "marks"
"""The column whose cells list any number of values."""
_ALIASES: Final = {"hardware": "chip", "node": "nnodes", "ranks_per_host": "nproc"}


def rows_of(runs: Iterable[LoadedRun]) -> list[Row]:
    """Return one row for each case of ``runs``, oldest run first, with every column of COLUMNS."""
    ordered = sorted(runs, key=lambda run: (run.summary.started_at, str(run.path)))
    return [_row(case) for run in ordered for case in run.cases]


def _row(loaded: LoadedCase) -> Row:
    case, first, summary = loaded.result, loaded.first, loaded.run.summary
    key = case.key
    version = first.environment.started.get("framework_version") if first else None
    row: Row = {
        "run": summary.run, "path": str(loaded.run.path), "started_at": summary.started_at or None, "state": case.state,
        "verdict": case.verdict, "converged": case.converged, "marks": ", ".join(case.marks), "task": case.task,
        "case": key.case, "case_version": first.case_version if first else None, "model": key.model,
        "framework": key.framework, "framework_version": str(version) if version else key.framework_version,
        "vendor": summary.vendor, "chip": key.hardware, "scale": f"{key.nnodes}x{key.nproc}", "nnodes": key.nnodes,
        "nproc": key.nproc, "ranks": key.world_size, "variant": case.variant,
        "precision": first.precision if first else None,
        "rounds": case.num_rounds, "unit": case.unit,
        "accelmark_version": summary.accelmark_version,
    }  # fmt: skip
    for name in FigureName:
        spread = case.figures.get(name)
        row[name.value] = spread.mean if spread else None
        row[f"{name.value}{HALF}"] = spread.half95 if spread else None
    return row


def column(name: str) -> str:
    """Return the column of a name or alias.

    Raises:
        RequestError: there is no such column; the message names the nearest.
    """
    name = _ALIASES.get(name, name)
    if name not in COLUMNS:
        raise RequestError(f"unknown column {name!r}: {nearest(name, COLUMNS)}")
    return name


def matching(runs: Iterable[LoadedRun], filters: Iterable[tuple[str, str]]) -> list[LoadedRun]:
    """Filter the cases of runs by (column, value) pairs, all of which have to match; letter case is ignored.

    A value ``a,b`` matches either ``a``, ``b`` or the whole text. A list of marks matches where it has the value.

    Raises:
        RequestError: there is no such column, or a column other than marks is used twice.
    """
    tests: list[tuple[str, frozenset[str]]] = []
    for name, text in filters:
        name = column(name)
        if name != _LIST_COLUMN and any(name == before for before, _ in tests):
            raise RequestError(f"{name} is used twice: write {name}=A,B to match either")
        parts = (text, *(part for part in text.split(",") if part.strip()))
        tests.append((name, frozenset(part.strip().lower() for part in parts)))
    found = []
    for run in runs:
        rows = [(case.result, _row(case)) for case in run.cases]
        kept = tuple(case for case, row in rows if all(_values(name, row[name]) & accepted for name, accepted in tests))
        if kept:
            found.append(replace(run, summary=run.summary.model_copy(update={"cases": kept})))
    return found


def _values(name: str, value: Cell) -> frozenset[str]:
    text = "" if value is None else str(value).lower()
    return frozenset({text, *(text.split(", ") if name == _LIST_COLUMN else ())})


def grouped(rows: Iterable[Row], by: Sequence[str]) -> dict[tuple[Cell, ...], list[Row]]:
    """Group rows by the values of columns, sorted by those values."""
    names = [column(name) for name in by]
    groups: dict[tuple[Cell, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return dict(sorted(groups.items(), key=lambda group: [(value is not None, _sortable(value)) for value in group[0]]))


def _sortable(value: Cell) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table as CSV: missing values are empty, cells that a spreadsheet would run as formulas are quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_safe(value) for value in row])
    return out.getvalue()


def _safe(value: Cell) -> Cell:
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t", "\r"} else value
