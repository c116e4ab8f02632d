"""Every figure against numbers that can be worked out by hand from ``Made``'s defaults.

100 steps of 9 ms and 1 ms of waiting: 1 s of training. Two evaluations of 0.5 s: 2 s raw. 2 s before TRAIN_START,
0.1 s after TRAIN_END. 100 steps x 8 samples x 16 tokens = 12 800 tokens a rank. Requests are of a simulated queue.
"""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.results.figures import FigureName as F
from accelmark.results.figures import figures_of
from accelmark.results.read.rank_log import Attempt, RankEnd, TrainLog, _add_window
from accelmark.results.read.telemetry import Samples, read_samples
from accelmark.results.rounds import consumption, load
from accelmark.results.rounds.consumption import Series, device_memory, energy, telemetry_series
from accelmark.results.rounds.inference import invalid_reasons, mfu, percentile, phase_figures
from accelmark.results.rounds.load import SteadyWindow, read_requests
from accelmark.results.rounds.summary import round_result
from accelmark.results.rounds.timeline import WarmUp, histogram, thin, warm_up
from accelmark.results.rounds.training import slow_steps
from accelmark.results.schema import Figure, RoundResult, ServingRound, ServingStage
from accelmark.spec.job import InferJob
from accelmark.spec.log.events import StepWindow
from accelmark.spec.log.inference import (
    AnswerCheck,
    ForwardWindow,
    LoadStage,
    RepeatCheck,
    RequestRecord,
    ServeFinished,
)
from accelmark.spec.settings.inference import InferSettings, Reference
from accelmark.spec.settings.serving import ServeSettings
from tests.made_run import Made, change_json, change_lines, make_run
from tests.served_run import ROUND, Queue, Served, Stage, make_served_run

RECORDED = Path(__file__).parent / "recorded"
UNKNOWN = "the peak of the device 'Acme X1 Pod' is unknown: vendor nvidia does not describe this chip"


def result_of(tmp_path: Path, made: Made) -> RoundResult:
    run = make_run(tmp_path / "run", made)
    return round_result(run / made.key.slug / "round1")


def reason(result: RoundResult, name: F) -> str:
    figure = result.figures[name]
    assert figure.value is None
    return figure.reason or ""


def test_every_figure_of_one_rank_is_what_a_calculator_says(tmp_path: Path) -> None:
    result = result_of(tmp_path, Made())
    expected = {
        F.E2E_TIME: 4.1, F.INIT_TIME: 2.0, F.RAW_TRAIN_TIME: 2.0, F.TRAIN_NO_EVAL_TIME: 1.0, F.PURE_COMPUTE_TIME: 0.9,
        F.TIME_TO_TARGET: 2.0, F.THROUGHPUT_WHOLE: 6400.0, F.THROUGHPUT_TRAIN: 12800.0, F.THROUGHPUT_CORE: 12800 / 0.9,
        F.THROUGHPUT_PER_DEVICE: 12800.0, F.STEP_P50: 9.0, F.STEP_P90: 9.0, F.STEP_P99: 9.0, F.DATA_WAIT_SHARE: 0.1,
        F.FINAL_METRIC: 0.95, F.FLOPS_PER_SAMPLE: 8e9, F.ACHIEVED_TFLOPS: 6.4, F.MFU: 0.064,
        F.PEAK_DEVICE_MEMORY: 512.0, F.PEAK_HOST_MEMORY: 2048.0, F.DEVICE_UTILISATION: 0.9, F.CPU_UTILISATION: 0.25,
        F.MEAN_POWER: 200.0, F.ENERGY: 400.0, F.ENERGY_PER_UNIT: 400 / 12800, F.UNITS_PER_JOULE: 32.0,
        F.TELEMETRY_CPU_TIME: 0.125,
    }  # fmt: skip
    assert {name: result.figures[name].value for name in expected} == pytest.approx(expected)
    assert (result.state, result.converged, result.num_steps, result.num_samples) == ("succeeded", True, 100, 800)
    assert set(result.figures) == set(figures_of("train"))


@pytest.mark.parametrize(
    ("step_ms", "warm"),
    [
        ([10.0] * 30, (0, 0.0, False)),
        ([900.0, 10.0, 80.0, *[10.0] * 27], (3, 0.99, False)),
        ([10.0] * 20 + [90.0] + [10.0] * 9, (0, 0.0, False)),
        ([40.0 - step for step in range(30)], (10, 0.355, True)),
        ([500.0, 10.0], (0, 0.0, False)),
    ],
)
def test_warm_up_ends_where_step_time_has_settled(step_ms: list[float], warm: tuple[int, float, bool]) -> None:
    assert warm_up(np.asarray(step_ms)) == pytest.approx(warm)


