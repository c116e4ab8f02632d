"""One ``srun`` for a job: it starts the node agents on all hosts, each by its line of a shell script."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from accelmark.results.store.files import write_atomic, write_errors
from accelmark.run.agent.rank_exit import signal_name
from accelmark.run.agent.task import AGENT_LOG, CODE_FILE, IDENTITY_FILE, LOCK_FILE
from accelmark.run.launchers.shared_filesystem import POLL_S, CommandAgent
from accelmark.run.onhost.files import is_locked
from accelmark.spec.errors import RunError

SCRIPT_FILE: Final = "step.sh"
LOG_FILE: Final = "step.log"
"""In the directory of a job's first host: the script that ``srun`` runs on every host, and its output."""
_CHECKS_PER_S: Final = 256
"""Most hosts that are looked at in a second, over all hosts of a job."""
_END_S: Final = 60.0
"""Longest time from the end of all agents to the end of ``srun``: longer than Slurm's KillWait (30 s)."""
_SCRIPT: Final = """\
case "$SLURMD_NODENAME" in
{cases}
*) echo "accelmark: error: the job has no agent for node $SLURMD_NODENAME" >&2; exit 92;;
esac
trap : HUP INT TERM  # Slurm sends signals to the agent, too, which ends its ranks first
"$@" >>{log} 2>&1 </dev/null
code=$?
echo $code >{ended}
exit $code
"""


def script_of(agents: Sequence[CommandAgent]) -> str:
    """Return the shell script that runs, on each host, the command of its agent."""
    cases = "\n".join(
        f"{shlex.quote(agent.node.host.address)}) "
        f"cd {shlex.quote(str(agent.node.node_dir))} && set -- {shlex.join(agent.command)} || exit;;"
        for agent in agents
    )
    return _SCRIPT.format(cases=cases, log=AGENT_LOG, ended=CODE_FILE)


@final
class JobStep:
    """The ``srun`` of a job: ``prefix`` has its arguments, after there is an allocation."""

    def __init__(self, prefix: Callable[[], Sequence[str]], directory: Path) -> None:
        self._prefix = prefix
        self.log = directory / LOG_FILE
        self.agents: list[StepAgent] = []
        self.process: subprocess.Popen[bytes] | None = None
        self._num_ended = 0
        self._is_noted = False

    @property
    def command(self) -> list[str]:
        """The command on this machine."""
        return [*self._prefix(), "sh", str(self.log.with_name(SCRIPT_FILE))]

    @property
    def poll_s(self) -> float:
        """Interval between checks of each host."""
        return max(POLL_S, len(self.agents) / _CHECKS_PER_S)

    def start(self) -> None:
        """Start it, once; raises RunError if ``srun`` is not on the PATH."""
        if self.process is not None:
            return
        write_atomic(self.log.with_name(SCRIPT_FILE), script_of(self.agents), private=True)
        for agent in self.agents:
            (agent.node.node_dir / AGENT_LOG).touch()
        command = self.command
        with write_errors(self.log), self.log.open("wb") as output:
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            except FileNotFoundError as error:
                raise RunError(f"{command[0]} is not on the PATH") from error

    def note_death(self) -> None:
        """Add to its log that ``srun`` was killed, which it cannot write itself."""
        code = self.process.poll() if self.process is not None else None
        if code is not None and code < 0 and not self._is_noted:
            self._is_noted = True
            with self.log.open("a", encoding="utf-8") as log:
                log.write(f"srun: was killed by {signal_name(code)}\n")

    async def left_by_one(self) -> None:
        """Count the end of an agent; with the last one, wait for the end of ``srun``."""
        self._num_ended += 1
        if self.process is None or self._num_ended < len(self.agents):
            return
        deadline = time.monotonic() + _END_S
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        if self.process.poll() is None:
            self.process.kill()


@final
@dataclass(eq=False)
class StepAgent(CommandAgent):
    """A node agent that the ``srun`` of its job starts."""

    step: JobStep = field(kw_only=True)

    async def start(self) -> None:
        """Start the agents of all hosts, with the first call."""
        self.step.start()

    async def wait_for_end(self) -> None:
        """Wait until the agent has ended, although ``srun`` runs as long as the agents of other hosts do."""
        if self.step.process is None:  # an earlier coordinator started it
            await super().wait_for_end()
            return
        while not await asyncio.to_thread(self._has_ended):
            await asyncio.sleep(self.step.poll_s)
        self.step.note_death()
        await self.step.left_by_one()

    def _has_ended(self) -> bool:
        directory, srun = self.node.node_dir, self.step.process
        if (directory / CODE_FILE).exists() or srun is None or srun.poll() is not None:
            return True
        return (directory / IDENTITY_FILE).exists() and not is_locked(str(directory / LOCK_FILE))

    @property
    def logs(self) -> tuple[Path, ...]:
        """The logs of the agent and of ``srun``."""
        return (*super().logs, self.step.log)
