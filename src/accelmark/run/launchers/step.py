"""An agent that is started by another program (a container engine, ``srun``) and writes to this file system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from accelmark.results.store.files import make_directory, naming_the_disk, write_atomic
from accelmark.run.agent.task import AGENT_LOG, EXIT_FILE, IDENTITY_FILE, LOCK_FILE, STOP_FILES, TASK_FILE
from accelmark.run.launchers.agent_exit import failed_node, kept, last_word, lost_node, said
from accelmark.run.launchers.launcher import NodeWork
from accelmark.run.onhost.follow import is_locked
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import RunError
from accelmark.spec.job import NodeExit
from accelmark.spec.secret import secrets_in

_POLL_S: Final = 0.2
_BIRTH_S: Final = 120.0
_SETTLE_S: Final = 3.0
"""Longest time from the end of what started the agent to the last of its files being seen here."""


@final
@dataclass(frozen=True, slots=True)
class Step:
    """How an agent is started, and what has to be done around it."""

    argv: Sequence[str]
    ready: Callable[[], Awaitable[None]]
    """Sees to it that what the agent runs in is there."""
    clean_up: Sequence[str] | None
    """Ends by force what the agent ran in."""


@final
class StepLink:
    """One job on one host that shares this file system."""

    def __init__(self, work: NodeWork, step: Step) -> None:
        self._work = work
        self._step = step
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = utc_now()

    @property
    def work(self) -> NodeWork:
        """What this link is for."""
        return self._work

    async def prepare(self) -> None:
        """Write ``agent.json``, and see to it that the sandbox is there."""
        write_task(self._work)
        await self._step.ready()

    async def start(self) -> None:
        """Start it in a session of its own, so that neither Ctrl-C nor the coordinator's death reaches it."""
        self._process = start_detached(self._work, self._step.argv)

    async def attach(self) -> bool:
        """Tell whether an agent was ever started for this job."""
        return (self._work.node_dir / AGENT_LOG).exists()

    async def stop(self, *, at_once: bool) -> None:
        """Leave the agent a word; it looks for one at least once a second."""
        with contextlib.suppress(OSError):
            (self._work.node_dir / STOP_FILES[at_once]).touch()

    async def wait(self) -> NodeExit:
        """Wait until the agent is gone, then read its last word."""
        born_by = time.monotonic() + _BIRTH_S
        while True:
            over = self._process is not None and self._process.poll() is not None
            living = is_locked(str(self._work.node_dir / LOCK_FILE))
            if over or living is False or (living is None and time.monotonic() > born_by):
                break
            await asyncio.sleep(_POLL_S)
        settled_by = time.monotonic() + _SETTLE_S
        while not (self._work.node_dir / EXIT_FILE).exists() and time.monotonic() < settled_by:
            if is_locked(str(self._work.node_dir / LOCK_FILE)):
                settled_by = time.monotonic() + _SETTLE_S  # it outlives what started it
            await asyncio.sleep(_POLL_S)
        return await self._last_word()

    async def _last_word(self) -> NodeExit:
        word = last_word(self._work.node_dir)
        if isinstance(word, NodeExit):
            return word
        if self._step.clean_up is not None:
            await run_here(self._step.clean_up)
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 15)
        last = said(self._work.node_dir / AGENT_LOG)
        if (self._work.node_dir / IDENTITY_FILE).exists():
            end = lost_node(self._work, word + last, self._started_at)
        else:
            end = failed_node(self._work, f"the node agent could not begin{last}", self._started_at)
        return kept(self._work.node_dir, end)


def write_task(work: NodeWork) -> None:
    """Write ``agent.json``; ``job.json`` is in the run directory already."""
    make_directory(work.node_dir)
    private = any(secrets_in(work.task.model_dump(mode="json")))
    write_atomic(work.node_dir / TASK_FILE, work.task.model_dump_json(indent=2), private=private)


def start_detached(
    work: NodeWork, argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, in the node directory, where its output is logged.

    Raises:
        RunError: its program is not there, or the log cannot be written.
    """
    log = work.node_dir / AGENT_LOG
    with naming_the_disk(log), log.open("ab") as output:
        try:
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=work.node_dir,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise RunError(f"{work.host.name}: {argv[0]} is not on the PATH") from error


async def run_here(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command on this machine; returns its exit code and the last line it said."""
    code, told = await tell_here(argv)
    lines = told.strip().splitlines()
    return code, lines[-1] if lines else ""


async def tell_here(argv: Sequence[str]) -> tuple[int, str]:
    """Run a command on this machine; returns its exit code and all that it said."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except FileNotFoundError:
        return 127, f"{argv[0]} is not on the PATH"
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode(errors="replace")


def source_directory() -> Path:
    """Return the directory that this AccelMark is imported from."""
    return Path(__file__).parents[3]
