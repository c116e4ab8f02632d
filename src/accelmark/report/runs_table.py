"""The table of many runs as people read it: few columns, figures with their units and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from accelmark.report.printable import printable
from accelmark.results.compare.table import HALF, Cell, Row, grouped
from accelmark.results.figures.definitions import FigureName, format_figure, title_of
from accelmark.spec.number_format import NOTHING, percent

F = FigureName
FIGURES_SHOWN: Final = (
    F.THROUGHPUT_TRAIN, F.INFERENCE_CORE, F.TIME_TO_TARGET, F.FINAL_METRIC, F.MFU, F.PEAK_DEVICE_MEMORY, F.ENERGY,
    F.SEARCH_SCORE, F.SEARCH_HELD_OUT_ERROR,
)  # fmt: skip
_FACTS: Final = (("Run", "run"), ("Case", "case"), ("Variant", "variant"), ("Chip", "chip"), ("Scale", "scale"),
                 ("Verdict", "verdict"), ("Rounds", "rounds"))  # fmt: skip
_OPTIONAL: Final = "variant"
"""A column that is shown where any row has it: what tells inference runs and searches of one case apart."""
_ROUNDING: Final = 1e-9
"""An interval narrower than this share of its figure is what adding left over."""
_TITLES: Final = {F.THROUGHPUT_TRAIN: "Throughput", F.PEAK_DEVICE_MEMORY: "Peak memory"}


def shown_columns(rows: Sequence[Row]) -> tuple[list[str], list[FigureName]]:
    """Return the heads of the table, and the figures that any row holds."""
    names = [name for name in FIGURES_SHOWN if any(row[name.value] is not None for row in rows)]
    titles = [_TITLES.get(name, title_of(name, "unit")) for name in names]
    return [*(title for title, _ in shown_facts(rows)), *titles], names


def shown_facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return (head, column) of what is shown beside figures."""
    any_variant = any(row[_OPTIONAL] is not None for row in rows)
    return [(title, name) for title, name in _FACTS if name != _OPTIONAL or any_variant]


def shown_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of each row under :func:`shown_columns`."""
    facts, names = shown_facts(rows), shown_columns(rows)[1]
    return [[*(_fact(row, name) for _, name in facts), *(figure_cell(row, name) for name in names)] for row in rows]


def _fact(row: Row, name: str) -> str:
    text = NOTHING if row[name] is None else str(row[name])
    marks = str(row["marks"]).replace("_", " ")
    return f"{text} ({marks})" if name == "verdict" and marks else text


def figure_cell(row: Row, name: FigureName) -> str:
    """Return a figure of a row with half its interval, relative."""
    value, half = row[name.value], row[f"{name.value}{HALF}"]
    if not isinstance(value, float | int):
        return NOTHING
    text = format_figure(name, float(value), str(row["unit"]))
    if not isinstance(half, float | int) or not value:
        return text
    share = float(half) / abs(value)
    return f"{text} ± {percent(share if share > _ROUNDING else 0.0)}"


def group_title(by: Sequence[str], values: Iterable[Cell]) -> str:
    """Return what a group is called."""
    return ", ".join(f"{name} {NOTHING if value is None else value}" for name, value in zip(by, values, strict=True))


def markdown(rows: Sequence[Row], group_by: Sequence[str] = ()) -> str:
    """Return the table in Markdown, a heading for each group."""
    parts = []
    for values, part in grouped(rows, group_by).items():
        title = f"### {escaped(group_title(group_by, values))}\n\n" if group_by else ""
        parts.append(title + plain_markdown(shown_columns(part)[0], shown_rows(part)))
    return "\n".join(parts) or plain_markdown(shown_columns(rows)[0], [])


def plain_markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return any table in Markdown."""
    lines = [heads, ["---"] * len(heads), *([NOTHING if value is None else value for value in row] for row in rows)]
    return "".join("| " + " | ".join(escaped(str(cell)) for cell in line) + " |\n" for line in lines)


def escaped(text: str) -> str:
    """Return a cell of Markdown: on one line, and nothing in it is HTML or obeyed by a terminal."""
    return printable(" ".join(text.splitlines())).replace("|", "\\|").replace("<", "&lt;")