def test_slow_steps_are_attributed_where_the_cause_was_seen() -> None:
    log = TrainLog(RankEnd(0))
    attempt = Attempt(0.0, 0.0)
    seen: list[dict[str, Any]] = [{}, {"gc_ms": 30.0}, {"alloc_retries": 1}, {}, {"wait": 40.0}, {}, {}, {}]
    for number, more in enumerate(seen, start=1):
        waits = (more.pop("wait", 0.0), *[0.0] * 9)
        steps = (10.0 if waits[0] or number > 5 else 50.0, *[10.0] * 9)
        window = StepWindow(
            global_steps=10 * number, epoch=0, num_trained_samples=0, learning_rate=None, loss=1.0, losses=(1.0,) * 10,
            step_ms=steps, data_wait_ms=waits, wall_ms=sum(steps) + sum(waits), **more,
        )  # fmt: skip
        _add_window(log, attempt, window, 200.0 * number)
    attempt.saved_steps.add(30)
    timeline: Any = SimpleNamespace(attempts=[attempt], warm_ups=[WarmUp(1, 0.05, is_bounded=False)])
    share, causes = slow_steps(timeline, {})
    assert causes == {
        "garbage collection": 1, "allocator freed its cache": 1, "checkpoint": 1, "wait for data": 1,
    }  # fmt: skip
    assert share == pytest.approx(160 / 950)


def test_memory_of_a_device_is_that_of_the_ranks_where_the_driver_reports_it() -> None:
    columns = {"memory_used_mib": array("d", [60_000.0, 66_387.0])}
    hosts = {"a": (Samples(t=array("d", [0.0, 1.0]), devices={0: columns}), ((0.0, 1.0),))}
    assert device_memory(hosts, "cuda") == (66_387.0, "of the whole device, memory of other processes included")
    columns["rank_memory_mib"] = array("d", [math.nan, 700.0])
    assert device_memory(hosts, "cuda") == (700.0, None)


RANKS_ADD_UP = {
    F.THROUGHPUT_TRAIN: 4 * 12800, F.THROUGHPUT_PER_DEVICE: 12800, F.MFU: 0.064, F.MEAN_POWER: 800,
    F.ENERGY: 1600, F.TELEMETRY_CPU_TIME: 0.25,
}  # fmt: skip
ONLY_STEADY_IS_WITHOUT_WARM_UP = {
    F.WARMUP_TIME: 0.51, F.THROUGHPUT_TRAIN: 12800 / 1.5, F.THROUGHPUT_STEADY: 99 * 8 * 16 / 0.99,
    F.TIME_TO_TARGET: 2.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (Made(nnodes=2, nproc=2), RANKS_ADD_UP),
        (Made(first_step_ms=509.0), ONLY_STEADY_IS_WITHOUT_WARM_UP),
        (Made(device_type="cpu", rapl=True), {F.ENERGY: 100.0, F.DEVICE_UTILISATION: 0.25}),
    ],
)
def test_ranks_warm_up_and_packages_of_a_cpu_count(tmp_path: Path, made: Made, expected: dict[F, float]) -> None:
    result = result_of(tmp_path, made)
    assert {name: result.figures[name].value for name in expected} == pytest.approx(expected)


def test_figures_agree_with_what_a_real_rank_counted_itself() -> None:
    result = round_result(RECORDED / "1rank")
    own = {
        F.RAW_TRAIN_TIME: 0.025311, F.TRAIN_NO_EVAL_TIME: 0.023519, F.PURE_COMPUTE_TIME: 0.0142313,
        F.THROUGHPUT_WHOLE: 7585.55, F.THROUGHPUT_TRAIN: 8163.56, F.THROUGHPUT_CORE: 13491.39,
        F.FINAL_LOSS: 0.3351525, F.FINAL_METRIC: 0.980198, F.FLOPS_PER_SAMPLE: 3968.0,
    }  # fmt: skip
    assert {name: result.figures[name].value for name in own} == pytest.approx(own, rel=2e-3)
    assert (result.num_steps, result.num_samples, result.converged) == (12, 192, True)
    both = round_result(RECORDED / "2ranks")
    assert both.num_devices == 2
    assert "ranks-missing" not in {finding.rule for finding in both.findings}


