"""Query the table of results with SQL in DuckDB: read-only, without files, extensions or network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from accelmark.results.compare.table import COLUMNS, Row
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.plugins.requirements import require

if TYPE_CHECKING:
    import duckdb

TABLE: Final = "results"
_TYPES: Final = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN"}
_MEMORY_LIMIT: Final = "1GB"


@final
@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def records(self) -> list[dict[str, Any]]:
        """Return the rows for JSON: repeated column names are numbered, numbers that are not finite become None."""
        unique: list[str] = []
        for column in self.columns:
            names = itertools.chain([column], (f"{column}_{number}" for number in itertools.count(2)))
            unique.append(
                next(name for name in names if name not in unique and (name == column or name not in self.columns))
            )
        return [dict(zip(unique, map(_finite, row), strict=True)) for row in self.rows]


def run_query(rows: Sequence[Row], sql: str) -> QueryResult:
    """Run one SELECT over the table ``results``.

    Raises:
        RequestError: the statement is invalid, is not a single SELECT or accesses files; or DuckDB is not installed.
    """
    require("SQL over results", "accelmark[results]")
    import duckdb

    with _connect(rows) as connection:
        connection.execute(f"SET memory_limit = '{_MEMORY_LIMIT}'")
        connection.execute("SET temp_directory = ''")  # do not spill into the working directory
        connection.execute("SET enable_external_access = false")
        connection.execute("SET autoload_known_extensions = false")
        connection.execute("SET lock_configuration = true")
        try:
            statements = connection.extract_statements(sql)
        except duckdb.Error as error:
            raise RequestError(f"invalid SQL: {_first_line(error)}") from error
        if len(statements) != 1:
            raise RequestError(f"a query is a single SELECT, found {len(statements)} statements")
        if statements[0].type != duckdb.StatementType.SELECT:
            kind = statements[0].type.name.replace("_", " ")
            raise RequestError(f"results are read-only: use SELECT, not {kind}")
        try:
            cursor = connection.execute(statements[0])
            columns = tuple(str(entry[0]) for entry in cursor.description or ())
            return QueryResult(columns, tuple(cursor.fetchall()))
        except duckdb.OutOfMemoryException as error:
            raise RequestError(f"the query needs more than {_MEMORY_LIMIT} of memory: select less") from error
        except duckdb.Error as error:
            raise RequestError(f"the query failed: {_first_line(error)}") from error


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write the table as Parquet.

    Raises:
        RunError: the file cannot be written.
        RequestError: DuckDB is not installed.
    """
    require("Parquet output", "accelmark[results]")
    import duckdb

    beside = path.with_name(f".{path.name}.tmp")
    with _connect(rows) as connection:
        try:
            connection.table(TABLE).write_parquet(str(beside))
            beside.replace(path)
        except (duckdb.Error, OSError) as error:
            beside.unlink(missing_ok=True)
            raise RunError(f"{path}: cannot be written: {_first_line(error)}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
