"""Jobs inside a process that outlives them: its own case, its own process group, its own say on when to end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from accelmark.frameworks.pytorch.backend import InProcess, PyTorchBackend
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.log.events import Evaluation, Event
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.ends import End
from accelmark.train.loop.process import StopRequest
from accelmark.train.loop.rank import RankOutcome, run_training
from accelmark.train.loop.window import RunTotals
from tests.train.jobs import Events, make_job
from tests.train.tiny.pytorch import Case

PAUSE_S = 0.2


class Heard(Events):
    """A log and a judge: ends training at the evaluation with this number, after a pause."""

    def __init__(self, ends_at: int | None = None) -> None:
        super().__init__()
        self.evaluations: list[Evaluation] = []
        self.ends_at = ends_at

    def evaluated(self, evaluation: Evaluation) -> End | None:
        self.evaluations.append(evaluation)
        if self.ends_at is None:
            return None
        time.sleep(PAUSE_S)
        return End("early_stop") if len(self.evaluations) == self.ends_at else None


def carried(job: JobSpec, heard: Heard, control: dist.ProcessGroup | None = None) -> RankOutcome:
    train = job.work
    assert isinstance(train, TrainJob)
    in_process = InProcess(Case, control)
    done = run_training(
        train,
        lambda: PyTorchBackend(job, train, RankPlace(), heard, in_process),
        heard,
        RunTotals(process_start=time.monotonic(), job=train),
        StopRequest(wanted=False),
        heard.evaluated,
    )
    assert done.backend is not None
    done.backend.close(together=done.in_step)
    return done


def test_an_early_stop_ends_training_at_an_evaluation_outside_any_window(tmp_path: Path) -> None:
    heard = Heard(ends_at=3)
    done = carried(make_job(tmp_path, {"end.max_steps": 50, "evaluate.every_steps": 4}), heard)
    assert (done.end.reason, done.end.completed, done.in_step, done.exit_code) == ("early_stop", True, True, 0)
    assert [evaluation.global_steps for evaluation in heard.evaluations] == [4, 8, 12]
    assert [window.global_steps for window in heard.values(Event.STEP_END)] == [4, 8, 12]
    for window in heard.values(Event.STEP_END):
        assert window.wall_ms < sum(window.step_ms) + sum(window.data_wait_ms) + PAUSE_S * 1000


def test_a_job_after_a_failed_one_uses_the_group_of_the_process_and_leaves_it_open(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    broken = carried(make_job(tmp_path, {"model.fault": "memory", "model.fault_at": 3}), Heard(), group)
    assert (broken.end.reason, broken.in_step, broken.exit_code) == ("out_of_memory", False, 1)
    heard = Heard()
    done = carried(make_job(tmp_path, {"end.max_steps": 9, "evaluate.every_steps": 4}), heard, group)
    assert done.end.reason == "max_steps"
    assert [evaluation.global_steps for evaluation in heard.evaluations] == [4, 8, 9]
    assert dist.is_initialized()