@pytest.mark.parametrize(
    ("changes", "figure", "value", "is_converged"),
    [
        ({"metrics": (0.91, 0.4)}, F.TIME_TO_TARGET, 1.0, True),
        ({"target": None}, F.FINAL_METRIC, "the case states no target", None),
        ({"synthetic": True}, F.FINAL_METRIC, "synthetic data has no accuracy", None),
        ({"precision": "fp32"}, F.MFU, 0.64, True),
        ({"chip": None}, F.ACHIEVED_TFLOPS, 6.4, True),
        ({"chip": None}, F.MFU, UNKNOWN, True),
    ],
)
def test_target_data_and_precision_decide_over_figures(
    tmp_path: Path, changes: dict[str, Any], figure: F, value: float | str, is_converged: bool | None
) -> None:
    result = result_of(tmp_path, Made(**changes))
    found = result.figures[figure]
    assert found.reason == value if isinstance(value, str) else found.value == pytest.approx(value)
    assert result.converged is is_converged


def test_no_telemetry_leaves_its_figures_null_with_the_reason(tmp_path: Path) -> None:
    result = result_of(tmp_path, Made(telemetry=False))
    for name in (F.ENERGY, F.MEAN_POWER, F.DEVICE_UTILISATION, F.UNITS_PER_JOULE, F.TELEMETRY_CPU_TIME):
        assert "telemetry.jsonl is missing" in reason(result, name)
    assert [finding.rule for finding in result.findings] == ["telemetry-missing"]


def test_a_round_that_ended_before_its_ranks_started_names_the_cause_alone(tmp_path: Path) -> None:
    round_dir = make_run(tmp_path / "run", Made(telemetry=False)) / "toy-pytorch-X1x1x1" / "round1"
    (node,) = round_dir.glob("*_noderank0")
    cause = "the host is in use by another run: wait until it ends, or stop it"
    change_json(node / "exit.json", state="failed", reason=cause, ranks=[])
    result = round_result(round_dir)
    assert [finding.rule for finding in result.findings] == ["telemetry-missing"], "its ranks have written logs"
    (node / "rank0.out.log").unlink()
    result = round_result(round_dir)
    assert (result.state, result.reason, result.findings) == ("failed", cause, ())


def test_a_gap_in_telemetry_leaves_energy_null(tmp_path: Path) -> None:
    made = Made(windows=200, steps_per_window=10, eval_windows=(), metrics=())
    run = make_run(tmp_path / "run", made)
    path = run / made.key.slug / "round1" / "node00_noderank0" / "telemetry.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:20] + lines[60:]))
    result = round_result(run / made.key.slug / "round1")
    assert "gap between power readings is too long" in reason(result, F.ENERGY)
    assert "telemetry has a gap of 10.2 s" in reason(result, F.DEVICE_UTILISATION)


def test_power_that_its_counter_contradicts_is_warned_of(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made())
    round_dir = run / "toy-pytorch-X1x1x1" / "round1"

    def counted(entry: dict[str, Any]) -> dict[str, Any]:
        devices = [device | {"energy_j": 300.0 * entry["t"]} for device in entry.get("devices", ())]
        return entry | ({"devices": devices} if devices else {})

    change_lines(round_dir / "node00_noderank0" / "telemetry.jsonl", counted)
    result = round_result(round_dir)
    assert result.figures[F.ENERGY].value == pytest.approx(600)
    assert [finding.actual.partition(" ")[0] for finding in result.findings] == ["node00:", "energy"]


def test_curves_are_thinned_and_figures_are_not(tmp_path: Path) -> None:
    made = Made(windows=100, steps_per_window=50, eval_windows=(), metrics=(), target=None, interval_s=5)
    result = result_of(tmp_path, made)
    assert len(result.curves["loss"]) <= 1000
    assert result.num_steps == 5000
    assert sum(count for _, count in result.step_ms_histogram) == 5000
    bins = histogram(np.concatenate([np.linspace(1, 2, 990), np.full(10, 50.0)]).astype(np.float32))
    assert sum(count for _, count in bins) == 1000
    assert (bins[0], bins[-1][0]) == ((1.0, 0), 50.0)


