from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from accelmark.spec.log.events import Event

_SHORT = {"scenario_duration_s": 0.3, "scenario_queries": 20, "repeat_check": False, "max_batches": 3}


def test_all_four_scenarios_run_through_loadgen_and_keep_its_logs(take: Any) -> None:
    ran = take(
        compiler="eager",
        scenarios=("offline", "single_stream", "multi_stream", "server"),
        server_latency_bound_ms=500,  # longer than a busy machine keeps a process waiting
        multi_stream_samples=4,
        **_SHORT,
    )
    assert ran.finished.state == "completed"
    results = {result.scenario: result for result in ran.of(Event.SCENARIO)}
    assert set(results) == {"offline", "single_stream", "multi_stream", "server"}
    for result in results.values():
        assert result.figure > 0
        assert result.functional
        assert list((ran.node_dir / result.log_dir).rglob("mlperf_log_summary.txt"))
        assert result.crossing_us > 0
        assert result.accuracy_answers.num_items >= 48
        assert result.accuracy_answers.worst_error < 1e-6
        assert result.performance_answers.worst_error < 1e-6
        assert result.performance_answers.num_not_compared > 0
    assert results["single_stream"].latencies_ms["p90"] == results["single_stream"].figure
    assert results["multi_stream"].valid, results["multi_stream"].reason
    assert results["server"].tried
    folders = sorted(each.name for each in (ran.node_dir / results["server"].log_dir).glob("try*"))
    assert len(folders) == len(results["server"].tried)
    assert folders[0].startswith("try01_qps_")
    held = [rate for rate, fine in results["server"].tried if fine]
    assert results["server"].figure == max(held)
    reported = ran.of(Event.HEARTBEAT)
    phases = list(dict.fromkeys(each.phase for each in reported))
    assert phases == ["scenario offline", "scenario single_stream", "scenario multi_stream", "scenario server"]
    assert reported[0].share == 0
    assert reported[0].eta_s > 4 * _SHORT["scenario_duration_s"]
    assert all(before.share <= after.share < 1 for before, after in pairwise(reported))
    assert reported[-1].num_requests > 100


def test_loadgens_own_reason_is_reported(take: Any) -> None:
    ran = take(
        compiler="eager",
        scenarios=("multi_stream",),
        multi_stream_queries=100,
        **_SHORT | {"scenario_duration_s": 0.001},
    )
    (result,) = ran.of(Event.SCENARIO)
    assert not result.valid
    assert "at least 662 queries for early stopping" in result.reason


def test_a_fixed_batch_engine_is_fed_full_batches(take: Any, acme: Any) -> None:
    methods = """
    fixed_batch = True
    def __call__(self, inputs):
        assert len(inputs[0]) in (16, 4), len(inputs[0])  # 4: the last batch of a pass
        return super().__call__(inputs)
    """
    ran = take(acme(methods, scenarios=("server",), server_latency_bound_ms=50, **_SHORT | {"max_batches": 7}))
    assert ran.finished.state == "completed", ran.finished.message
    (result,) = ran.of(Event.SCENARIO)
    assert result.accuracy_answers.worst_error < 1e-6


@pytest.mark.parametrize(("scenario", "at_once"), [("single_stream", 1), ("offline", 2)])
def test_an_engine_that_fails_under_load_ends_the_run_with_its_reason(
    take: Any, acme: Any, scenario: str, at_once: int
) -> None:
    methods = f"""
    calls = 0
    def __init__(self, request):
        super().__init__(request)
        self.concurrency = {at_once}
    def __call__(self, inputs):
        # An untimed call of one item precedes a scenario; in the measured passes a call has 16.
        self.calls += len(inputs[0]) == 1 or self.calls > 0
        if self.calls > 20:
            raise RuntimeError("the device fell off the bus")
        return super().__call__(inputs)
    """
    ran = take(acme(methods, scenarios=(scenario,), **_SHORT))
    assert ran.finished.state == "failed"
    assert "fell off the bus" in ran.finished.message
    assert ran.finished.p_inference_core > 0
