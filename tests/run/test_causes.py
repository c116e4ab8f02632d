"""Messages of the system are found in logs, and what to do about them is named."""

from __future__ import annotations

import pytest

from accelmark.run.agent.rank_exit import LogEnd, cause_among, classify_rank, error_lines, explained
from accelmark.run.host import HostError

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


def test_an_engine_with_a_full_disk_is_not_reported_as_a_damaged_image() -> None:
    printed = (
        "Error: payload does not match any of the supported image formats:\n"
        " * oci: open /var/tmp/x/index.json: not a directory\n"
        " * docker-archive: writing blob: storing blob to file: write /var/tmp/x: no space left on device\n"
    )
    assert "no space left on device (the disk is full" in error_lines(printed)


def test_the_fault_handlers_line_does_not_replace_the_cause_of_a_signal() -> None:
    log = LogEnd((), None, "Fatal Python error: Bus error")
    reason = classify_rank(1, 1, -7, log, None).reason or ""
    assert reason.startswith("killed by SIGBUS (shared memory")
    log = LogEnd((), None, "terminate called after throwing an instance of 'std::bad_alloc'")
    assert classify_rank(1, 1, -6, log, None).reason == explained(f"killed by SIGABRT: {log.cause}")
