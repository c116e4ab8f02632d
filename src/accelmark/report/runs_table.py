"""The table of many runs as people read it: few columns, figures with their units and intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from accelmark.report.numbers import NOTHING, figure, percent
from accelmark.results.figures import FIGURES, FigureName
from accelmark.results.table import HALF, Cell, Row, grouped

F = FigureName
FIGURES_SHOWN: Final = (
    F.THROUGHPUT_TRAIN, F.INFERENCE_CORE, F.TIME_TO_TARGET, F.FINAL_METRIC, F.MFU, F.PEAK_DEVICE_MEMORY, F.ENERGY,
)  # fmt: skip
_FACTS: Final = (("Run", "run"), ("Case", "case"), ("Chip", "chip"), ("Scale", "scale"), ("Verdict", "verdict"),
                 ("Rounds", "rounds"))  # fmt: skip
_ROUNDING: Final = 1e-9
"""An interval narrower than this share of its figure is what adding left over."""
_TITLES: Final = {F.THROUGHPUT_TRAIN: "Throughput", F.PEAK_DEVICE_MEMORY: "Peak memory"}


def shown_columns(rows: Sequence[Row]) -> tuple[list[str], list[FigureName]]:
    """Return the heads of the table, and the figures that any row holds."""
    names = [name for name in FIGURES_SHOWN if any(row[name.value] is not None for row in rows)]
    titles = [_TITLES.get(name, FIGURES[name].title.format(unit="unit")) for name in names]
    return [*(title for title, _ in _FACTS), *titles], names


def shown_row(row: Row, names: Iterable[FigureName]) -> list[str]:
    """Return the cells of a row under :func:`shown_columns`."""
    marks = f" ({str(row['marks']).replace('_', ' ')})" if row["marks"] else ""
    facts = [NOTHING if row[name] is None else str(row[name]) for _, name in _FACTS]
    facts[4] += marks
    return [*facts, *(figure_cell(row, name) for name in names)]


def figure_cell(row: Row, name: FigureName) -> str:
    """Return a figure of a row with half its interval, relative."""
    value, half = row[name.value], row[f"{name.value}{HALF}"]
    if not isinstance(value, float | int):
        return NOTHING
    text = figure(name, float(value), str(row["unit"]))
    if not isinstance(half, float | int) or not value:
        return text
    share = float(half) / abs(value)
    return f"{text} ± {percent(share if share > _ROUNDING else 0.0)}"


def group_title(by: Sequence[str], values: Iterable[Cell]) -> str:
    """Return what a group is called."""
    return ", ".join(f"{name} {NOTHING if value is None else value}" for name, value in zip(by, values, strict=True))


def markdown(rows: Sequence[Row], group_by: Sequence[str] = ()) -> str:
    """Return the table in Markdown, a heading for each group."""
    heads, names = shown_columns(rows)
    parts = []
    for values, part in grouped(rows, group_by).items():
        title = f"### {_escaped(group_title(group_by, values))}\n\n" if group_by else ""
        parts.append(title + plain_markdown(heads, [shown_row(row, names) for row in part]))
    return "\n".join(parts) or plain_markdown(heads, [])


def plain_markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return any table in Markdown."""
    lines = [heads, ["---"] * len(heads), *([NOTHING if value is None else value for value in row] for row in rows)]
    return "".join("| " + " | ".join(_escaped(str(cell)) for cell in line) + " |\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
