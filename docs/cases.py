"""Write docs/cases.md and the table of cases in README.md from the cases' folders: ``python docs/cases.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from accelmark.spec.plugins.case import CaseSpec, Family
from accelmark.spec.plugins.catalog import folders, frameworks_of, load_case

PAGE: Final = Path(__file__).with_name("cases.md")
README: Final = Path(__file__).parents[1] / "README.md"
MARKED: Final = re.compile(r"(<!-- cases -->\n).*?(<!-- /cases -->)", re.DOTALL)
_SIZES: Final = {"mini": "Minutes on two CPU cores", "standard": "Sized for accelerators"}
_HEAD: Final = """\
# Cases

A case is a standard workload: a model, a data set and a target. `accelmark cases NAME` prints its settings; its README
has the results. *speed only*: the case states no target, so a run does not check convergence; a VALID result says so.
This page is written by `python docs/cases.py`."""


def page() -> str:
    """Return docs/cases.md: a table of the cases of each size."""
    parts = [_HEAD]
    for size, title in _SIZES.items():
        parts.append(f"\n## {title}\n")
        parts.append("| Case | Family | Workload | Tasks | Target of training | Frameworks of training |")
        parts.append("|---|---|---|---|---|---|")
        parts += [_row(case) for case in _cases() if case.size == size]
    return "\n".join(parts) + "\n"


def families() -> str:
    """Return the list of README.md: a line for each family with the names of its cases, by size."""
    lines = []
    for family in get_args(Family):
        names = {
            size: ", ".join(case.name for case in _cases() if (case.family, case.size) == (family, size))
            for size in _SIZES
        }
        lines.append(f"- **{family}**: mini: {names['mini'] or '-'}; for accelerators: {names['standard'] or '-'}")
    return "\n".join(lines) + "\n"


def _cases() -> Iterator[CaseSpec]:
    return (load_case(name) for name, folder in sorted(folders("cases").items()) if folder.origin == "accelmark")


def _row(case: CaseSpec) -> str:
    target = "-"
    if case.train is not None:
        aim, curve = case.train.target, case.train.reference_loss
        target = "speed only" if curve is None else "loss curve"
        if aim is not None:
            target = f"{aim.metric} {'≥' if aim.direction == 'at_least' else '≤'} {aim.value:g}"
    cells = (
        _link(case, "../"),
        case.family or "-",
        case.title,
        ", ".join(case.tasks),
        target,
        ", ".join(sorted(frameworks_of(case))) or "-",
    )
    return f"| {' | '.join(cells)} |"


def _link(case: CaseSpec, base: str) -> str:
    return f"[{case.name}]({base}src/accelmark/cases/{case.name}/README.md)"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    text = MARKED.sub(lambda found: found[1] + families() + found[2], README.read_text(encoding="utf-8"))
    README.write_text(text, encoding="utf-8")
