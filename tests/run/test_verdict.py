"""How ends are judged: pure functions."""

from __future__ import annotations

from typing import Any

import pytest

from accelmark.run.agent.rank_output import LastWords
from accelmark.run.agent.verdict import Ending, first_cause, judge_job, judge_node, judge_rank
from accelmark.spec.job import NodeExit, RankExit

ASKED = Ending("cancelled", "cancelled", "was asked to end")


def words(state: str | None = "completed", cause: str | None = None) -> LastWords:
    return LastWords(("last line",), {"state": state} if state else None, cause)


def rank(number: int, state: Any, reason: str | None = None, signal: str | None = None) -> RankExit:
    return RankExit(rank=number, local_rank=number, state=state, exit_code=1, reason=reason, signal=signal)


def node(noderank: int, state: Any, reason: str | None, *ranks: RankExit) -> NodeExit:
    return NodeExit(
        host=f"h{noderank}", noderank=noderank, state=state, reason=reason, started_at="", duration_s=1.0, ranks=ranks
    )


@pytest.mark.parametrize(
    ("code", "said", "ending", "state"),
    [
        (0, words(), None, "succeeded"),
        (0, words(), ASKED, "succeeded"),
        (0, words(None), None, "failed"),
        (0, words("failed", "NaN"), None, "failed"),
        (1, words(), None, "failed"),
        (130, words("cancelled"), None, "cancelled"),
        (-9, words(None), None, "signaled"),
        (137, words(None), None, "signaled"),
        (-15, words(None), ASKED, "cancelled"),
        (None, words(None), None, "lost"),
    ],
)
def test_success_takes_both_an_exit_code_and_a_word(
    code: int | None, said: LastWords, ending: Ending | None, state: str
) -> None:
    found = judge_rank(0, 0, code, said, ending)
    assert found.state == state
    assert (found.reason is None) == (state == "succeeded")


def test_the_first_cause_is_the_rank_that_died_and_not_those_that_lost_it() -> None:
    echo = "RuntimeError: Connection closed by peer [127.0.0.1]:51095"
    ranks = [
        rank(0, "failed", echo),
        rank(1, "signaled", "killed", "SIGTERM"),
        rank(2, "signaled", "killed", "SIGKILL"),
    ]
    cause = first_cause(ranks)
    assert cause is not None
    assert cause.rank == 2
    assert judge_node(ranks, None) == ("failed", "rank 2: killed")


def test_the_first_cause_over_hosts_is_named_with_its_host() -> None:
    echo = node(0, "failed", "rank 0: Broken pipe", rank(0, "failed", "Broken pipe"))
    culprit = node(1, "failed", "rank 1: ValueError: no", rank(1, "failed", "ValueError: no"))
    bystander = node(2, "cancelled", "was asked to end", rank(2, "cancelled", "was asked to end"))
    assert judge_job([echo, culprit, bystander], order=[0, 1, 2]) == ("failed", "h1: rank 1: ValueError: no")


def test_a_lost_host_makes_the_job_lost_though_others_were_then_ended() -> None:
    lost = node(1, "lost", "node agent exited without writing exit.json")
    bystander = node(0, "cancelled", "was asked to end", rank(0, "cancelled", "was asked to end"))
    assert judge_job([bystander, lost], order=[1, 0]) == ("lost", "h1: node agent exited without writing exit.json")
