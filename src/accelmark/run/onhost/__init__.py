"""Programs that are sent to a host as text and run by its Python; they use the standard library only."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, Literal

Verb = Literal["probe", "packages", "state", "listen", "reach", "wheel", "files", "clear", "started", "follow"]
_PROGRAMS: Final = dict.fromkeys(("probe", "packages", "state", "listen", "reach"), "checks")
"""Verb -> the module of this package that carries it out; others are in ``files``."""

START: Final = """\
cd "$1" || exit 3
shift
[ -d .started ] && exit 0
mkdir .started || exit 4
setsid sh -c '"$@"; echo $? >agent.code' sh "$@" </dev/null >>agent.log 2>&1 &
"""
"""Starts a command detached in a directory, at most once, and writes its exit code there."""


@cache
def _source(program: str) -> str:
    return Path(__file__).with_name(f"{program}.py").read_text(encoding="utf-8")


def command(python: str, verb: Verb, *arguments: str) -> list[str]:
    """Return the arguments that run a program of this package on a host."""
    return [python, "-I", "-S", "-c", _source(_PROGRAMS.get(verb, "files")), verb, *arguments]


def abridged(argv: list[str]) -> list[str]:
    """Return a command for display: texts of programs of this package are replaced by their names."""
    texts = {START: "<accelmark/run/onhost: START>"}
    texts |= {_source(name): f"<accelmark/run/onhost/{name}.py>" for name in ("checks", "files")}
    for text, short in texts.items():
        for shape in (shlex.quote(text), text):
            argv = [argument.replace(shape, short) for argument in argv]
    return argv


def start_command(node_dir: str, argv: Sequence[str]) -> list[str]:
    """Return the arguments that start ``argv`` detached in ``node_dir``."""
    return ["sh", "-c", START, "sh", node_dir, *argv]
