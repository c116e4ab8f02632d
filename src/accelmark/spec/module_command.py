"""The command that runs a module of AccelMark in a process whose imports the working directory does not change."""

from __future__ import annotations

from typing import Final

_RUN: Final = (
    "import sys; sys.path = [entry for entry in sys.path if entry]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command for ``python -m module``, but without the working directory on ``sys.path``.

    A vendor's ``json.py`` in a job's directory would be imported in place of Python's. ``python -P -m`` does the same,
    and needs Python 3.11.
    """
    return [python, "-c", _RUN, module, *arguments]
