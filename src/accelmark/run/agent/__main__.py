"""Start the node agent: ``python -m accelmark.run.agent NODE_DIR``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from pathlib import Path
from typing import Final

from accelmark.results.store.files import write_atomic
from accelmark.run.agent.agent import Agent
from accelmark.run.agent.task import EXIT_FILE, IDENTITY_FILE, LOCK_FILE, TASK_FILE, AgentTask
from accelmark.run.processes import ProcessId, become_subreaper

_RESERVE_FILE: Final = ".reserve"
_RESERVE_BYTES: Final = 512 * 1024
"""Reserved on disk from the start, so that ``exit.json`` can be written when the disk is full."""


def main(arguments: list[str]) -> int:
    """Run the agent for the node directory in ``arguments``; returns its exit code."""
    node_dir = Path(arguments[0]).absolute()
    with contextlib.suppress(PermissionError):
        os.setsid()
    become_subreaper()
    agent = Agent(AgentTask.model_validate_json((node_dir / TASK_FILE).read_bytes()), node_dir)
    agent.handle_signals()
    lock = os.open(node_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    identity = ProcessId.of(os.getpid())
    assert identity is not None  # noqa: S101  a process can always see itself
    write_atomic(node_dir / IDENTITY_FILE, identity.model_dump_json())
    reserve = node_dir / _RESERVE_FILE
    reserve.write_bytes(os.urandom(_RESERVE_BYTES))
    ended = agent.run()
    reserve.unlink(missing_ok=True)
    write_atomic(node_dir / EXIT_FILE, ended.model_dump_json(indent=2))
    return 0 if ended.state == "succeeded" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
