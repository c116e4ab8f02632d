"""Ranks in a virtual environment of their framework, with the AccelMark of the agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import accelmark

CODE_DIRECTORY: Final = "code"
"""Directory of the node directory with a link to the agent's AccelMark, where that is next to other packages."""
_PACKAGES: Final = ("site-packages", "dist-packages")


def environment_variables(python: Path, environment: Mapping[str, str], node_dir: Path) -> dict[str, str]:
    """Return the variables with which ``python`` imports this AccelMark and finds the commands of its environment.

    Of an AccelMark in site-packages only the package itself is added to ``PYTHONPATH``, not the packages next to it,
    which belong to the agent's Python.
    """
    ours = Path(accelmark.__file__).parent
    place = ours.parent
    if place.name in _PACKAGES:
        place = node_dir / CODE_DIRECTORY
        place.mkdir(exist_ok=True)
        if not (place / ours.name).is_symlink():
            (place / ours.name).symlink_to(ours)
    others = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in others if Path(entry).name not in _PACKAGES and Path(entry) != place]
    path = os.pathsep.join(filter(None, [str(python.parent), environment.get("PATH", "")]))
    return {"PATH": path, "PYTHONPATH": os.pathsep.join([str(place), *others]), "VIRTUAL_ENV": str(python.parents[1])}
