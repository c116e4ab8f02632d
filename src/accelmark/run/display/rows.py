"""Print lines wrapped to the terminal's width, with a hanging indent."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def print_hanging(console: Console, *lines: Text) -> None:
    """Print lines at once; on a terminal no word is broken, and each line can be copied as one."""
    shown = [_hanging(line, console) for line in lines] if console.is_terminal else lines
    console.print(Text("\n").join(shown), soft_wrap=True)


def _hanging(line: Text, console: Console) -> Text:
    indent = len(line.plain) - len(line.plain.lstrip())
    rows = line[indent:].wrap(console, console.width - indent - 4)
    for number, row in enumerate(rows):
        row.pad_left(indent + 4 * (number > 0))
        row.pad_right(console.width - row.cell_len)
    rows[-1].rstrip()
    return line.blank_copy().join(rows)
