"""Where a plan learns about data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from accelmark.spec.case import CaseSpec

DataDirs = Callable[[CaseSpec, Path | None], Mapping[str, Path]]
"""From a case and the directory a person named (or None): data set name -> where it is or will be fetched to."""
