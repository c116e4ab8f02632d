"""How ranks ended: from their exit codes, and from what each wrote last."""

from __future__ import annotations

import json
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from accelmark.spec.errors import EXIT_CANCELLED
from accelmark.spec.events import Event
from accelmark.spec.job import RankExit, RankState
from accelmark.spec.perflog import PerfLogRecord, decode_line

_LAST_LINES: Final = 20
_LINE_LENGTH: Final = 500
_STATES: Final[Mapping[str, RankState]] = {"completed": "succeeded", "failed": "failed", "cancelled": "cancelled"}


@final
@dataclass(frozen=True, slots=True)
class LastWords:
    """The end of a rank's log."""

    finished: Mapping[str, Any] | None
    """The value of FINISHED, where that is the last event."""
    lines: tuple[str, ...]


def read_last_words(path: Path) -> LastWords:
    """Return how a rank's log ends; an absent log has no lines."""
    if not path.is_file():
        return LastWords(None, ())
    last_event: PerfLogRecord | None = None
    with path.open(encoding="utf-8", errors="replace") as file:
        tail: deque[str] = deque(maxlen=_LAST_LINES)
        for line in file:
            tail.append(line.rstrip("\n")[:_LINE_LENGTH])
            if records := decode_line(line):
                last_event = records[-1]
    finished = last_event is not None and last_event.event == Event.FINISHED
    return LastWords(last_event.value if last_event is not None and finished else None, tuple(tail))


def rank_exit(rank: int, local_rank: int, exit_code: int | None, words: LastWords) -> RankExit:
    """Return how one rank ended.

    ``exit_code`` is negative for a signal, as Python has it, and None where only the log can tell.
    """
    state: RankState
    name: str | None = None
    reason: str | None
    finished = words.finished
    if exit_code is not None and exit_code < 0:
        name = signal.Signals(-exit_code).name
        state, reason = "signaled", f"rank {rank} was ended by {name}" + _advice(name)
    elif finished is not None:
        state, reason = _STATES[finished["state"]], finished["message"]
        if exit_code not in (None, 0, EXIT_CANCELLED) and state == "succeeded":
            state, reason = "failed", f"rank {rank} finished, but its process ended with code {exit_code}"
    elif exit_code is None:
        state, reason = "lost", f"rank {rank} left neither an exit code nor a last event"
    else:
        state, reason = "failed", f"rank {rank} ended with code {exit_code} before its last event"
    return RankExit(
        rank=rank,
        local_rank=local_rank,
        state=state,
        exit_code=exit_code,
        signal=name,
        reason=reason,
        last_lines=words.lines,
    )


def _advice(name: str) -> str:
    if name == "SIGKILL":
        return " (by the kernel for want of memory, or by somebody; see dmesg)"
    return " (a crash in native code; see the last lines of its log)" if name in ("SIGSEGV", "SIGABRT") else ""


def write_exits(path: Path, exits: Sequence[RankExit]) -> None:
    """Write ``ranks.json`` beside and rename it."""
    beside = path.with_suffix(".json.tmp")
    beside.write_text(json.dumps([item.model_dump(mode="json") for item in exits], indent=2), encoding="utf-8")
    beside.replace(path)
