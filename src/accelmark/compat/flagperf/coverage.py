"""FlagPerf's models and the cases that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, final

from accelmark.spec.model import read_yaml

Task = Literal["train", "infer"]


@final
@dataclass(frozen=True, slots=True)
class Coverage:
    """A model of FlagPerf and its equivalent."""

    task: Task
    model: str
    """Name in FlagPerf's keys."""
    frameworks: str
    """Frameworks that FlagPerf has it in."""
    case: str | None
    """The case that carries it, or its nearest equivalent; None: there is none."""
    note: str
    """What differs, or why no case carries it."""


@cache
def coverage() -> Sequence[Coverage]:
    """Return all models of FlagPerf from ``coverage.yaml``, training first."""
    table = read_yaml(Path(__file__).with_name("coverage.yaml"))
    tasks: tuple[Task, Task] = ("train", "infer")
    return tuple(
        Coverage(task, row["model"], row.get("frameworks", ""), row["case"], row.get("note", ""))
        for task in tasks
        for row in table[task]
    )


def equivalent(model: str, task: Task) -> Coverage | None:
    """Return the entry of a model in FlagPerf's keys, or None where it is none of FlagPerf's."""
    return next((entry for entry in coverage() if (entry.model, entry.task) == (model, task)), None)
