"""How a node agent ended: its ``exit.json``, or a record written in its place."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final, Literal

from accelmark.results.store.files import write_atomic
from accelmark.run.agent.rank_exit import tail
from accelmark.run.agent.task import EXIT_FILE, NodeJob
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit

NO_EXIT_FILE: Final = f"node agent exited without writing {EXIT_FILE} (was it killed?)"


def read_exit(node_dir: Path) -> NodeExit | str:
    """Return what an agent recorded of its end, or why there is no record."""
    try:
        return NodeExit.model_validate_json((node_dir / EXIT_FILE).read_bytes())
    except FileNotFoundError:
        return NO_EXIT_FILE
    except (OSError, ValueError) as error:
        return f"{EXIT_FILE} of the node agent cannot be read: {error}"


def save_exit(node_dir: Path, end: NodeExit) -> None:
    """Write ``exit.json`` where the agent did not, for later coordinators."""
    with contextlib.suppress(RunError):
        write_atomic(node_dir / EXIT_FILE, end.model_dump_json(indent=2))


def unreported_exit(node: NodeJob, state: Literal["lost", "failed"], reason: str, started_at: str) -> NodeExit:
    """Return the record of an agent that wrote none: ``failed`` where it never ran, else ``lost``."""
    return NodeExit(
        host=node.task.host,
        noderank=node.task.noderank,
        state=state,
        reason=reason,
        started_at=started_at,
        duration_s=0.0,
        ranks=(),
    )


def last_error(log: Path) -> str:
    """Return ``; last output: …`` with the last line of a log that names an error, else its last line."""
    lines = [line.strip() for line in tail(log) if line.strip()]
    chosen = [line for line in lines if "error" in line.lower()] or lines
    return f"; last output: {chosen[-1]}" if chosen else ""