@pytest.mark.parametrize(
    ("times", "values", "span", "gap_s", "total", "reason"),
    [
        ([0, 1, 2, 3], [10, 10, 10, 10], (0.5, 2.5), 5, 20, ""),
        ([0, 1, 2], [10, math.nan, 10], (0, 2), 5, 20, ""),
        ([0, 1, 2], [10, math.nan, 10], (0, 2), 1.5, None, "a gap of 2.0 s"),
        ([0, 1, 2], [1, 1, 1], (0, 10), 5, None, "does not cover"),
        ([0.0], [math.nan], (0, 1), 5, None, "no sample has a value"),
        ([0.0], [1.0], (0, 0), 5, None, "nothing was measured"),
    ],
)
def test_an_integral_has_interpolated_ends_and_bridges_short_gaps(
    times: list[float], values: list[float], span: tuple[float, float], gap_s: float, total: float | None, reason: str
) -> None:
    found = consumption.integrate(times, values, [span], gap_s)
    assert found.value == total
    assert reason in found.reason


@pytest.mark.parametrize(("are_cpus", "utilisation", "power_w"), [(False, 0.8, 120.0), (True, 0.25, 50.0)])
def test_a_vendor_whose_framework_computes_on_cpu_has_the_figures_of_its_own_devices(
    are_cpus: bool, utilisation: float, power_w: float
) -> None:
    columns = {"utilisation": array("d", [0.8] * 11), "power_w": array("d", [119.0, 121.0] * 5 + [119.0])}
    host = {"cpu": array("d", [0.25] * 11), "rapl_j": array("d", range(0, 550, 50))}
    samples = Samples({"devices_are_cpus": are_cpus}, t=array("d", range(11)), host=host, devices={0: columns})
    figures, _ = consumption.consumption_figures({"here": (samples, [(1.0, 9.0)])}, 100, "cpu", "")
    assert figures[F.DEVICE_UTILISATION].value == pytest.approx(utilisation)
    assert figures[F.MEAN_POWER].value == pytest.approx(power_w)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(10, 500), st.randoms(use_true_random=False))
def test_thinning_keeps_the_ends_and_the_peaks(count: int, most: int, rng: object) -> None:
    values = np.random.default_rng(rng.randrange(2**32)).normal(size=count)  # type: ignore[attr-defined]
    kept = thin(values, most)
    assert len(kept) <= max(most, 2)
    assert kept[0] == 0
    assert kept[-1] == count - 1
    assert (np.diff(kept) > 0).all()
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()


def test_telemetry_of_a_load_begins_and_ends_with_it() -> None:
    samples = Samples(header={}, t=array("d", range(100, 160)), host={"cpu": array("d", [0.5] * 60)}, devices={})
    hosts = {"n1": (samples, ((110.0, 112.0),))}
    (of_load,) = telemetry_series(hosts, (120.0, 130.0))
    assert [at for at, _ in of_load.points] == list(range(11))
    (of_training,) = telemetry_series(hosts)
    assert of_training.points[0] == (-10, 0.5)
    assert telemetry_series(hosts, (200.0, 210.0)) == ()


def test_telemetry_of_attempts_lies_on_the_axis_of_raw_training_time() -> None:
    samples = Samples(t=array("d", range(100, 160)), host={"cpu": array("d", [0.5] * 60)})
    (series,) = telemetry_series({"n1": (samples, ((110.0, 112.0), (150.0, 152.0)))})
    assert [at for at, _ in series.points] == [*range(-10, 3), *range(2, 12)], "nothing between the attempts"
    for earlier in ((50.0, 70.0), (9000.0, 9020.0)):  # without samples of it; before a restart of the machine
        (series,) = telemetry_series({"n1": (samples, (earlier, (110.0, 112.0)))})
        assert series.points[0][0] == 10, "the earlier attempt took 20 s"


RAMP = [(0.0, 100.0), (1.0, 200.0), (2.0, 300.0), (3.0, 300.0)]
GAP = [(0.0, 100.0), (3.5, 100.0), (4.0, 100.0)]
FLAT = [(0.0, 100.0), (1.0, 100.0), (2.0, 100.0)]


