"""Engines that compute several calls at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from accelmark.infer.failures import Context, InferenceError
from accelmark.infer.scenarios import RequestQueue
from accelmark.serving.loadgen.mlperf import Query
from accelmark.spec.log.events import Event
from accelmark.spec.settings.inference import InferSettings, InferStep

_TWO = """
    def __init__(self, request):
        super().__init__(request)
        self.concurrency = 2
        self.active = self.started = 0
        self.lock = threading.Lock()

    def __call__(self, inputs):
        with self.lock:
            self.active += 1
            self.started += 1
        {0}
        print("together", self.active, flush=True)
        with torch.inference_mode():
            found = super().__call__(inputs)
        with self.lock:
            self.active -= 1
        return found
"""
_LOADGEN = {"scenario_duration_s": 0.2, "scenario_queries": 20, "server_latency_bound_ms": 1000}


def _forward(ran: Any) -> list[Any]:
    return [each for each in ran.of(Event.FORWARD) if each.phase == "inference"]


def test_calls_overlap_and_fill_the_window(take: Any, acme: Any) -> None:
    ran = take(acme(_TWO.format("time.sleep(0.05)")))
    assert ran.finished.state == "completed", ran.finished.message
    assert "together 2" in (ran.node_dir / "engine.out.log").read_text()
    windows = _forward(ran)
    computed_ms = sum(window.computed_ms for window in windows)
    assert sum(sum(window.latency_ms) for window in windows) > computed_ms, (
        "latencies of calls at the same time overlap"
    )
    items = sum(sum(window.items) for window in windows)
    assert ran.finished.p_inference_core == pytest.approx(items / computed_ms * 1000)
    (answers,) = ran.of(Event.ANSWER_CHECK)
    assert answers.worst_error < 1e-5
    assert answers.num_items >= 100


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("openvino", marks=pytest.mark.heavy)])
def test_streams_answer_as_the_framework_does_also_under_load(take: Any, engine: str) -> None:
    pytest.importorskip(engine)
    ran = take(compiler=engine, threads=2, engine_options={"streams": 2}, scenarios=("offline", "server"), **_LOADGEN)
    assert ran.finished.state == "completed", ran.finished.message
    (compiled,) = [each for each in ran.of(Event.STAGE_END) if each.step is InferStep.COMPILE]
    assert compiled.details["concurrency"] == 2
    assert all(window.computed_ms is not None for window in _forward(ran))
    offline, server = ran.of(Event.SCENARIO)
    for result in (offline, server):
        assert result.accuracy_answers.num_items == 100
        assert result.accuracy_answers.worst_error < 1e-4
    assert offline.figure > 0


def test_an_exception_of_one_call_ends_the_run_with_its_reason(take: Any, acme: Any) -> None:
    fails = "if self.started > 14: raise RuntimeError('the device fell off the bus')"
    ran = take(acme(_TWO.format(fails), engine_timeout_s=60))
    assert (ran.finished.state, ran.finished.failed_step) == ("failed", InferStep.INFER)
    assert "acme_rt" in ran.finished.message
    assert "fell off the bus" in ran.finished.message


@dataclass(frozen=True)
class _Query:
    id: int
    index: int


class _Device:
    """Two slots; the call that ``fails`` counts raises when it is waited for, as do all after it."""

    concurrency = 2

    def __init__(self, fails: int | None = None) -> None:
        self.fails = fails
        self.started: SimpleQueue[tuple[int, list[int]]] = SimpleQueue()
        self.answers: dict[int, list[int]] = {}
        self.num_ended = 0
        self.calls: list[list[int]] = []

    def pick(self, indices: Sequence[int]) -> list[Tensor]:
        return [torch.tensor(indices)]

    def start(self, slot: int, indices: Sequence[int]) -> None:
        self.calls.append(list(indices))
        self.started.put((slot, list(indices)))

    def ended(self) -> int:
        slot, indices = self.started.get()
        self.num_ended += 1
        if self.num_ended == self.fails:
            raise RuntimeError("the device fell off the bus")
        self.answers[slot] = indices
        return slot

    def outputs_of(self, slot: int, num_items: int) -> list[Tensor]:
        return [torch.tensor(self.answers[slot])]


def _complete(
    device: _Device, num_queries: int, seen: list[tuple[list[int], list[int]]]
) -> tuple[RequestQueue, set[int]]:
    """Issue queries, wait for all, and return the queue and the ids that were completed."""
    found: set[int] = set()
    done = threading.Event()

    def complete(queries: Sequence[Query]) -> None:
        found.update(query.id for query in queries)
        if len(found) == num_queries:
            done.set()

    def look(indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
        seen.append((list(indices), outputs[0].tolist()))

    context = Context("scenario offline", "acme", 3, "cpu")
    engine: Any = device
    queue = RequestQueue(engine, look, batch_size=3, padded=False, context=context, overlapped=True)
    queue.complete = complete
    with queue:
        queue.issue([_Query(number, 100 + number) for number in range(num_queries)])
        assert done.wait(60)
    return queue, found


def test_overlapping_calls_complete_each_query_once_with_its_answers() -> None:
    seen: list[tuple[list[int], list[int]]] = []
    device = _Device()
    queue, found = _complete(device, 10, seen)
    queue.raise_failure()
    assert found == set(range(10))
    assert sorted(map(len, device.calls)) == [1, 3, 3, 3]
    assert sorted(index for indices, _ in seen for index in indices) == [100 + number for number in range(10)]
    assert all(indices == answers for indices, answers in seen)


def test_all_queries_are_completed_after_a_failure() -> None:
    seen: list[tuple[list[int], list[int]]] = []
    queue, found = _complete(_Device(fails=2), 30, seen)
    assert found == set(range(30))
    assert len(seen) == 1
    with pytest.raises(InferenceError, match=r"acme on cpu, scenario offline.*fell off the bus"):
        queue.raise_failure()


def test_what_the_engine_is_optimized_for_follows_from_the_scenarios() -> None:
    base = {"batch_size": 1, "compiler": "openvino"}
    assert InferSettings(**base).optimized_for == "throughput"
    assert InferSettings(**base, scenarios=("offline",)).optimized_for == "throughput"
    assert InferSettings(**base, scenarios=("offline", "single_stream")).optimized_for == "latency"
    assert InferSettings(**base, scenarios=("single_stream",), optimize_for="throughput").optimized_for == "throughput"
