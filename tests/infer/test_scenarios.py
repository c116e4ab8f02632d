from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelmark.infer.scenarios import highest
from accelmark.infer.scenarios.loadgen import read_log
from accelmark.spec.errors import RunError
from accelmark.spec.events import Event

_SHORT = {"scenario_duration_s": 0.3, "scenario_queries": 20, "repeat_check": False, "max_batches": 3}


def test_all_four_scenarios_run_through_loadgen_and_keep_its_logs(take: Any) -> None:
    ran = take(
        compiler="eager",
        scenarios=("offline", "single_stream", "multi_stream", "server"),
        server_latency_bound_ms=50,
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
    assert results["single_stream"].latencies_ms["p90"] == results["single_stream"].figure
    assert results["multi_stream"].valid, results["multi_stream"].reason
    assert results["server"].tried
    folders = sorted(each.name for each in (ran.node_dir / results["server"].log_dir).iterdir())
    assert len(folders) == len(results["server"].tried)
    assert folders[0].startswith("try01_qps_")
    held = [rate for rate, fine in results["server"].tried if fine]
    assert results["server"].figure == max(held)


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


def test_a_fixed_batch_engine_is_fed_full_batches(take: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int] = set()

    def watched(self: object, engine: Any, inputs: Any) -> Any:
        sizes.add(int(inputs[0].shape[0]))
        return engine(inputs)

    monkeypatch.setattr("accelmark.infer.engines.eager.Engine.fixed_batch", True)
    monkeypatch.setattr("accelmark.infer.case.InferCase.engine_forward", watched)
    take(compiler="eager", scenarios=("server",), server_latency_bound_ms=50, **_SHORT)
    assert sizes == {16}


def test_an_engine_that_fails_under_load_ends_the_run_with_its_reason(
    take: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def failing(self: object, engine: Any, inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise RuntimeError("the device fell off the bus")
        return engine(inputs)

    monkeypatch.setattr("accelmark.infer.case.InferCase.engine_forward", failing)
    ran = take(compiler="eager", scenarios=("single_stream",), **_SHORT)
    assert ran.finished.state == "failed"
    assert "fell off the bus" in ran.finished.message
    assert ran.finished.p_inference_core > 0


@pytest.mark.parametrize("limit", [3.0, 100.0, 777.0, 4000.0])
def test_the_search_finds_the_highest_rate_that_holds(limit: float) -> None:
    found = highest(lambda rate: rate <= limit, 1000.0)
    assert found is not None
    assert limit / 1.2 <= found <= limit


def test_the_search_says_when_no_rate_holds() -> None:
    assert highest(lambda rate: False, 1000.0) is None


def test_a_file_that_is_no_loadgen_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a log of LoadGen"):
        read_log(tmp_path / "mlperf_log_detail.txt")
    (tmp_path / "mlperf_log_detail.txt").write_text(':::MLLOG {"key": "x", "value": 1}\n')
    with pytest.raises(RunError, match="no result from LoadGen"):
        read_log(tmp_path / "mlperf_log_detail.txt")