@pytest.mark.parametrize(
    ("power", "window", "counter", "expected_j", "reasons"),
    [
        (RAMP, (0.5, 2.5), [], 487.5, ()),
        (RAMP, (-1.0, 2.0), [], None, ("no power reading before the start",)),
        (RAMP, (1.0, 4.0), [], None, ("no power reading after the end",)),
        (RAMP, (2.0, 2.0), [], None, ("nothing was measured",)),
        (GAP, (1.0, 4.0), [], 300, ("the gap between power readings is too long",)),
        (GAP, (3.6, 4.0), [], 40, ()),
        (FLAT, (0, 2), [(0.0, 5000.0), (2.0, 5209.0)], 209, ()),
        (FLAT, (0, 2), [(0.0, 5000.0), (2.0, 5211.0)], 211, (consumption.COUNTER_DISAGREES,)),
        (FLAT, (0, 2), [(0.0, 900.0), (1.0, 10.0), (2.0, 110.0)], 200, (consumption.COUNTER_WENT_BACK,)),
        ([], (0.5, 1.5), [(0.0, 1000.0), (1.0, 1100.0), (2.0, 1300.0)], 150, ()),
        ([], (0.5, 3), [(0.0, 1000.0), (1.0, 1100.0)], None, ("no power reading after the end",)),
    ],
)
def test_energy_is_that_of_the_counter_else_the_integral_of_power(
    power: Series, window: tuple[float, float], counter: Series, expected_j: float | None, reasons: tuple[str, ...]
) -> None:
    energy_j, found = energy(power, *window, counter)
    assert energy_j == (None if expected_j is None else pytest.approx(expected_j))
    assert found == reasons
    assert energy(GAP, 1.0, 4.0, max_gap_s=4)[1] == (), "the longest gap between readings can be given"


def _samples(
    path: Path, infos: list[dict[str, Any]], devices: list[dict[str, Any]], count: int = 4, noise: float = 0.001
) -> Samples:
    """Readings of power vary, as those of a sensor do."""
    lines: list[dict[str, Any]] = [{"header": {"interval_s": 1.0, "devices": infos}}]
    for t in range(count):
        read = [one | {"power_w": one["power_w"] and one["power_w"] * (1 + noise * (t % 2))} for one in devices]
        lines.append({"t": float(t), "host": {}, "devices": read})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_samples(path)


def _energy_of(samples: Samples) -> Figure:
    return consumption.consumption_figures({"host": (samples, [(0.5, 2.5)])}, 1, "cuda", "")[0][F.ENERGY]


def test_the_energy_of_several_devices_needs_all_and_two_dies_on_one_card_are_counted_once(tmp_path: Path) -> None:
    infos: list[dict[str, Any]] = [{"index": 0}, {"index": 1, "reasons": {"power_w": "no sensor"}}]
    both = _samples(tmp_path / "both", infos, [{"index": 0, "power_w": 100}, {"index": 1, "power_w": 50}])
    assert _energy_of(both).value == pytest.approx(300, rel=1e-3)
    one = _samples(tmp_path / "one", infos, [{"index": 0, "power_w": 100}, {"index": 1, "power_w": None}])
    assert (_energy_of(one).value, _energy_of(one).reason) == (None, "device 1: no sensor")
    infos = [{"index": 0, "power_in": 1}, {"index": 1, "power_in": None}]
    dies = _samples(tmp_path / "dies", infos, [{"index": 0, "power_w": None}, {"index": 1, "power_w": 100}])
    assert _energy_of(dies).value == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize(("end", "is_marked"), [(29.9, True), (31.0, False)])
def test_energy_over_less_than_half_a_minute_is_marked(end: float, is_marked: bool, tmp_path: Path) -> None:
    samples = _samples(tmp_path / "t.jsonl", [{"index": 0}], [{"index": 0, "power_w": 100.0}], 40)
    figures, warnings = consumption.consumption_figures({"host": (samples, [(0.5, end)])}, 1, "cuda", "")
    assert figures[F.ENERGY].value == pytest.approx(100 * (end - 0.5), rel=1e-3)
    assert any("a published figure needs 30 s" in warning for warning in warnings) is is_marked


@pytest.mark.parametrize(("count", "is_published"), [(5, True), (6, False)])
def test_power_that_never_varies_is_not_published(count: int, is_published: bool, tmp_path: Path) -> None:
    found = _energy_of(_samples(tmp_path / "t.jsonl", [{"index": 0}], [{"index": 0, "power_w": 12}], count, noise=0.0))
    assert (found.value is not None) is is_published
    assert is_published or found.reason == "device 0: all 6 readings of power are 12 W, idle and busy"


