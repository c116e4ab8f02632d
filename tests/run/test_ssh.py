"""Connections over SSH, against a real server of this machine: logins, errors, and connections that are lost."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncssh
import pytest

from accelmark.run.controller import execution
from accelmark.run.controller.execution import prepare
from accelmark.run.host import ConnectionLostError, HostError, UnreachableError
from accelmark.run.launchers.ssh import launcher as ssh
from accelmark.run.launchers.ssh.connection import SshConnection
from accelmark.run.launchers.ssh.launcher import create
from accelmark.run.launchers.ssh.options import Options
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.plugins.launcher import options_of
from tests.run.fakes import make_plan


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


def test_hosts_are_dialled_a_few_at_a_time(plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "LOGINS_AT_ONCE", 4)
    names = tuple(f"h{index}" for index in range(16))

    async def dial() -> None:
        key = asyncssh.generate_private_key("ssh-ed25519")
        (tmp_path / "known_hosts").write_text(f"* {key.export_public_key().decode()}")
        listening = asyncssh.listen("0.0.0.0", 0, server_host_keys=[key], server_factory=Server)  # noqa: S104
        async with await listening as server:
            addresses = [{"address": f"127.0.7.{index}", "label": name} for index, name in enumerate(names)]
            values = {"launcher": "ssh", "hosts": addresses, "user": "any", "ssh_port": server.get_port()}
            cluster = ClusterSpec.model_validate(values | {"known_hosts": tmp_path / "known_hosts"})
            launcher = create(make_plan((), hosts=names, cluster=cluster), tmp_path / "run")
            await asyncio.gather(*(launcher.host(host).connect() for host in cluster.hosts))
            await launcher.close()
            while Server.connected:
                await asyncio.sleep(0.01)

    Server.most = Server.total = 0
    asyncio.run(dial())
    assert (Server.most, Server.total) == (4, 16)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of one good key and files that are none; no agent."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    for name, passphrase in (("key", ""), ("locked", "secret")):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    (tmp_path / "noise").write_bytes(b"\xff\xfe nothing")
    (tmp_path / "known").touch()
    return tmp_path


def refusal(home: Path, **changed: str) -> str:
    async def connect() -> None:
        server = await asyncssh.create_server(
            asyncssh.SSHServer, "127.0.0.1", 0, server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")]
        )
        files = {name: str(home / file) for name, file in ({"key": "key", "known_hosts": "known"} | changed).items()}
        values = {"launcher": "ssh", "ssh_port": server.get_port(), "hosts": [{"address": "127.0.0.1", "label": "n1"}]}
        cluster = ClusterSpec.model_validate(values | files)
        async with server:
            await SshConnection(cluster.hosts[0], options_of(Options, cluster)).connect()

    with pytest.raises(HostError) as caught:
        asyncio.run(connect())
    return str(caught.value).replace(str(home), "HOME")


def test_an_unknown_host_key_is_reported(home: Path) -> None:
    advice = "verify the key, then add it: ssh-keyscan -p PORT ADDRESS >> HOME/known"
    said = re.sub("-p [0-9]+", "-p PORT", refusal(home))
    assert said == f"n1: unknown host key (Host key is not trusted): {advice}"


@pytest.mark.parametrize(("setting", "file"), [("key", "locked"), ("key", "gone"), ("known_hosts", "noise")])
def test_a_file_that_cannot_be_used_is_named(home: Path, setting: str, file: str) -> None:
    said = refusal(home, **{setting: file})
    assert said.startswith("n1: cannot be reached at 127.0.0.1 port ")
    assert f"{setting} HOME/{file}" in said


LOST = ConnectionLostError("h1", "the connection was lost")
ABSENT = UnreachableError("h1", "does not answer")


@pytest.mark.parametrize(
    ("errors", "reconnect_s", "expected"),
    [((LOST, ABSENT), 60.0, None), ((LOST, LOST), 0.0, UnreachableError), ((ABSENT,), 60.0, HostError)],
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
