"""The benchmark of many hosts, with its simulated hosts."""

from __future__ import annotations

from benchmarks.fanout.simulated import measure


def test_simulated_hosts_are_checked_started_and_followed() -> None:
    (row,) = measure([2])
    assert row["phases"].keys() == {"preflight", "launch", "collection"}
    (row,) = measure([2], (1, 2))
    assert row["sent_bytes"] > row["new_bytes"] > 0
