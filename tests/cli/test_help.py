"""Help texts: nothing is cut off, values are named, and the examples are valid commands."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer

from accelmark.cli import completion
from accelmark.cli.main import app
from accelmark.cli.options import examples
from tests.cli.test_main import accelmark
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


def test_names_of_suites_searches_data_sets_and_frameworks_are_completed() -> None:
    assert completion.suites("quicks") == ["quickstart"]
    assert completion.searches("fa") == ["fashion"]
    assert completion.frameworks("ja") == ["jax"]
    assert completion.datasets("fashion") == ["fashion_mnist"]
    assert completion.prepared("lamb") == ["lambada"]
    assert "mfu" in completion.explained("mf")


def test_bash_completes_names() -> None:
    line = ["accelmark", "infer", "resnet_mini", "--scenario", "si"]
    asked = {"_ACCELMARK_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(line), "COMP_CWORD": str(len(line) - 1)}
    program = "import sys; sys.argv = ['accelmark']; from accelmark.cli.main import main; main()"
    done = accelmark(code=program, **asked)
    assert done.stdout.split() == ["single_stream"]
