from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from accelmark.results.cluster import scaling_curves
from accelmark.results.figures import FigureName
from accelmark.results.rounds.summary import finding_texts, rounds_needed, spread, spread_warnings, student_t
from accelmark.results.schema import Figure, Finding, Spread
from accelmark.results.statistics import change_points, levels
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Provenance
from tests.results.compared_runs import loaded


def test_an_interval_is_the_one_worked_out_by_hand() -> None:
    found = spread([Figure(value=value) for value in (98.0, 100.0, 102.0)])
    half = 4.30265 * 2 / math.sqrt(3)
    assert found.mean == 100
    assert found.stdev == pytest.approx(2)
    assert found.ci95 == pytest.approx((100 - half, 100 + half), rel=1e-5)


def test_the_recommended_number_of_rounds_is_the_least_sufficient() -> None:
    needed = rounds_needed(100, 2)
    assert needed == 18  # t(17) x 2 / sqrt(18) = 0.9946, t(16) x 2 / sqrt(17) = 1.0283
    assert student_t(17) * 2 / math.sqrt(18) <= 1 < student_t(16) * 2 / math.sqrt(17)


@pytest.mark.parametrize(
    ("figures", "spread_of"),
    [
        ([Figure(value=5.0)], (5.0, None, 1, None)),
        ([Figure(value=None, reason="no counter")] * 2, (None, None, 0, "no counter")),
        ([], (None, None, 0, "no round succeeded")),
    ],
)
def test_fewer_than_two_values_have_no_interval(
    figures: list[Figure], spread_of: tuple[float | None, None, int, str | None]
) -> None:
    found = spread(figures)
    assert (found.mean, found.ci95, found.num_rounds, found.reason) == spread_of


def test_a_warning_of_several_rounds_is_shown_once() -> None:
    one = Finding(severity="warning", rule="r", expected="e", actual="a")
    changes: tuple[dict[str, object], ...] = ({"round": 3}, {"round": 1}, {"actual": "b"}, {"severity": "error"})
    told = [one.model_copy(update=change) for change in changes]
    assert finding_texts(told, "warning") == ["rounds 1, 3: a (expected: e) [r]", "b (expected: e) [r]"]


def test_a_figure_that_fewer_rounds_have_says_how_many() -> None:
    def of(*values: float) -> Spread:
        return spread([Figure(value=value) for value in values])

    figures = {FigureName.THROUGHPUT_STEADY: of(1.0, 2.0, 3.0), FigureName.TIME_TO_TARGET: of(1.0, 2.0)}
    (warning,) = spread_warnings(figures, CaseKey.parse("toy", hardware="X1"))
    assert "after 3 rounds: throughput, steady ±124 %; time to target ±424 % (2 rounds)." in warning


def test_a_single_round_has_no_interval_and_the_warning_has_the_key_of_three() -> None:
    figures = {FigureName.THROUGHPUT_STEADY: spread([Figure(value=1.0)])}
    (warning,) = spread_warnings(figures, CaseKey.parse("toy:pytorch:X1:2:8", hardware="X1"))
    assert warning.endswith("only one round. For three rounds, use toy:pytorch:X1:2:8:3")


def noisy(*segments: tuple[float, int]) -> list[float]:
    noise = random.Random(7)
    return [level * (1 + noise.gauss(0, 0.01)) for level, count in segments for _ in range(count)]


def test_changes_are_found_where_they_were_made() -> None:
    values = noisy((100, 12), (110, 9), (95, 14))
    assert change_points(values) == [12, 21]
    assert [(begin, end) for begin, end, _ in levels(values, [12, 21])] == [(0, 12), (12, 21), (21, 35)]


@pytest.mark.parametrize("count", [6, 20])
def test_outliers_over_many_series_are_ignored_and_shifts_are_found(count: int) -> None:
    num_series = 200
    alarms = outliers = found = 0
    for seed in range(num_series):
        noise = random.Random(seed)
        steady = [1000 + noise.gauss(0, 10) for _ in range(count)]
        alarms += change_points(steady) != []
        place, middle = noise.randrange(count), count // 2
        outliers += change_points([*steady[:place], steady[place] - 300, *steady[place + 1 :]]) != []
        found += change_points([*steady[:middle], *(value + 60 for value in steady[middle:])]) == [middle]
    assert alarms <= 0.1 * num_series
    assert outliers <= 0.13 * num_series
    assert found >= 0.88 * num_series


def test_efficiency_is_the_speed_up_over_the_ratio_of_ranks(tmp_path: Path) -> None:
    runs = [
        loaded(tmp_path / "one", rounds=1, jitter=0.0),
        loaded(tmp_path / "two", rounds=1, jitter=0.0, nproc=2, step_ms=10.25, data_wait_ms=1.0),
        loaded(tmp_path / "four", rounds=1, jitter=0.0, nnodes=2, nproc=2, step_ms=11.5),
        loaded(tmp_path / "other", rounds=1, jitter=0.0, precision="fp32"),
    ]
    [curve] = scaling_curves(runs)
    assert [point.scale for point in curve.points] == ["1×1", "1×2", "2×2"]
    # A step and its data take 10, 11.25 and 12.5 ms, so that a rank keeps 10/11.25 and 10/12.5 of its speed.
    assert [point.efficiency for point in curve.points] == pytest.approx([1, 10 / 11.25, 0.8], rel=1e-6)
    assert [point.speedup for point in curve.points] == pytest.approx([1, 20 / 11.25, 3.2], rel=1e-6)
    assert curve.same_batch


def test_scales_with_other_settings_are_not_one_curve_except_batch_size(tmp_path: Path) -> None:
    one, two = loaded(tmp_path / "one", rounds=1), loaded(tmp_path / "two", rounds=1, nproc=2)

    def with_setting(name: str, value: object) -> LoadedRun:
        setting = Provenance(value=value, layer="command line")
        rounds = {
            place: result.model_copy(update={"settings": {**result.settings, name: setting}})
            for place, result in two.rounds.items()
        }
        return replace(two, rounds=rounds)

    assert len(scaling_curves([one, with_setting("batch_size", 4)])) == 1
    assert scaling_curves([one, with_setting("channels_last", True)]) == []
