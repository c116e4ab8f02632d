"""AccelMark: a benchmark for AI chips and the software stacks that drive them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def load(path: str | Path) -> Any:
    """Load the results of one run, as :func:`accelmark.api.load` does, which is imported when this is called."""
    return import_module("accelmark.api").load(path)
