"""The coordinator logs in to a few hosts at a time, and survives slow files, slow programs and lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncssh
import pytest

from accelmark.run.controller import execution
from accelmark.run.controller.execution import prepare
from accelmark.run.host import ConnectionLostError, HostError, UnreachableError
from accelmark.run.launchers.ssh import launcher as ssh
from accelmark.run.launchers.ssh.launcher import SshLauncher
from accelmark.spec.cluster import ClusterSpec
from tests.run.fakes import make_plan

CONTENT = b"what the host wrote\n"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server(asyncssh.SSHServer):
    """Lets everybody in, after a moment."""

    now = most = total = connected = 0

    def connection_made(self, _connection: asyncssh.SSHServerConnection) -> None:
        Server.connected += 1

    def connection_lost(self, _error: Exception | None) -> None:
        Server.connected -= 1

    async def begin_auth(self, username: str) -> bool:
        Server.now += 1
        Server.most, Server.total = max(Server.most, Server.now), Server.total + 1
        await asyncio.sleep(0.05)
        Server.now -= 1
        return False


async def end(process: asyncssh.SSHServerProcess[bytes]) -> None:
    """Say that the agent has ended and left a file, as the program on a host does."""
    await process.stdin.readline()
    process.stdout.write(json.dumps({"end": "dead", "sha256": {"agent.log": DIGEST}, "left": {}}).encode() + b"\n")
    process.exit(0)


@contextlib.asynccontextmanager
async def hosts(number: int, directory: Path) -> AsyncIterator[SshLauncher]:
    """The launcher of a plan for hosts that are one SSH server."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    (directory / "known_hosts").write_text(f"* {key.export_public_key().decode()}")
    server = await asyncssh.listen(
        "0.0.0.0", 0, server_host_keys=[key], server_factory=Server, process_factory=end, encoding=None,  # noqa: S104
    )  # fmt: skip
    names = tuple(f"h{index}" for index in range(number))
    addresses = [{"address": f"127.0.7.{index}", "label": name} for index, name in enumerate(names)]
    cluster = ClusterSpec.model_validate(
        {"launcher": "ssh", "hosts": addresses, "user": "any", "ssh_port": server.sockets[0].getsockname()[1],
         "known_hosts": directory / "known_hosts"}
    )  # fmt: skip
    launcher = SshLauncher(make_plan((), hosts=names, cluster=cluster), directory / "run")
    try:
        yield launcher
    finally:
        await launcher.close()
        server.close()
        await server.wait_closed()
        while Server.connected:
            await asyncio.sleep(0.01)


def test_hosts_are_dialled_a_few_at_a_time(plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "LOGINS_AT_ONCE", 4)

    async def dial() -> None:
        async with hosts(16, tmp_path) as launcher:
            await asyncio.gather(*(launcher.host(host).connect() for host in launcher.plan.cluster.hosts))

    Server.most = Server.total = 0
    asyncio.run(dial())
    assert (Server.most, Server.total) == (4, 16)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A named pipe, whose readers wait for :func:`loop_ran_before` to write, at most 20 s."""
    path = tmp_path / "local" / "agent.log"
    path.parent.mkdir()
    os.mkfifo(path)
    late = threading.Timer(20, path.write_bytes, [CONTENT])
    late.daemon = True
    late.start()
    yield path
    late.cancel()


async def loop_ran_before(pipe: Path, waiting: Coroutine[Any, Any, Any]) -> Any:
    """Return what ``waiting`` returns, which reads the pipe; only the event loop writes to it."""
    begin = time.monotonic()
    task = asyncio.create_task(waiting)
    await asyncio.sleep(0.2)
    assert time.monotonic() - begin < 15, "the event loop was blocked"
    assert not task.done()
    await asyncio.to_thread(pipe.write_bytes, CONTENT)
    return await asyncio.wait_for(task, 15)


LOST = ConnectionLostError("h1", "the connection was lost")
ABSENT = UnreachableError("h1", "does not answer")


@pytest.mark.parametrize(
    ("errors", "reconnect_s", "expected"),
    [
        ((LOST, ABSENT), 60.0, None),
        ((LOST, LOST), 0.0, UnreachableError),
        ((ABSENT,), 60.0, HostError),
    ],
)
def test_a_connection_that_is_lost_while_preparing_is_tried_again_within_reconnect_s(
    errors: tuple[HostError, ...], reconnect_s: float, expected: type[HostError] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, reports = list(errors), list[str]()

    async def fail_first() -> None:
        if left:
            raise left.pop(0)

    monkeypatch.setattr(execution, "_RETRY_S", 0.0)
    agent: Any = SimpleNamespace(prepare=fail_first)
    if expected is None:
        asyncio.run(prepare(agent, reconnect_s, reports.append))
        assert len(reports) == 2
        return
    with pytest.raises(HostError, match="h1") as raised:
        asyncio.run(prepare(agent, reconnect_s, reports.append))
    assert isinstance(raised.value, UnreachableError) == (expected is UnreachableError)
