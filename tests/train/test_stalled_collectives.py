"""A rank that never starts the collective that the others wait in is found by PyTorch's flight recorder."""

import time
from pathlib import Path

import psutil

from accelmark.run.agent.stall import diagnose
from accelmark.run.controller.execution import stall_cause
from accelmark.spec.job import NodeExit
from tests.run.fakes import wait_for
from tests.train.jobs import make_job, start
from tests.train.test_ranks import extern_of

HANGS = """
    def backward(self, loss, scaler):
        self.calls = getattr(self, "calls", 0) + 1
        if self.place.rank == 1 and self.calls == 6:
            import time
            print("hangs", flush=True)
            time.sleep(3600)
        super().backward(loss, scaler)
"""


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_the_rank_behind_in_collectives_is_named_with_its_last_one(tmp_path: Path) -> None:
    settings = {"end.max_steps": 100, "batch_size": 4, "log_every_steps": 1}
    began = time.monotonic()
    process, node_dir = start(make_job(tmp_path, settings, nproc=2, extern=extern_of(tmp_path, HANGS)), tmp_path)
    try:
        log = node_dir / "rank1.out.log"
        wait_for(lambda: process.poll() is not None or "hangs" in text_of(log), "rank 1 to hang")
        assert process.poll() is None, text_of(log)
        pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]

        def waits() -> bool:  # rank 0 comes to its exchange of gradients a little later
            ranks = diagnose(node_dir, pids, {0: 9.0, 1: 9.0}, began).ranks
            last = [{one.group: one.number for one in rank.collectives} for rank in ranks]
            return any(number > last[1].get(group, number) for group, number in last[0].items())

        wait_for(waits, "rank 0 to wait for rank 1")
        record = diagnose(node_dir, pids, {0: 9.0, 1: 9.0}, began)
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        output, _ = process.communicate(timeout=60)
    ended = NodeExit(
        host="n1",
        noderank=0,
        state="timed_out",
        reason="stalled",
        started_at="",
        duration_s=9.0,
        ranks=(),
        stall=record,
    )
    cause = stall_cause([ended]) or ""
    assert cause.startswith("rank 1 stopped first: its last collective in group "), f"{cause}\n{record}\n{output}"
    assert "gloo:all" in cause, cause
