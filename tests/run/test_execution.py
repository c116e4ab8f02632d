"""Preparing a host whose connection is lost meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from accelmark.run.controller import execution
from accelmark.run.controller.execution import prepare
from accelmark.run.host import ConnectionLostError, HostError, UnreachableError

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
