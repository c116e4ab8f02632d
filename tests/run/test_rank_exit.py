"""How ranks, nodes and jobs are classified, and messages of the system with what to do about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelmark.run.agent.rank_exit import (
    LogEnd,
    Termination,
    cause_among,
    classify_job,
    classify_node,
    classify_rank,
    classify_ranks,
    explained,
    first_cause,
    read_log_end,
)
from accelmark.run.host import HostError
from accelmark.spec.job import NodeExit, RankExit
from accelmark.spec.log.perflog import encode_line
from accelmark.spec.plugins.catalog import load_framework
from accelmark.spec.plugins.framework import LaunchRecord

ASKED = Termination("cancelled", "cancelled", "was asked to end")


def log_end(state: str | None = "completed", cause: str | None = None) -> LogEnd:
    return LogEnd(("last line",), state, cause)


def rank(number: int, state: Any, reason: str | None = None, signal: str | None = None) -> RankExit:
    return RankExit(
        rank=number, local_rank=number, state=state, exit_code=1, reason=reason, signal=signal,
        lost_connection=reason is not None and "Broken pipe" in reason,
    )  # fmt: skip


def node(noderank: int, state: Any, reason: str | None, *ranks: RankExit) -> NodeExit:
    return NodeExit(
        host=f"h{noderank}", noderank=noderank, state=state, reason=reason, started_at="", duration_s=1.0, ranks=ranks
    )


@pytest.mark.parametrize(
    ("code", "log", "termination", "state"),
    [
        (0, log_end(), None, "succeeded"),
        (0, log_end(), ASKED, "succeeded"),
        (0, log_end(None), None, "failed"),
        (0, log_end("failed", "NaN"), None, "failed"),
        (1, log_end(), None, "failed"),
        (130, log_end("cancelled"), None, "cancelled"),
        (-9, log_end(None), None, "signaled"),
        (137, log_end(None), None, "signaled"),
        (-15, log_end(None), ASKED, "cancelled"),
        (None, log_end(None), None, "lost"),
    ],
)
def test_success_takes_an_exit_code_and_a_finished_event(
    code: int | None, log: LogEnd, termination: Termination | None, state: str
) -> None:
    found = classify_rank(0, 0, code, log, termination)
    assert found.state == state
    assert (found.reason is None) == (state == "succeeded")


def test_the_first_cause_is_the_rank_that_died_and_not_those_that_lost_it() -> None:
    echo = "RuntimeError: Broken pipe [127.0.0.1]:51095"
    ranks = [
        rank(0, "failed", echo),
        rank(1, "signaled", "killed", "SIGTERM"),
        rank(2, "signaled", "killed", "SIGKILL"),
    ]
    cause = first_cause(ranks)
    assert cause is not None
    assert cause.rank == 2
    assert classify_node(ranks, None) == ("failed", "rank 2: killed")


def test_errors_that_follow_another_ranks_end_are_those_of_every_framework_and_of_the_jobs_own() -> None:
    errors = load_framework("pytorch").connection_errors

    def is_lost(message: str) -> bool:
        return classify_rank(0, 0, 1, log_end(None, message), None, errors).lost_connection

    assert is_lost("RuntimeError: Connection closed by peer [127.0.0.1]:51095")
    assert is_lost("torch.distributed.DistNetworkError: recvBytes: no data")
    assert not is_lost("ValueError: no")
    assert not classify_rank(0, 0, 1, log_end(None, "DistNetworkError"), None).lost_connection


def test_the_first_cause_over_hosts_is_named_with_its_host() -> None:
    echo = node(0, "failed", "rank 0: Broken pipe", rank(0, "failed", "Broken pipe"))
    culprit = node(1, "failed", "rank 1: ValueError: no", rank(1, "failed", "ValueError: no"))
    bystander = node(2, "cancelled", "was asked to end", rank(2, "cancelled", "was asked to end"))
    assert classify_job([echo, culprit, bystander]) == ("failed", "h1: rank 1: ValueError: no")


def test_a_lost_host_makes_the_job_lost_though_others_were_then_ended() -> None:
    lost = node(1, "lost", "the node agent exited without writing exit.json")
    bystander = node(0, "cancelled", "was asked to end", rank(0, "cancelled", "was asked to end"))
    why = "h1: the node agent exited without writing exit.json"
    assert classify_job([lost, bystander]) == ("lost", why)
    left = node(0, "failed", "rank 0: Broken pipe", rank(0, "failed", "Broken pipe"))
    assert classify_job([left, lost]) == ("lost", why)
    assert classify_job([left, bystander])[0] == "failed"
    assert classify_job([node(0, "failed", "rank 0: ValueError", rank(0, "failed", "ValueError")), lost])[0] == "failed"


COMPLETED = log_end()
FAILED = log_end("failed", "the loss was not finite")
CANCELLED = log_end("cancelled", "ended by SIGTERM after step 4")
SILENT = log_end(None)


def states(codes: dict[int, int | None], logs: dict[int, LogEnd], signal: str | None = None) -> list[str]:
    record = LaunchRecord(exit_codes=codes, signal=signal)
    return [item.state for item in classify_ranks(logs, 1, record, None)]


def test_ranks_that_a_failed_rank_or_a_stopped_launcher_ended_are_cancelled() -> None:
    assert states({0: 1, 1: -9}, {0: FAILED, 1: SILENT}) == ["cancelled", "signaled"]
    assert states({0: 130, 1: 1}, {0: CANCELLED, 1: FAILED}) == ["cancelled", "failed"]
    assert states({0: -15, 1: 1}, {0: SILENT, 1: FAILED}) == ["cancelled", "failed"]
    assert states({0: None, 1: 1}, {0: COMPLETED, 1: FAILED}) == ["succeeded", "failed"]
    assert states({0: None, 1: None}, {0: CANCELLED, 1: SILENT}, "SIGTERM") == ["cancelled", "cancelled"]


def test_a_termination_by_the_agent_takes_precedence_over_the_record() -> None:
    record = LaunchRecord(exit_codes={0: None, 1: None}, signal="SIGTERM")
    stalled = Termination("stalled", "timed_out", "rank 1 wrote nothing for 5 s")
    found = classify_ranks({0: COMPLETED, 1: SILENT}, 130, record, stalled)
    assert [(item.state, item.reason) for item in found] == [("succeeded", None), ("stalled", stalled.reason)]


def test_the_launchers_exit_code_follows_those_of_its_ranks() -> None:
    assert LaunchRecord(exit_codes={0: 0}).exit_code() == 0
    assert LaunchRecord(exit_codes={0: 0, 1: 1, 2: 130}).exit_code() == 1
    assert LaunchRecord(exit_codes={0: 0, 2: 130}).exit_code() == 130
    assert LaunchRecord(exit_codes={0: None}, signal="SIGTERM").exit_code() == 130
    assert LaunchRecord(exit_codes={0: None}, problem="no port").exit_code() == 1


def test_finished_counts_as_the_last_event_only(tmp_path: Path) -> None:
    """A resumed rank appends to its log: the FINISHED of the process before does not count for it."""
    metadata = {"time_ms": 0, "mono_ms": 0, "rank": 0}
    finished = encode_line("FINISHED", {"state": "completed", "message": None}, metadata)
    log = tmp_path / "rank0.out.log"
    log.write_text(f"noise\n{finished}\nnoise\n")
    assert read_log_end(log).state == "completed"
    log.write_text(f"{finished}\n{encode_line('INIT_START', {}, metadata)}\n")
    assert read_log_end(log).state is None
    log.write_text("[PerfLog] {broken\n")
    assert read_log_end(log).state is None
    assert read_log_end(tmp_path / "absent").lines == ()


FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (FULL, "free space there"),
        ("touch: cannot touch 'x': Read-only file system", "mount it writable"),
        ("Memory cgroup out of memory: Killed process 7 (python)", "raise the limit"),
        ("rank 1: killed by SIGBUS", "shared memory"),
        ("slurmstepd-n1: error: *** STEP 5.0 ON n1 CANCELLED AT 2026-11-28 DUE TO PREEMPTION ***", "scontrol show job"),
        ("srun: was killed by SIGKILL", "ended the step"),
        ("Slurm job 5 was requeued by a user or by Slurm", "starts it again"),
        ("killed by SIGKILL", "out-of-memory killer"),
    ],
)
def test_what_to_do_about_a_cause_is_named_once(line: str, advice: str) -> None:
    told = explained(line)
    assert told.startswith(f"{line} (")
    assert advice in told
    assert explained(told) == told


def test_a_cause_in_a_log_comes_before_its_last_line() -> None:
    assert cause_among(["starting", FULL, "Killed"]) == FULL
    assert cause_among(["srun: error: n1: task 0: Killed", "*** STEP 1.0 ON n1 CANCELLED AT now ***"]) == (
        "*** STEP 1.0 ON n1 CANCELLED AT now ***"
    )
    assert cause_among(["ValueError: no", "killed by SIGKILL"]) is None


def test_an_error_of_a_host_has_the_advice_of_the_table_unless_it_has_its_own() -> None:
    assert "mount it writable" in HostError("n1", "files could not be written: Read-only file system").what
    assert HostError("n1", FULL, "do this").advice == "do this"
