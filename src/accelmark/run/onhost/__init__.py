"""A program that is sent to a host as text and run by its Python; it uses the standard library only."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, Literal

Verb = Literal["probe", "packages", "state", "listen", "reach", "wheel", "files", "clear", "started", "follow"]
START: Final = """\
cd "$1" || exit 3
shift
[ -d .started ] && exit 0
mkdir .started || exit 4
setsid sh -c '"$@"; echo $? >agent.code' sh "$@" </dev/null >>agent.log 2>&1 &
"""
"""Starts a command detached in a directory, at most once, and writes its exit code there."""


@cache
def _source() -> str:
    return Path(__file__).with_name("program.py").read_text(encoding="utf-8")


def command(python: str, verb: Verb, *arguments: str) -> list[str]:
    """Return the arguments that run a form of the program on a host."""
    return [python, "-I", "-S", "-c", _source(), verb, *arguments]


def abridged(argv: list[str]) -> list[str]:
    """Return a command for display: the texts of the program and of START are replaced by their names."""
    texts = {START: "<accelmark/run/onhost: START>", _source(): "<accelmark/run/onhost/program.py>"}
    for text, short in texts.items():
        for shape in (shlex.quote(text), text):
            argv = [argument.replace(shape, short) for argument in argv]
    return argv


def start_command(node_dir: str, argv: Sequence[str]) -> list[str]:
    """Return the arguments that start ``argv`` detached in ``node_dir``."""
    return ["sh", "-c", START, "sh", node_dir, *argv]
