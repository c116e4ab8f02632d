"""Explanations of failed SSH connections: missing or invalid files of this machine, against a real server."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from accelmark.run.host import HostError
from accelmark.run.launchers.ssh.connection import SshConnection
from accelmark.run.launchers.ssh.options import Options
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.plugins.launcher import options_of

asyncssh = pytest.importorskip("asyncssh")


@pytest.fixture(autouse=True)
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
    """Return what connecting to a server of this machine ends with."""

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
