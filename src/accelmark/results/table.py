"""Tabulate runs: one row per case of a run, one column per attribute and figure; filter, group, query, write files.

Queries are SQL in DuckDB: read-only, without files, extensions or network.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from accelmark.results.figures import FigureName
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun
from accelmark.spec.errors import RequestError, RunError, first_line, nearest, raising
from accelmark.spec.log.perflog import finite
from accelmark.spec.plugins.requirements import require

if TYPE_CHECKING:
    import duckdb


Cell = str | int | float | bool | None
Row = dict[str, Cell]

ATTRIBUTES: Final[dict[str, type]] = {
    "run": str, "path": str, "started_at": str, "state": str, "verdict": str, "converged": bool, "marks": str,
    "task": str, "case": str, "case_version": int, "model": str, "framework": str, "framework_version": str,
    "vendor": str, "chip": str, "scale": str, "nnodes": int, "nproc": int, "ranks": int, "variant": str, "role": str,
    "precision": str, "rounds": int, "unit": str, "accelmark_version": str,
}  # fmt: skip
HALF: Final = "_half95"
COLUMNS: Final[dict[str, type]] = ATTRIBUTES | {
    column: float for name in FigureName for column in (name.value, f"{name.value}{HALF}")
}
TABLE: Final = "results"
_TYPES: Final = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_LIST_COLUMN: Final = "marks"
_ALIASES: Final = {"hardware": "chip", "node": "nnodes", "ranks_per_host": "nproc"}


def rows_of(runs: Iterable[LoadedRun]) -> list[Row]:
    """Return one row for each case of ``runs``, oldest run first, with every column of COLUMNS."""
    ordered = sorted(runs, key=lambda run: (run.summary.started_at, str(run.path)))
    return [row_of(case) for run in ordered for case in run.cases]


def row_of(loaded: LoadedCase) -> Row:
    """Return the row of a case."""
    case, first, summary = loaded.result, loaded.first, loaded.run.summary
    key = case.key
    row: Row = {
        "run": summary.run, "path": str(loaded.run.path), "started_at": summary.started_at or None, "state": case.state,
        "verdict": case.verdict, "converged": case.converged, "marks": ", ".join(case.marks), "task": case.task,
        "case": key.case, "case_version": first.case_version if first else None, "model": key.model,
        "framework": key.framework, "framework_version": loaded.framework_version,
        "vendor": summary.vendor, "chip": key.hardware, "scale": f"{key.nnodes}x{key.nproc}", "nnodes": key.nnodes,
        "nproc": key.nproc, "ranks": key.world_size, "variant": case.variant, "role": case.role,
        "precision": first.precision if first else None,
        "rounds": case.num_rounds, "unit": case.unit if case.num_rounds else None,
        "accelmark_version": summary.accelmark_version,
    }  # fmt: skip
    for name in FigureName:
        spread = case.figures.get(name)
        row[name.value] = spread.mean if spread else None
        row[f"{name.value}{HALF}"] = spread.half95 if spread else None
    return row


def column(name: str) -> str:
    """Return the column of a name or alias. Raises RequestError, with the nearest names, if there is none."""
    name = _ALIASES.get(name, name)
    if name not in COLUMNS:
        raise RequestError(f"unknown column {name!r}: {nearest(name, COLUMNS)}")
    return name


def matching(runs: Iterable[LoadedRun], filters: Iterable[tuple[str, str]]) -> list[LoadedRun]:
    """Filter the cases of runs by (column, value) pairs, which must all match; letter case is ignored.

    A value ``a,b`` matches either ``a``, ``b`` or the whole text. A list of marks matches where it has the value.

    Raises RequestError if there is no such column, or a column other than marks is used twice.
    """
    tests: list[tuple[str, frozenset[str]]] = []
    for name, text in filters:
        name = column(name)
        if name != _LIST_COLUMN and any(name == before for before, _ in tests):
            raise RequestError(f"{name} is used twice: write {name}=A,B to match either")
        parts = (text, *(part for part in text.split(",") if part.strip()))
        tests.append((name, frozenset(part.strip().lower() for part in parts)))
    filtered = []
    for run in runs:
        kept = []
        for case in run.cases:
            texts = {name: "" if value is None else str(value).lower() for name, value in row_of(case).items()}
            values = {name: {text} for name, text in texts.items()}
            values[_LIST_COLUMN].update(texts[_LIST_COLUMN].split(", "))
            if all(values[name] & accepted for name, accepted in tests):
                kept.append(case.result)
        if kept:
            filtered.append(replace(run, summary=run.summary.model_copy(update={"cases": tuple(kept)})))
    return filtered


def grouped(rows: Iterable[Row], by: Sequence[str]) -> dict[tuple[Cell, ...], list[Row]]:
    """Group rows by the values of columns, sorted by those values."""
    names = [column(name) for name in by]
    groups: dict[tuple[Cell, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)

    def order(value: Cell) -> tuple[bool, int, float, str]:
        if isinstance(value, int | float):
            return True, 0, float(value), ""
        return value is not None, 1, 0.0, str(value)

    return dict(sorted(groups.items(), key=lambda group: [order(value) for value in group[0]]))


def to_csv(columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table as CSV: missing values are empty, cells that a spreadsheet would run as formulas are quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in row])
    return out.getvalue()


class QueryResult(NamedTuple):
    """The result of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def records(self) -> list[dict[str, Any]]:
        """Return the rows for JSON: a repeated column name is numbered, numbers that are not finite become None."""
        names = self.columns
        unique = [name if name not in names[:at] else f"{name}_{at + 1}" for at, name in enumerate(names)]
        return [dict(zip(unique, map(finite, row), strict=True)) for row in self.rows]


def run_query(rows: Sequence[Row], sql: str) -> QueryResult:
    """Run one SELECT over the table ``results``."""
    require("SQL over results", "accelmark[results]")
    import duckdb

    with _connect(rows) as connection:
        connection.execute("SET memory_limit = '1GB'")
        connection.execute("SET temp_directory = ''")  # do not spill into the working directory
        connection.execute("SET enable_external_access = false")
        connection.execute("SET autoload_known_extensions = false")
        connection.execute("SET lock_configuration = true")
        with raising(RequestError, "invalid SQL", duckdb.Error):
            statements = connection.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise RequestError("results are read-only: a query is a single SELECT")
        try:
            cursor = connection.execute(statements[0])
            return QueryResult(tuple(str(entry[0]) for entry in cursor.description or ()), tuple(cursor.fetchall()))
        except duckdb.Error as error:
            raise RequestError(f"the query failed: {first_line(error)}; the one table is 'results'") from error


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write the table as Parquet."""
    require("Parquet output", "accelmark[results]")
    import duckdb

    beside = path.with_name(f".{path.name}.tmp")
    with _connect(rows) as connection:
        try:
            connection.table(TABLE).write_parquet(str(beside))
            beside.replace(path)
        except (duckdb.Error, OSError) as error:
            beside.unlink(missing_ok=True)
            raise RunError(f"{path}: cannot be written: {first_line(error)}") from error


def _connect(rows: Sequence[Row]) -> duckdb.DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect(":memory:", config={"threads": 1})
    columns = ", ".join(f'"{name}" {_TYPES[kind]}' for name, kind in COLUMNS.items())
    connection.execute(f"CREATE TABLE {TABLE} ({columns})")
    if rows:
        places = ", ".join("?" * len(COLUMNS))
        values = [[row[name] for name in COLUMNS] for row in rows]
        connection.executemany(f"INSERT INTO {TABLE} VALUES ({places})", values)  # noqa: S608 - constant names
    return connection
