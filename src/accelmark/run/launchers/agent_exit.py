"""How an agent of this file system ended: by its own word, or as judged where it left none."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from accelmark.results.store.files import write_atomic
from accelmark.run.agent.rank_exit import tail
from accelmark.run.agent.task import EXIT_FILE
from accelmark.run.launchers.launcher import NodeWork
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit

SILENT: Final = "the node agent ended without a last word (was it killed?)"


def last_word(node_dir: Path) -> NodeExit | str:
    """Return what an agent wrote last, or why there is no such word."""
    try:
        return NodeExit.model_validate_json((node_dir / EXIT_FILE).read_bytes())
    except FileNotFoundError:
        return SILENT
    except (OSError, ValueError) as error:
        return f"{EXIT_FILE} of the node agent cannot be read: {error}"


def kept(node_dir: Path, end: NodeExit) -> NodeExit:
    """Write an end down where the agent did not, so that another coordinator finds it; returns it."""
    with contextlib.suppress(RunError):
        write_atomic(node_dir / EXIT_FILE, end.model_dump_json(indent=2))
    return end


def lost_node(work: NodeWork, reason: str, started_at: str) -> NodeExit:
    """Return the end of a node that nobody saw."""
    return ended_node(work, "lost", reason, started_at)


def failed_node(work: NodeWork, reason: str, started_at: str) -> NodeExit:
    """Return the end of a node whose agent could never begin."""
    return ended_node(work, "failed", reason, started_at)


def ended_node(work: NodeWork, state: str, reason: str, started_at: str) -> NodeExit:
    """Return an end that the coordinator judged itself."""
    values = {"host": work.task.host, "noderank": work.task.noderank, "state": state, "reason": reason}
    return NodeExit.model_validate({**values, "started_at": started_at, "duration_s": 0.0, "ranks": ()})


def said(log: Path) -> str:
    """Return ``; it last said: …`` with the last line of a log that names an error, else its last line."""
    lines = [line.strip() for line in tail(log) if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return f"; it last said: {telling[-1]}" if telling else ""
