"""Where the time of the ranks of a case went, for its page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from accelmark.results.rounds.training import MAX_SHARE, describe
from accelmark.results.schema import RoundResult
from accelmark.spec.number_format import digits, limit_percent

MAX_ROWS: Final = 16


class RankTable(NamedTuple):
    """The slowest ranks of one round."""

    text: str
    """Which rank or host the others wait for, or that there is none."""
    is_slow: bool
    rows: list[tuple[int, str, list[str]]]
    """(rank, host, wait for data, own computation, wait for other ranks, step), times in ms; empty where not known."""
    num_ranks: int


def rank_table(rounds: Sequence[RoundResult]) -> RankTable | None:
    """Return the ranks of the round whose slowest rank cost most; None where no round has several ranks."""
    found = [(result.round, times) for result in rounds if (times := result.rank_times) is not None]
    if not found:
        reason = next((result.rank_times_unknown for result in rounds if result.rank_times_unknown), None)
        return None if reason is None else RankTable(f"The slowest rank is not known: {reason}.", False, [], 0)
    number, times = max(found, key=lambda one: one[1].straggler.share if one[1].straggler is not None else 0.0)
    where = f"Round {number}: " if len(rounds) > 1 else ""
    slow = times.straggler
    text = (
        describe(slow)
        if slow is not None
        else f"no rank costs the others more than {limit_percent(MAX_SHARE)} of a step"
    )
    text = where + (text if where else text[0].upper() + text[1:]) + "."
    slowest = sorted(times.ranks, key=lambda rank: rank.busy_ms, reverse=True)[:MAX_ROWS]
    rows = [
        (one.rank, one.host, [digits(ms) for ms in (one.data_wait_ms, one.own_ms, one.wait_ms, one.step_ms)])
        for one in slowest
    ]
    return RankTable(text, slow is not None, rows, len(times.ranks))
