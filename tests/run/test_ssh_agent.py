"""The agent of a job on a host over SSH, without a host."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from accelmark.run.host import UnreachableError
from accelmark.run.launchers.ssh.agent import SshAgent


def test_a_lost_connection_is_reported_once_and_so_is_its_return(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    stream: Any = SimpleNamespace(heard_at=time.monotonic(), num_follows=0)

    async def follow() -> str:
        stream.num_follows += 1
        if stream.num_follows < 4:
            raise UnreachableError("n2", "the connection was lost")
        for _ in range(2):
            stream.heard_at = time.monotonic()
            stream.answered()
        return "never"

    stream.follow = follow
    monkeypatch.setattr(SshAgent, "record", lambda _, state, reason: (state, reason))
    host: Any = SimpleNamespace(name="n2")
    unused: Any = None
    agent = SshAgent(
        unused, host, (), (), (), unused, stream=stream, reconnect_s=300, abandon=unused, report=reported.append
    )
    asyncio.run(agent.wait())
    assert reported == [
        "n2: the connection was lost; trying again for 5 m 00 s, its ranks may continue",
        "n2 answers again after 1 s",
    ]
