"""The end of a node that left no word of its own."""

from __future__ import annotations

from pathlib import Path

from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.ranklog import tail
from accelmark.spec.job import NodeExit


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
