"""The node agent of one job on one host over SSH: prepared, started, followed through lost connections, ended."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Final, final

from accelmark.run.agent.task import AGENT_LOG, IDENTITY_FILE, TASK_FILE, NodeJob
from accelmark.run.launchers.agent_exit import NO_EXIT_FILE, last_error, read_exit, save_exit, unreported_exit
from accelmark.run.launchers.host import HostError, UnreachableError
from accelmark.run.launchers.ssh.deliver import put_files
from accelmark.run.launchers.ssh.hosts import LONGEST_PAUSE_S, STOP_TIMEOUT_S, SshHosts
from accelmark.run.launchers.ssh.stream import AgentEnd, NodeStream, wait_until_visible
from accelmark.run.onhost import start_command
from accelmark.run.record.states import utc_now
from accelmark.spec.job import NodeExit

_DATA_TIMEOUT_S: Final = 4 * 3600.0


@final
class SshAgent:
    """The agent of a job on one host."""

    def __init__(self, node: NodeJob, hosts: SshHosts) -> None:
        self._node = node
        self._hosts = hosts
        self._host = hosts.connection(node.host)
        self._remote = hosts.layout.node_dir(node)
        in_place = hosts.layout.shared_run is not None
        self._stream = NodeStream(self._host, hosts.python, str(self._remote), node.node_dir, in_place=in_place)
        self._stop_by: float | None = None
        self._started_at = utc_now()

    @property
    def node(self) -> NodeJob:
        """The agent's job on its host."""
        return self._node

    async def prepare(self) -> None:
        """Deliver AccelMark, the image, the job and its data to the host.

        Raises:
            HostError: the host cannot run the job.
        """
        hosts, layout, node = self._hosts, self._hosts.layout, self._node
        try:
            await hosts.clear(node)
            await hosts.deliver(node.host)
            await hosts.ensure_image(node)
            task = layout.task(node).model_dump_json(indent=2)
            files = {layout.job_file(node): layout.job(node).model_dump_json(indent=2), self._remote / TASK_FILE: task}
            await put_files(self._host, hosts.python, files)
            if layout.shared_run is not None:
                written = hashlib.sha256(task.encode()).hexdigest()
                await wait_until_visible(self._host.name, node.node_dir / TASK_FILE, written)
            await self._fetch_data()
        except UnreachableError as error:  # nothing was started: the job failed, it is not lost
            raise HostError(error.host, error.what) from error

    async def _fetch_data(self) -> None:
        argv = self._hosts.data_command(self._node)
        if argv is None:
            return
        if self._hosts.plan.cluster.container is not None:
            parents = (str(path.parent) for path in self._node.job.data_dirs.values())
            await self._host.run(["mkdir", "-p", "--", *parents])
        done = await self._host.run(argv, timeout_s=_DATA_TIMEOUT_S)
        if done.code != 0:
            raise HostError(self._host.name, f"its data is not available: {done.message}")
        self._hosts.save_data_record(self._node, done.out.decode(errors="replace").strip().splitlines()[-1])

    async def start(self) -> None:
        """Start the agent so that it outlives the connection; a second call starts no second agent.

        Raises:
            UnreachableError: the connection was lost; the agent may have started.
            HostError: it was not started.
        """
        done = await self._host.run(start_command(str(self._remote), self._hosts.agent_command(self._node)))
        if done.code != 0:
            raise HostError(self._host.name, f"the node agent could not be started: {done.message}")

    async def attach(self) -> bool:
        """Return whether an agent was ever started; True for an unreachable host, which :meth:`wait` retries."""
        try:
            done = await self._host.run(["test", "-d", str(self._remote / ".started")])
        except UnreachableError:
            return True
        return done.code == 0

    async def stop(self, *, at_once: bool) -> None:
        """Ask the agent to end, as soon as its host can be reached."""
        self._stop_by = time.monotonic() + STOP_TIMEOUT_S * (0.3 if at_once else 1)
        self._stream.ask(at_once=at_once)

    async def wait(self) -> NodeExit:
        """Copy files until the agent has ended, reconnecting for ``reconnect_s`` after each lost connection."""
        reconnect_s = self._hosts.options.reconnect_s
        lost_since: float | None = None
        pause_s = 0.2
        while True:
            begun = time.monotonic()
            try:
                end = await self._stream.follow()
                return await self._read_exit(end)
            except UnreachableError as error:
                now = time.monotonic()
                if lost_since is None or now - begun > 2 * reconnect_s:
                    lost_since, pause_s = now, 0.2
                if now - lost_since > reconnect_s or (self._stop_by is not None and now > self._stop_by):
                    self._hosts.end_when_reachable(self._node)
                    why = f"unreachable for {now - lost_since:.0f} s: {error.what}"
                    return self._lost(f"{why}; processes still running there are ended once it can be reached")
            except HostError as error:
                return self._lost(error.what)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _read_exit(self, end: AgentEnd) -> NodeExit:
        node_dir = self._node.node_dir
        if end == "never":
            return self._lost("its node agent was never started")
        found = read_exit(node_dir) if end == "exit" else NO_EXIT_FILE
        if isinstance(found, NodeExit):
            return found
        num_ended = await self._clean_up()
        last = last_error(node_dir / AGENT_LOG)
        if end == "dead" and not (node_dir / IDENTITY_FILE).exists():
            return self._save(
                unreported_exit(self._node, "failed", f"node agent could not start{last}", self._started_at)
            )
        if num_ended:
            found += f"; {num_ended} processes that it left behind were killed"
        return self._lost(found + last)

    async def _clean_up(self) -> int:
        """End what a dead agent left behind on its host; returns the number of processes, 0 where it is unknown."""
        agent = self._hosts.agent(self._node)
        removal = self._hosts.sandbox(self._node).sandbox.removal(agent.name)
        sweep = ["env", f"PYTHONPATH={agent.environment['PYTHONPATH']}", self._hosts.python]
        sweep += ["-m", "accelmark.run.processes", str(self._remote)]
        done = await self._host.run(removal or sweep)
        await self._stream.follow()
        return int(done.out) if removal is None and done.code == 0 and done.out.strip().isdigit() else 0

    def _lost(self, reason: str) -> NodeExit:
        return self._save(unreported_exit(self._node, "lost", reason, self._started_at))

    def _save(self, end: NodeExit) -> NodeExit:
        save_exit(self._node.node_dir, end)
        return end
