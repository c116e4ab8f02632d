"""Made runs that comparisons are tried on: GENERATED, nothing in them was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.run.record.directory import measure_run
from tests.made_run import Made, make_run


def made(path: Path, **changes: Any) -> Path:
    """Make and summarise a run with three rounds that vary a little."""
    run = make_run(path, Made(**({"rounds": 3, "jitter": 1.0, "windows": 10} | changes)))
    measure_run(run)
    return run


def loaded(path: Path, **changes: Any) -> LoadedRun:
    """Make a run and read it."""
    return load_run(made(path, **changes))
