"""The log of libraries: asyncssh writes a line for every channel of every command, unless only warnings are kept."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from accelmark.run.controller.coordinator import library_log

asyncssh = pytest.importorskip("asyncssh")
COMMANDS = 20


async def commands() -> None:
    """Run commands over one real connection."""

    class Server(asyncssh.SSHServer):  # type: ignore[misc,name-defined]
        def begin_auth(self, username: str) -> bool:
            return False

    def answer(process: Any) -> None:
        process.exit(0)

    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.create_server(Server, "127.0.0.1", 0, server_host_keys=[key], process_factory=answer)
    port = server.sockets[0].getsockname()[1]
    async with asyncssh.connect("127.0.0.1", port, known_hosts=None, username="x", client_keys=None) as connection:
        for _ in range(COMMANDS):
            await connection.run("true")
    server.close()


@pytest.mark.parametrize(("level", "lines"), [("info", 0), ("debug", COMMANDS)])
def test_commands_over_ssh_are_logged_only_where_that_was_asked_for(level: str, lines: int, tmp_path: Path) -> None:
    log = tmp_path / "coordinator.log"
    with library_log(log, level):
        asyncio.run(commands())
        logging.getLogger("asyncssh").warning("a warning")
    written = log.read_text().splitlines()
    assert written[-1].endswith("WARNING asyncssh: a warning")
    assert len(written) - 1 >= lines
    assert len(written) == 1 or lines
