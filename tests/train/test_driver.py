"""The training loop: its steps, ends, and windows on a device that works behind the host's back."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from accelmark.frameworks.pytorch.training.platform import device_losses
from accelmark.spec.log.events import Finished, StepWindow
from accelmark.spec.plugins.case import Target
from accelmark.train.loop.contract import HOST_LOSSES, DeviceClock, HostClock
from accelmark.train.loop.ends import Agreement, Vote
from accelmark.train.loop.window import GarbagePauses, Window, covered
from tests.train.conftest import RunHere, Train
from tests.train.jobs import make_job

UNREACHABLE = Target(metric="accuracy", direction="at_least", value=2.0, why="made up for a test")


def test_windows_written_together_keep_the_times_of_their_closing_also_before_a_failure(train: Train) -> None:
    ran = train({"log_every_steps": 1, "model.sleep_ms": 3, "model.fault": "error", "model.fault_at": 10})
    assert ran.finished().state == "failed"
    assert [value["global_steps"] for value in ran.values("STEP_END")] == list(range(1, 10))
    closed = [item["metadata"]["mono_ms"] for item in ran.events() if item["event"] == "STEP_END"]
    assert all(later - earlier >= 3 for earlier, later in pairwise(closed))


def test_every_rank_reports_its_phases_from_start_to_finish(train: Train) -> None:
    ran = train({"evaluate.every_steps": 6})
    seen = list(dict.fromkeys([item["event"] for item in ran.events()]))
    assert seen == [
        "LAUNCH_TRAINING", "CONVERT_MODEL", "MODEL_TO_FP16", "MODEL_TO_DDP", "CREATE_OPTIMIZER", "INIT_EVALUATION",
        "INIT_END", "TRAIN_START", "EPOCH_BEGIN", "STEP_END", "EVALUATE", "EPOCH_END", "TRAIN_END", "FINISHED",
    ]  # fmt: skip
    assert ran.exit_code == 0
    assert set(ran.values("FINISHED")[0]) == set(Finished.model_fields)


def test_windows_hold_every_step_once(train: Train) -> None:
    ran = train({"evaluate.every_steps": 7, "log_every_steps": 5})
    windows = [StepWindow.model_validate(value) for value in ran.values("STEP_END")]
    assert [window.global_steps for window in windows] == [5, 7, 12]
    for window in windows:
        assert len(window.losses) == len(window.step_ms) == len(window.data_wait_ms)
        assert sum(window.step_ms) + sum(window.data_wait_ms) <= window.wall_ms
    assert sum(len(window.losses) for window in windows) == 12
    assert [window.num_trained_samples for window in windows] == [80, 112, 192]
    finished = ran.finished()
    assert finished.pure_training_computing_time == pytest.approx(
        sum(sum(window.step_ms) for window in windows) / 1000, abs=1e-6
    )
    assert finished.pure_training_computing_time <= finished.train_no_eval_time <= finished.raw_train_time
    assert finished.init_time + finished.raw_train_time <= finished.e2e_time


@pytest.mark.parametrize(
    ("settings", "reason", "steps"),
    [
        ({"end.max_steps": 7}, "max_steps", 7),
        ({"end.max_steps": ..., "end.max_samples": 100}, "max_samples", 7),
        ({"end.max_steps": ..., "end.max_epochs": 2, "model.samples": 64}, "max_epochs", 8),
        ({"end.max_steps": 50, "end.at_target": True, "evaluate.every_steps": 5}, "target", 5),
        ({"end.max_steps": 9, "end.max_epochs": 2, "model.samples": 64}, "max_epochs", 8),
    ],
)
def test_training_ends_at_the_bound_that_comes_first(
    train: Train, settings: dict[str, Any], reason: str, steps: int
) -> None:
    ran = train(settings)
    finished = ran.finished()
    assert (finished.state, finished.end_reason, finished.global_steps) == ("completed", reason, steps)
    assert len(ran.losses()) == steps


def test_training_ends_when_its_time_is_up(train: Train) -> None:
    settings = {"end.max_steps": ..., "end.max_duration_s": 0.3, "model.sleep_ms": 10, "log_every_steps": 1000}
    finished = train(settings).finished()
    assert (finished.state, finished.end_reason) == ("completed", "max_duration")
    assert (finished.raw_train_time >= 0.3, finished.global_steps <= 30) == (True, True)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"evaluate.every_steps": 5}, [5, 10, 12]),
        ({"evaluate.every_steps": 6}, [6, 12]),
        ({"evaluate.every_epochs": 2, "model.samples": 64, "end.max_steps": ..., "end.max_epochs": 5}, [8, 16, 20]),
    ],
)
def test_evaluation_sees_every_sample_once_and_the_model_at_the_end(
    train: Train, settings: dict[str, Any], steps: list[int]
) -> None:
    ran = train(settings)
    evaluations = ran.values("EVALUATE")
    assert [value["global_steps"] for value in evaluations] == steps
    assert {value["metrics"]["count"] for value in evaluations} == {101.0}
    assert ran.finished().final_metrics == evaluations[-1]["metrics"]
    epochs = [value["epoch"] for value in ran.values("EPOCH_BEGIN")]
    assert epochs == list(range(5 if "end.max_epochs" in settings else 1))


def test_convergence_is_distinguished_from_completion(train: Train) -> None:
    assert train().finished().converged is True
    assert train(target=UNREACHABLE).finished().converged is False
    assert train(target=None).finished().converged is None
    synthetic = train({"loader.synthetic": True, "evaluate.every_steps": 2})
    assert synthetic.values("EVALUATE") == []
    assert (synthetic.finished().converged, synthetic.finished().global_steps) == (None, 12)


@pytest.mark.parametrize(
    ("settings", "target", "code", "message"),
    [
        ({}, Target(metric="acuracy", direction="at_least", value=0.5, why="misspelt"), 1, "'accuracy'"),
        ({"model.samples": 10}, UNREACHABLE, 1, "lower batch_size"),
        (
            {"end.max_steps": ..., "end.max_duration_s": 0.3, "schedule.name": "cosine"},
            UNREACHABLE,
            2,
            "schedule.cosine",
        ),
    ],
    ids=["metric", "data", "schedule"],
)
def test_a_job_that_cannot_train_ends_with_the_reason(
    train: Train, settings: dict[str, Any], target: Target, code: int, message: str
) -> None:
    ran = train(settings, target=target)
    assert ran.exit_code == code
    assert message in (ran.finished().message or "")


def test_a_non_finite_loss_ends_training_in_its_own_step(train: Train) -> None:
    ran = train({"model.fault": "nan", "model.fault_at": 6, "log_every_steps": 100, "end.max_steps": 200})
    finished = ran.finished()
    assert (ran.exit_code, finished.state, finished.end_reason) == (1, "failed", "nonfinite_loss")
    assert (finished.global_steps, finished.last_finite_loss_step, finished.final_loss) == (6, 5, None)
    assert "not finite at step 6" in (finished.message or "")
    window = ran.values("STEP_END")[-1]
    assert window["losses"][-1] is None
    assert window["nonfinite"] == ["loss", "losses"]
    assert ran.values("EVALUATE") == []


def test_out_of_memory_names_what_to_change(train: Train) -> None:
    ran = train({"model.fault": "memory", "model.fault_at": 2})
    finished = ran.finished()
    assert (ran.exit_code, finished.state, finished.end_reason) == (1, "failed", "out_of_memory")
    for word in ("batch_size 16", "precision fp32", "cpu", "gradient_accumulation_steps", "activation_checkpointing"):
        assert word in (finished.message or "")


def test_a_missing_device_is_reported(tmp_path: Path, run_here: RunHere) -> None:
    ran = run_here(make_job(tmp_path).model_copy(update={"device_type": "npu", "vendor": "acme"}))
    assert ran.exit_code == 2
    assert "vendor 'acme' needs a 'npu' device" in (ran.finished().message or "")


def test_accumulated_batches_train_as_one_large_batch(train: Train) -> None:
    large = train({"batch_size": 32}).losses()
    small = train({"batch_size": 8, "gradient_accumulation_steps": 4})
    assert small.losses() == pytest.approx(large, rel=1e-5)
    assert small.finished().num_trained_samples == 12 * 32


def test_operations_are_counted_as_the_formula_says(train: Train) -> None:
    finished = train({"end.max_steps": 1}).finished()
    assert finished.flops_per_sample == finished.flops_per_sample_formula == 6 * (8 * 16 + 2 * 256 + 64) - 2 * 128


def test_a_seed_repeats_a_run_and_another_differs(train: Train) -> None:
    first, again, other = (train({"model.dropout": 0.3, "seed": seed}) for seed in (1, 1, 2))
    assert first.losses() == again.losses() != other.losses()
    hashes = [ran.values("INIT_END")[0]["checkpoint_hash"] for ran in (first, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert len({ran.values("INIT_END")[0]["parameter_hash"] for ran in (first, other)}) == 1


def test_the_learning_rate_of_a_window_is_that_of_its_last_step(train: Train) -> None:
    settings = {"schedule.name": "linear", "schedule.warmup_steps": 4, "log_every_steps": 1}
    rates = [value["learning_rate"] for value in train(settings).values("STEP_END")]
    rise, fall = [0.0125, 0.025, 0.0375, 0.05], [0.05 * (1 - step / 8) for step in range(8)]
    assert rates == pytest.approx(rise + fall)


def test_clipped_gradients_move_weights_less(train: Train) -> None:
    free = train().losses()
    clipped = train({"gradient_clip_norm": 0.01}).losses()
    assert clipped[0] == free[0]
    assert (clipped[-1] or 0) > (free[-1] or math.inf) + 0.5


class Ranks:
    """Joins the votes of ranks that are polled one after the other, as an all-reduce would."""

    def __init__(self, count: int, most_steps: int = 20) -> None:
        self.posted: dict[int, list[list[float]]] = {}
        self.calls = [0] * count
        self.agreements = [Agreement(self._exchange(rank), most_steps) for rank in range(count)]

    def _exchange(self, rank: int) -> Callable[[list[float]], Callable[[], list[float]]]:
        def exchange(values: list[float]) -> Callable[[], list[float]]:
            call = self.calls[rank]
            self.calls[rank] += 1
            self.posted.setdefault(call, []).append(values)
            return lambda: [max(column) for column in zip(*self.posted[call], strict=True)]

        return exchange

    def poll(self, step: int, votes: list[Vote]) -> list[Vote | None]:
        return [agreement.poll(step, vote) for agreement, vote in zip(self.agreements, votes, strict=True)]


def test_all_ranks_get_the_same_answer_at_the_next_poll() -> None:
    ranks = Ranks(3)
    quiet = Vote(step_s=0.2)
    assert ranks.poll(1, [quiet, Vote(cancelled=True, step_s=0.4), quiet]) == [None] * 3
    assert ranks.poll(2, [quiet] * 3) == [Vote(cancelled=True, step_s=0.4)] * 3
    assert {agreement.next_step for agreement in ranks.agreements} == {2 + 2}


def test_traced_steps_cost_at_most_a_200th_of_the_time_on_the_slowest_rank() -> None:
    ranks = Ranks(2)
    votes = [Vote(step_s=0.1, trace_s=0.01), Vote(step_s=0.1, trace_s=0.02)]
    ranks.poll(1, votes)
    joint, same = ranks.poll(2, votes)
    assert joint is not None
    assert joint == same
    assert [joint.allows_trace(steps, 0) for steps in (4, 39, 40, 79)] == [False, False, True, True]
    assert [joint.allows_trace(steps, 1) for steps in (40, 79, 80)] == [False, False, True]
    assert not Vote(step_s=0.1, trace_s=float("inf")).allows_trace(10**9, 0), "its traces say nothing"


FIELDS: dict[str, Any] = {
    "global_steps": 2, "epoch": 0, "num_trained_samples": 8, "learning_rate": 0.1, "wall_ms": 10.0, "cpu_ms": 10.0,
}  # fmt: skip


@dataclass
class FakeDevice:
    """The time of a device, and how often somebody waited for it."""

    time_ms: float = 0.0
    waits: int = 0


@dataclass
class FakeEvent:
    device: FakeDevice
    at_ms: float = math.nan

    def record(self) -> None:
        self.device.time_ms += 1.5
        self.at_ms = self.device.time_ms

    def synchronize(self) -> None:
        self.device.waits += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_collecting_and_closing_never_wait_for_the_device() -> None:
    device = FakeDevice()
    clock = DeviceClock(partial(FakeEvent, device))
    window = Window(clock, device_losses(clock, pinned=False))
    for loss in (0.5, 0.25):
        window.add(clock.mark(), None, clock.mark(), 2_000_000, torch.tensor(loss))
    closed = window.close(0, **FIELDS)
    assert device.waits == 0
    assert len(window) == 0
    read = window.read(closed)
    assert device.waits > 0
    assert read.losses == (0.5, 0.25)
    assert read.step_ms == (1.5, 1.5)
    assert read.data_wait_ms == (2.0, 2.0)


def test_losses_that_each_step_writes_to_the_same_memory_are_read_as_they_were() -> None:
    clock, memory = DeviceClock(partial(FakeEvent, FakeDevice())), torch.zeros(())
    window = Window(clock, device_losses(clock, pinned=False, overwritten=True))
    for loss in (0.5, 0.25):
        memory.fill_(loss)  # as a replayed CUDA graph does
        window.add(clock.mark(), None, clock.mark(), 0, memory.detach())
    assert window.read(window.close(0, **FIELDS)).losses == (0.5, 0.25)


def test_losses_on_the_host_are_available_in_their_own_step() -> None:
    window = Window(HostClock(), HOST_LOSSES)
    assert window.add(0, None, 1_000_000, 0, torch.tensor(float("nan"))) != 0
    assert window.last_is_nonfinite()
    read = window.read(window.close(0, **FIELDS))
    assert read.step_ms == (1.0,)
    assert read.losses[0] is not None
    assert math.isnan(read.losses[0])


def test_the_own_part_of_a_step_is_what_no_exchange_covers() -> None:
    assert covered([(1.0, 3.0), (2.0, 4.0), (6.0, 7.0), (6.2, 6.5)]) == 4.0
    window = Window(HostClock(), HOST_LOSSES)
    ms = 1_000_000
    window.add(0, [(2 * ms, 4 * ms), (3 * ms, 5 * ms)], 10 * ms, 0, torch.tensor(1.0))
    assert window.read(window.close(0, **FIELDS)).own_ms == (7.0,)


def test_garbage_collections_are_measured_and_scan_nothing_that_training_found() -> None:
    pauses = GarbagePauses()
    pauses.start()
    try:
        assert gc.get_freeze_count() > 0
        pauses.collect()
        cycle: list[object] = []
        cycle.append(cycle)
        gc.collect()
        assert pauses.collect() > 0
    finally:
        pauses.stop()
    assert gc.get_freeze_count() == 0
