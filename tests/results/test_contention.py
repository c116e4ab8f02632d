"""Work of others that comes while a round runs shows in the time that a rank's threads waited for a core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelmark.results.read.round_dir import NodeDir
from accelmark.results.rounds.hosts import contention_findings, disturbances
from accelmark.spec.job import NodeExit
from accelmark.spec.log.inference import InferFinished
from accelmark.train.loop.process import CpuWait


def ended(core_wait_s: float | None) -> InferFinished:
    """The FINISHED event of a rank that took 100 s."""
    return InferFinished(
        state="completed", end_reason="completed", vendor="cpu", compiler=None, precision="fp32", batch_size=1,
        flops=None, e2e_time=100.0, p_validation_whole=None, p_validation_core=None, p_inference_whole=None,
        p_inference_core=None, val_average_acc=None, infer_average_acc=None, compile_time=None, valid=True,
        invalid_reasons=(), core_wait_s=core_wait_s,
    )  # fmt: skip


def test_a_rank_that_waited_for_a_core_is_found_with_its_share() -> None:
    (found,) = contention_findings((), {0: ended(0.4), 1: ended(31.0), 2: None})
    assert (found.severity, found.rule) == ("warning", "cpu-contention")
    assert (
        found.actual == "rank 1 waited for CPU cores 31\u202f% of the time (limit 2\u202f%): "
        "other work may have used them. Use an idle host."
    )
    assert disturbances([found]) == [found.actual.removesuffix(". Use an idle host.")]


@pytest.mark.parametrize(
    ("others_cpu_s", "rule", "told"),
    [
        (20.0, "cpu-contention", "other work used up to 20.0 s of CPU time"),
        (2.0, "oversubscribed", "more threads than cores"),
    ],
)
def test_other_work_is_reported_only_if_it_used_enough_cpu_time(
    tmp_path: Path, others_cpu_s: float, rule: str, told: str
) -> None:
    end = NodeExit(
        host="n1", noderank=0, state="succeeded", reason=None, started_at="", duration_s=100.0, ranks=(),
        others_cpu_s=others_cpu_s,
    )  # fmt: skip
    (found,) = contention_findings([NodeDir(tmp_path, "n1", 0, end, None)], {0: ended(31.0)})
    assert found.rule == rule
    assert told in found.actual
    assert bool(disturbances([found])) == (rule == "cpu-contention")


def test_short_and_unknown_waits_give_no_finding(tmp_path: Path) -> None:
    assert list(contention_findings((), {0: ended(0.4), 1: ended(None)})) == []
    assert CpuWait(tmp_path / "none").longest_s() is None


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waits")
def test_cpu_contention_on_the_same_core_is_measured_as_waiting() -> None:
    """A process that shares its core with two others waits for two thirds of the time."""
    core = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    asked = (
        f"import os, time; os.sched_setaffinity(0, {{{core}}})\n"
        "from accelmark.train.loop.process import CpuWait\n"
        "wait, began = CpuWait(), time.monotonic()\n"
        "while time.monotonic() - began < 1.5: pass\n"
        "print(wait.longest_s())"
    )
    others = [subprocess.Popen([sys.executable, "-c", busy], start_new_session=False) for _ in range(2)]
    try:
        told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert float(told) > 0.5