def _window(items: tuple[int, ...], took_ms: tuple[float, ...], wall_ms: float, other_ms: float = 0) -> ForwardWindow:
    return ForwardWindow(
        phase="inference", pass_number=1, items=items, latency_ms=took_ms,
        not_inference_ms=(other_ms,) + (0.0,) * (len(items) - 1), wall_ms=wall_ms, nonfinite_batches=0,
    )  # fmt: skip


def test_core_is_computation_and_whole_is_everything_but_compilation() -> None:
    windows = [_window((8, 8), (10, 30), 100), _window((8, 4), (20, 20), 700, other_ms=400)]
    figures = phase_figures(windows, 8, "")
    assert figures.latency_ms["p50"].value == 20, "of full batches"
    assert figures.core.value == pytest.approx(28 / 0.080)
    assert figures.whole.value == pytest.approx(28 / 0.400)


def test_time_declared_as_not_inference_is_reported_as_a_share() -> None:
    figures = phase_figures([_window((8, 8), (10, 30), 100, other_ms=10), _window((8,), (0,), 50)], 8, "")
    assert figures.declared.value == pytest.approx(10 / 50)
    figures = phase_figures([_window((8,), (0,), 20, other_ms=10)], 8, "")
    assert (figures.core.value, figures.declared.value) == (None, 1)


def test_a_percentile_that_too_few_batches_were_measured_for_is_null() -> None:
    assert percentile([1.0] * 999, 0.999).value is None
    assert percentile([float(index) for index in range(1, 1001)], 0.999).value == 999
    assert percentile([float(index) for index in range(1, 101)], 0.99).value == 99


def test_mfu_needs_flops_and_a_peak() -> None:
    speed = Figure(value=1000.0)
    assert mfu(speed, 4.12e9, 312).value == pytest.approx(1000 * 4.12e9 / 312e12)
    assert mfu(speed, None, 312).value is None
    assert "peak" in str(mfu(speed, 1.0, None).reason)


SAME = AnswerCheck(
    num_items=0, median_error=None, worst_error=None, top1_agreement=None, framework_metrics={"top1": 0.899},
    engine_metrics={"top1": 0.880},
)  # fmt: skip
RIGHT = SAME.model_copy(update={"engine_metrics": {"top1": 0.899}})
CACHED = RepeatCheck(fresh_ms=2, same_ms=1, speedup=2, limit=1.1, suspicious=True, num_batches=8)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"answers": SAME}, ["top1 is 0.8800 in the engine on the same inputs and 0.8990 in the framework"]),
        ({"answers": RIGHT, "inference": 0.88}, ["top1 is 0.8800 in the engine on all inputs"]),
        ({"inference": 0.89}, ["a difference of more than 0.005"]),
        ({"inference": math.nan}, ["is not finite", "a difference of more"]),
        ({"nonfinite_batches": 2}, ["2 batches have NaN"]),
        ({"validation": 0.8, "inference": 0.8}, ["(a paper)"]),
        ({"repeat_check": CACHED}, ["cached"]),
        ({}, []),
        ({"validation": None}, []),
        ({"answers": RIGHT}, []),
    ],
)
def test_each_reason_makes_a_run_invalid(changed: dict[str, object], words: list[str]) -> None:
    paper, batches = Reference(value=0.9, within=0.01, source="a paper"), InferSettings(batch_size=8)
    infer = InferJob(unit="image", metric="top1", tolerance=0.005, reference=paper, settings=batches, parameters={})
    given: dict[str, object] = {
        "validation": 0.9, "inference": 0.899, "is_partial": False, "nonfinite_batches": 0, "repeat_check": None,
    }  # fmt: skip
    reasons = invalid_reasons(infer, **(given | changed))  # type: ignore[arg-type]
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))


STEADY = Queue(slots=4, service_s=lambda noise: 0.2, prefill_share=0.25, tokens=16)
"""Every request takes 0.2 s in its slot: TTFT 50 ms, TPOT 10 ms."""


def record(number: int, due: float, first: float, end: float, **changed: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "stage": 0, "number": number, "prompt": number, "due_s": due, "sent_s": due, "first_s": first, "end_s": end,
        "gaps_us": (), "status": "ok", "requested_tokens": 5, "output_tokens": 5, "input_tokens": 10,
    }  # fmt: skip
    return RequestRecord.model_validate(values | changed)


