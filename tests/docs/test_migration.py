"""What FlagPerf's and AIPerf's documents describe, row by row: the names on AccelMark's side of the tables exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import accelmark
from accelmark.cli.main import app
from accelmark.compat.flagperf.parse import TABLES
from accelmark.explain.entries import entries
from accelmark.spec.key import CaseKey
from accelmark.spec.log.events import Evaluation, Event, Finished, StepWindow
from accelmark.spec.plugins.catalog import folders
from tests.docs.test_commands import parse

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SUITES = Path(accelmark.__file__).parent / "suites"
SOURCES = ("files.md", "vendors.md", "case-files.md", "cluster.md", "inference.md", "automl.md")
"""Pages that describe files, methods and classes, which ``accelmark explain`` does not."""
STATUS = {"same", "converted", "otherwise", "no"}


def rows(page: str) -> list[list[str]]:
    lines = (REFERENCE / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("| ")]
    return [row for row in cells if len(row) == 3 and row[1]]


def known_names() -> set[str]:
    names = {part for entry in entries() for part in (entry.name, entry.name.rpartition(".")[2])}
    names |= {name for kind in ("cases", "vendors", "frameworks", "servers") for name in folders(kind)}
    names |= {file.stem for file in SUITES.glob("*.yaml")}
    names |= {event.value for event in Event} | set(TABLES["vendors"])
    names |= {field for model in (StepWindow, Evaluation, Finished) for field in model.model_fields}
    return names | set(options(typer.main.get_command(app)))


def options(command: Any) -> list[str]:
    """Return the options of a command and of its subcommands."""
    below = [name for sub in getattr(command, "commands", {}).values() for name in options(sub)]
    return [*below, *(name for parameter in command.params for name in parameter.opts)]


@pytest.mark.parametrize(("page", "least"), [("flagperf.md", 140), ("aiperf.md", 45)])
def test_the_rows_name_what_exists(page: str, least: int) -> None:
    described = "\n".join((REFERENCE / source).read_text(encoding="utf-8") for source in SOURCES)
    described += "\n".join(written for written, _, _ in rows(page))
    known, wrong = known_names(), []
    for written, status, text in rows(page):
        assert status in STATUS, written
        for name in re.findall(r"`([^`]+)`", text):
            if name.startswith("accelmark "):
                parse(shlex.split(name)[1:])
            elif ":" in name and name.partition(":")[0] in folders("cases"):
                CaseKey.parse(name, hardware="any")
            elif not {name, name.partition(" ")[0]} & known and name not in described and "<" not in name:
                wrong.append((written, name))
    assert wrong == []
    assert len(rows(page)) >= least
