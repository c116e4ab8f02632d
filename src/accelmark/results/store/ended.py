"""Whether a run has ended: whether its summary and its manifest are of its last events."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path
from typing import Final

from accelmark.results.read.round_dir import ledger_events
from accelmark.spec.errors import RunError

PLAN_FILE: Final = "plan.json"
SUMMARY_FILE: Final = "summary.json"
MANIFEST_FILE: Final = "MANIFEST.sha256"
HOLDER_FILE: Final = "run.pid"
"""Locked by the process that works on a run or a search."""
EVENTS_FILE: Final = "events.jsonl"
_STAGES: Final = {"run_started": False, "run_resumed": False, "run_finished": True}
"""Event of a whole run -> whether the run has ended with it."""


def is_in_progress(directory: Path) -> bool:
    """Return whether a process has locked the directory of a run or search, also on another machine that shares it."""
    try:
        file = (directory / HOLDER_FILE).open("rb")
    except OSError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # NFS has the second
            return True
        except OSError:  # a file system without locks
            return False
    return False


def has_ended(run_dir: Path) -> bool:
    """Return whether a run has a summary, and has not been started or resumed since without an end."""
    if not (run_dir / SUMMARY_FILE).is_file() or is_in_progress(run_dir):
        return False
    stages = (_STAGES[kind] for event in ledger_events(run_dir) if (kind := event.get("kind")) in _STAGES)
    *_, ended = (True, *stages)
    return ended or _is_of_last_events(run_dir)


def require_ended(run_dir: Path) -> None:
    """Raise RunError where the results of a run are missing, or are those of an earlier end."""
    if not (run_dir / SUMMARY_FILE).is_file() and not (run_dir / PLAN_FILE).is_file():
        raise RunError(f"{run_dir}: is not a run directory: it has neither {PLAN_FILE} nor {SUMMARY_FILE}")
    if not has_ended(run_dir):
        is_resumed = (run_dir / SUMMARY_FILE).is_file()
        what = "was resumed and has not ended again" if is_resumed else f"has no {SUMMARY_FILE}"
        state = "it is in progress" if is_in_progress(run_dir) else "it is in progress, or was interrupted"
        raise RunError(f"{run_dir}: {what}: {state}; see 'accelmark status {run_dir}'")


def _is_of_last_events(run_dir: Path) -> bool:
    """Return whether the manifest is of the event log as it is: that of a run which could not be resumed, say."""
    try:
        lines = (run_dir / MANIFEST_FILE).read_text(encoding="utf-8").splitlines()
        return f"{hashlib.sha256((run_dir / EVENTS_FILE).read_bytes()).hexdigest()}  {EVENTS_FILE}" in lines
    except (OSError, UnicodeDecodeError):
        return False