def stage_of(tmp_path: Path, records: list[RequestRecord]) -> ServingStage:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(each.model_dump_json() + "\n" for each in records))
    requests, report = read_requests(path)
    assert report.malformed == 0
    ended = LoadStage(
        stage=0, arrival="poisson", concurrency=None, rate=None, begin_mono_s=0.0, duration_s=10.0,
        num_requests=len(records), lag_p50_ms=None, lag_p99_ms=None, client_cpu_share=0.0,
    )  # fmt: skip
    return load.measured_stage(requests, ended, ServeSettings(), 2, None)


def result(tmp_path: Path, served: Served) -> RoundResult:
    return round_result(make_served_run(tmp_path / "run", served) / ROUND)


def load_of(tmp_path: Path, served: Served) -> tuple[RoundResult, ServingRound]:
    found = result(tmp_path, served)
    assert found.serving is not None
    return found, found.serving


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
    records = [record(at, at, at + 0.5, at + 0.9, sent_s=at + 0.2, gaps_us=(100_000,) * 4) for at in range(11)]
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
            covered[kind] += (math.inf if found.low is None else found.low) <= 0.0 <= (found.high or -math.inf)
    assert min(covered.values()) > 0.9 * num_seeds


def test_the_share_of_good_requests_has_wilsons_interval() -> None:
    assert load.share_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert load.share_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-3)


def test_a_queue_of_one_server_has_the_percentiles_of_theory(tmp_path: Path) -> None:
    """M/M/1, first come, first served: the time in the system is exponential with the rate mu - lambda."""
    queue = Queue(service_s=lambda noise: noise.expovariate(10.0))
    found, serving = load_of(tmp_path, Served((Stage(queue, 12_000, rate=5.0),)))
    assert found.state == "succeeded", found.reason
    (stage,) = serving.stages
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        quantile = stage.latencies["e2e"].quantiles[name]
        expected_ms = -1000 * math.log(1 - share) / (10 - 5)
        assert quantile.value == pytest.approx(expected_ms, rel=0.1)
        assert (quantile.low or math.inf) <= expected_ms <= (quantile.high or 0)
    assert stage.offered_rate == pytest.approx(5.0, rel=0.03)
    assert stage.request_rate == pytest.approx(5.0, rel=0.03)
    assert stage.mean_concurrency == pytest.approx(5 / (10 - 5), rel=0.1)
    assert stage.littles_concurrency == pytest.approx(stage.mean_concurrency, rel=0.01)
    assert not stage.is_saturated


def test_a_rate_above_the_capacity_is_seen(tmp_path: Path) -> None:
    stages = (Stage(STEADY, 200, rate=10.0), Stage(STEADY, 600, rate=30.0))
    found, serving = load_of(tmp_path, Served(stages, settings={"slo": {"e2e_ms": 1e9}}))
    below, above = serving.stages
    assert (below.is_saturated, above.is_saturated) == (False, True)
    assert above.request_rate == pytest.approx(20.0, rel=0.02), "four slots of 0.2 s"
    assert (below.holds_slo, above.holds_slo) == (True, False)
    assert found.value_of(F.SLO_RATE) == 10.0


def test_figures_are_those_of_the_fastest_stage_that_holds_the_slo(tmp_path: Path) -> None:
    stages = tuple(Stage(STEADY, 80 * load, concurrency=load) for load in (1, 4, 8))
    found, serving = load_of(tmp_path, Served(stages, settings={"slo": {"ttft_ms": 100}}, power_w=150.0))
    assert serving.headline == 1, "with 8 at a time, four always wait for 0.2 s"
    assert "holds the SLO" in serving.headline_why
    exact = {
        F.TTFT_P50: 50, F.TPOT_P99: 10, F.ITL_P99: 10, F.OUTPUT_RATE_PER_USER: 100, F.MEAN_POWER: 150,
        F.ANSWER_AGREEMENT: 1, F.FAILED_SHARE: 0,
    }  # fmt: skip
    over_window = {F.REQUEST_RATE: 20, F.OUTPUT_RATE: 320, F.GOODPUT: 20, F.UNITS_PER_JOULE: 320 / 150}
    for expected, within in ((exact, 1e-6), (over_window, 0.02)):
        assert {name: found.value_of(name) for name in expected} == pytest.approx(expected, rel=within)
    assert found.figures[F.SLO_RATE].value is None
    assert "no load at a given rate" in str(found.figures[F.SLO_RATE].reason)
    assert serving.stages[2].slo_share == pytest.approx(0.0, abs=0.02)


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
def test_a_server_that_fails_fails_the_round_with_its_reason(tmp_path: Path, ended: ServeFinished, reason: str) -> None:
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
