"""Help texts: nothing is cut off, values are named, and the examples are valid commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from accelmark.cli import completion
from accelmark.cli.help import examples
from accelmark.cli.main import app
from tests.docs.test_commands import parse


def _verbs(command: Any, name: str) -> dict[str, Any]:
    found = {name: command}
    for sub_name, sub in getattr(command, "commands", {}).items():
        found |= _verbs(sub, f"{name} {sub_name}".strip())
    return found


VERBS = _verbs(typer.main.get_command(app), "")


def _help(name: str) -> str:
    context = VERBS[name].make_context(f"accelmark {name}".strip(), [], resilient_parsing=True)
    return str(VERBS[name].get_help(context))


@pytest.mark.parametrize("name", VERBS)
def test_no_help_is_cut_off_or_shows_types_of_python(name: str) -> None:
    usage, _, rest = _help(name).partition("\n\n")
    for mark in ("...", " <", "{", "Path]"):
        assert mark not in rest, rest
    assert "{" not in usage


def test_every_verb_shows_examples_which_the_command_line_accepts() -> None:
    assert set(examples()) == {name for name, verb in VERBS.items() if not hasattr(verb, "commands")}
    for verb, lines in examples().items():
        assert "\n\nExamples:\n" + "\n".join(f"  {line}" for line in lines) in _help(verb)
        for line in lines:
            program, *words = shlex.split(line)
            assert program == "accelmark"
            parse(words)


def test_names_of_suites_searches_and_frameworks_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text("name: quick\n")
    assert completion.suites("qui") == ["quick", "quickstart", "quick.yaml"]
    assert completion.searches("fa") == ["fashion"]
    assert completion.frameworks("ja") == ["jax"]
    assert {"nvidia", "resnet_mini"} <= set(completion.vendors_and_cases(""))


def completed(place: Path, line: str) -> list[str]:
    """Return what the program answers to bash, which takes a colon for a word of its own, at the end of a line."""
    words = re.findall(r":|[^\s:]+", line) + [""] * line.endswith(" ")
    asked = {"_ACCELMARK_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    program = "import sys; sys.argv = ['accelmark']; from accelmark.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=place, env=os.environ | asked, capture_output=True, text=True, timeout=60
    )
    return done.stdout.splitlines()


@pytest.mark.heavy
def test_bash_completes_runs_searches_data_sets_scenarios_and_parts_of_a_key(tmp_path: Path) -> None:
    for file in ("runs/a/plan.json", "runs/b/automl.json", "c.accelmark.tar"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert {"jax", "pytorch"} <= set(completed(tmp_path, "accelmark train resnet_mini:"))
    assert completed(tmp_path, "accelmark train resnet_mini:pyt") == ["pytorch"]
    assert completed(tmp_path, "accelmark train resnet_mini:pytorch:CPU --vendor nvid") == ["nvidia"]
    assert completed(tmp_path, "accelmark infer resnet_mini --scenario si") == ["single_stream"]
    assert completed(tmp_path, "accelmark check case resnet_mini --frameworks pytorch,ja") == ["pytorch,jax"]
    assert completed(tmp_path, "accelmark data list fashion") == ["fashion_mnist"]
    assert completed(tmp_path, "accelmark automl status ") == ["runs/b"]
    for verb in ("compare runs/a", "export", "results"):
        assert completed(tmp_path, f"accelmark {verb} ") == ["runs/a", "runs/b", "c.accelmark.tar"]
    assert "".join(completed(tmp_path, "accelmark results other/")) == "", "then bash completes file names"
