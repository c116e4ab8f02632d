"""Figures of serving from records of a simulated queue, and from records that the real client wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelmark.results.figures import FigureName as F
from accelmark.results.rounds import load
from accelmark.results.rounds.load import SteadyWindow, read_requests
from accelmark.results.rounds.summary import round_result
from accelmark.results.schema import RoundResult, ServingStage
from accelmark.spec.log.inference import LoadStage, RequestRecord, ServeFinished
from accelmark.spec.settings.serving import ServeSettings
from tests.served_run import ROUND, Queue, Served, Stage, make_served_run

STEADY = Queue(slots=4, service_s=lambda noise: 0.2, prefill_share=0.25, tokens=16)
"""Every request takes 0.2 s in its slot: TTFT 50 ms, TPOT 10 ms."""


def record(number: int, due: float, first: float, end: float, **changed: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "stage": 0, "number": number, "prompt": number, "due_s": due, "sent_s": due, "first_s": first, "end_s": end,
        "gaps_us": (), "status": "ok", "requested_tokens": 5, "output_tokens": 5, "input_tokens": 10,
    }  # fmt: skip
    return RequestRecord.model_validate(values | changed)


def stage_of(
    tmp_path: Path, records: list[RequestRecord], concurrency: int | None = None, **settings: Any
) -> ServingStage:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(each.model_dump_json() + "\n" for each in records))
    requests, report = read_requests(path)
    assert report.malformed == 0
    ended = LoadStage(
        stage=0, arrival="closed" if concurrency else "poisson", concurrency=concurrency, rate=None,
        begin_mono_s=0.0, duration_s=10.0, num_requests=len(records), lag_p50_ms=None, lag_p99_ms=None,
        client_cpu_share=0.0,
    )  # fmt: skip
    return load.measured_stage(requests, ended, ServeSettings.model_validate(settings), 2, None)


def result(tmp_path: Path, served: Served) -> RoundResult:
    return round_result(make_served_run(tmp_path / "run", served) / ROUND)


def test_malformed_lines_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    good = record(0, 0.0, 0.1, 0.2, gaps_us=(10, 20)).model_dump_json()
    path.write_text(f'{good}\n{{"stage": 0}}\n{good[:-20]}\n{good.replace("due_s", "dew_s")}\n{good}\n')
    requests, report = read_requests(path)
    assert len(requests) == 2
    assert requests.gaps_us.tolist() == [10, 20, 10, 20]
    assert report.malformed == 3
    assert report.first_problem.startswith("line 2: number: is missing")


def test_latencies_count_from_when_a_request_was_due(tmp_path: Path) -> None:
    records = [
        record(number, number * 1.0, number + 0.5, number + 0.9, sent_s=number + 0.2, gaps_us=(100_000,) * 4)
        for number in range(11)
    ]
    stage = stage_of(tmp_path, records)
    medians = {name: found.at("p50") for name, found in stage.latencies.items()}
    assert medians == pytest.approx(
        {"ttft": 500, "sent_to_first": 300, "queued": 200, "itl": 100, "tpot": 100, "e2e": 900, "server_queue": None}
    )
    assert stage.latencies["server_queue"].quantiles["p50"].reason == "the server does not state it"
    stated = [record(number, number, number + 0.5, number + 0.9, queue_s=0.1 * number) for number in range(5)]
    assert stage_of(tmp_path, stated).latencies["server_queue"].count == 4, "the last request is after the window"
    timeline = load.timeline_of(read_requests(tmp_path / "requests.jsonl")[0])
    assert [each.queue_s for each in timeline] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_tokens_count_when_their_output_arrived_and_rates_are_over_the_window(tmp_path: Path) -> None:
    # 5 tokens in 2 outputs each; the window is [0, 2). The last output of the second request is after it.
    records = [
        record(0, 0.0, 0.5, 1.0, gaps_us=(500_000,)),
        record(1, 1.0, 1.5, 2.5, gaps_us=(1_000_000,)),
        record(2, 2.0, 2.5, 3.0, gaps_us=(500_000,)),
    ]
    stage = stage_of(tmp_path, records)
    assert stage.window_s == (0.0, 2.0)
    assert stage.num_measured == 2
    assert stage.output_token_rate == pytest.approx(7.5 / 2)
    assert stage.total_token_rate == pytest.approx((7.5 + 20) / 2)
    assert stage.token_rate_per_device == pytest.approx(7.5 / 4)
    assert stage.request_rate == pytest.approx(0.5)
    assert stage.tokens_per_output == pytest.approx(2.5)
    assert stage.mean_concurrency == pytest.approx((1.0 + 1.0) / 2)


def test_the_window_of_a_closed_load_has_neither_ramp_up_nor_drain(tmp_path: Path) -> None:
    times = [(0.0, 2.0), (0.5, 2.5), (1.0, 3.0), (2.0, 4.0), (2.5, 4.5)]
    stage_of(tmp_path, [record(number, due, due + 0.1, end) for number, (due, end) in enumerate(times)])
    requests, _ = read_requests(tmp_path / "requests.jsonl")
    assert load.steady_window(requests, 3) == SteadyWindow(1.0, 2.5)
    assert "never reached: at most 3" in str(load.steady_window(requests, 4))
    assert load.steady_window(requests, None) == SteadyWindow(0.0, 2.5)


def test_a_percentile_without_enough_samples_is_null_with_its_reason(tmp_path: Path) -> None:
    values = np.arange(1.0, 101.0)
    found = load.distribution(values, np.zeros(100, dtype=np.int64), "").quantiles
    assert found["p99"].value == 99
    assert found["p99"].high is None, "100 samples have no upper limit of the 99th percentile"
    assert found["p50"].low == 40
    assert found["p50"].high == 61
    assert found["p99.9"].value is None
    assert found["p99.9"].reason == "needs 1,000 samples, 100 were measured"


@pytest.mark.parametrize(("count", "share"), [(100, 0.5), (500, 0.9), (900, 0.99), (50, 0.1)])
def test_the_ranks_around_a_percentile_have_the_binomial_probability_of_95_percent(count: int, share: float) -> None:
    low, high = load.interval_ranks(count, share)
    chances = [math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)]
    assert sum(chances[:low]) <= 0.025 < sum(chances[: low + 1])
    assert sum(chances[high:]) <= 0.025 < sum(chances[high - 1 :])


def test_intervals_of_samples_that_depend_on_their_neighbours_cover_the_percentile() -> None:
    """The gaps of one request have a speed in common: as independent samples they would give far too narrow limits."""
    covered, num_seeds = {"independent": 0, "dependent": 0}, 100
    for seed in range(num_seeds):
        rng = np.random.default_rng(seed)
        speeds = np.repeat(rng.normal(0.0, 1.0, 300), 100)
        dependent = speeds + 0.1 * rng.normal(0.0, 1.0, 30_000), np.repeat(load.blocks_of(np.arange(300.0)), 100)
        independent = rng.normal(0.0, 1.0, 600), load.blocks_of(np.arange(600.0))
        for kind, samples in (("independent", independent), ("dependent", dependent)):
            found = load.distribution(*samples, "").quantiles["p50"]
            assert found.low is not None
            assert found.high is not None
            covered[kind] += found.low <= 0.0 <= found.high
    assert min(covered.values()) > 0.9 * num_seeds


def test_the_share_of_good_requests_has_wilsons_interval() -> None:
    assert load.share_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert load.share_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-3)


def test_a_queue_of_one_server_has_the_percentiles_of_theory(tmp_path: Path) -> None:
    """M/M/1, first come, first served: the time in the system is exponential with the rate mu - lambda."""
    queue = Queue(service_s=lambda noise: noise.expovariate(10.0))
    found = result(tmp_path, Served((Stage(queue, 12_000, rate=5.0),)))
    assert found.state == "succeeded", found.reason
    assert found.serving is not None
    stage = found.serving.stages[0]
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        quantile = stage.latencies["e2e"].quantiles[name]
        expected_ms = -1000 * math.log(1 - share) / (10 - 5)
        assert quantile.value == pytest.approx(expected_ms, rel=0.1)
        assert quantile.low is not None
        assert quantile.high is not None
        assert quantile.low <= expected_ms <= quantile.high
    assert stage.offered_rate == pytest.approx(5.0, rel=0.03)
    assert stage.request_rate == pytest.approx(5.0, rel=0.03)
    assert stage.mean_concurrency == pytest.approx(5 / (10 - 5), rel=0.1)
    assert stage.littles_concurrency == pytest.approx(stage.mean_concurrency, rel=0.01)
    assert not stage.is_saturated


def test_a_rate_above_the_capacity_is_seen(tmp_path: Path) -> None:
    stages = (Stage(STEADY, 200, rate=10.0), Stage(STEADY, 600, rate=30.0))
    found = result(tmp_path, Served(stages, settings={"slo": {"e2e_ms": 1e9}}))
    assert found.serving is not None
    below, above = found.serving.stages
    assert (below.is_saturated, above.is_saturated) == (False, True)
    assert above.request_rate == pytest.approx(20.0, rel=0.02), "four slots of 0.2 s"
    assert (below.holds_slo, above.holds_slo) == (True, False)
    assert found.value_of(F.SLO_RATE) == 10.0


def test_figures_are_those_of_the_fastest_stage_that_holds_the_slo(tmp_path: Path) -> None:
    stages = tuple(Stage(STEADY, 80 * load, concurrency=load) for load in (1, 4, 8))
    served = Served(stages, settings={"slo": {"ttft_ms": 100}}, power_w=150.0)
    found = result(tmp_path, served)
    assert found.serving is not None
    assert found.serving.headline == 1, "with 8 at a time, four always wait for 0.2 s"
    assert "holds the SLO" in found.serving.headline_why
    figures = {name: figure.value for name, figure in found.figures.items()}
    assert figures[F.TTFT_P50] == pytest.approx(50)
    assert figures[F.TPOT_P99] == pytest.approx(10)
    assert figures[F.ITL_P99] == pytest.approx(10)
    assert figures[F.REQUEST_RATE] == pytest.approx(20, rel=0.02)
    assert figures[F.OUTPUT_RATE] == pytest.approx(320, rel=0.02)
    assert figures[F.OUTPUT_RATE_PER_USER] == pytest.approx(100)
    assert figures[F.GOODPUT] == pytest.approx(20, rel=0.02)
    assert figures[F.MEAN_POWER] == pytest.approx(150)
    assert figures[F.UNITS_PER_JOULE] == pytest.approx(320 / 150, rel=0.02)
    assert figures[F.ANSWER_AGREEMENT] == 1
    assert figures[F.FAILED_SHARE] == 0
    assert figures[F.SLO_RATE] is None
    assert "no load at a given rate" in str(found.figures[F.SLO_RATE].reason)
    assert found.serving.stages[2].slo_share == pytest.approx(0.0, abs=0.02)


def test_an_endpoint_has_no_figures_from_telemetry(tmp_path: Path) -> None:
    settings = {"server": None, "endpoint": "http://127.0.0.1:1"}
    found = result(tmp_path, Served((Stage(STEADY, 40, concurrency=4),), settings=settings))
    assert found.figures[F.ENERGY].reason == "the endpoint's machine records no telemetry"
    assert found.figures[F.SERVER_START_TIME].reason == "the endpoint was running"
    assert found.figures[F.OUTPUT_RATE].value is not None


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (ServeFinished(state="failed", end_reason="server_died", message="exit code 9", e2e_time=1.0), "exit code 9"),
        (ServeFinished(state="failed", end_reason="never_healthy", e2e_time=1.0), "never_healthy"),
    ],
)
def test_a_server_that_fails_gives_a_failed_round_with_the_reason(
    tmp_path: Path, ended: ServeFinished, reason: str
) -> None:
    found = result(tmp_path, Served((Stage(STEADY, 40, concurrency=4),), ended=ended))
    assert found.state == "failed"
    assert reason in str(found.reason)
    before_any_stage = result(tmp_path / "early", Served((), ended=ended))
    assert before_any_stage.state == "failed"
    assert reason in str(before_any_stage.reason)
    assert before_any_stage.figures[F.OUTPUT_RATE].value is None


def test_a_round_that_completed_no_stage_failed(tmp_path: Path) -> None:
    found = result(tmp_path, Served(()))
    assert (found.state, found.reason) == ("failed", "no stage of the load was measured")
