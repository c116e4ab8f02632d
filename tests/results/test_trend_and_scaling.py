from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from accelmark.results.cluster import scaling_curves
from accelmark.results.statistics import change_points, levels
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.spec.layers import Provenance
from tests.results.compared_runs import loaded


def noisy(*segments: tuple[float, int]) -> list[float]:
    noise = random.Random(7)
    return [level * (1 + noise.gauss(0, 0.01)) for level, count in segments for _ in range(count)]


def test_a_stable_figure_has_a_narrow_interval() -> None:
    alarms = 0
    for seed in range(40):
        noise = random.Random(seed)
        alarms += change_points([100 + noise.gauss(0, 1) for _ in range(40)]) != []
    assert alarms <= 2


def test_changes_are_found_where_they_were_made() -> None:
    values = noisy((100, 12), (110, 9), (95, 14))
    assert change_points(values) == [12, 21]
    assert [(begin, end) for begin, end, _ in levels(values, [12, 21])] == [(0, 12), (12, 21), (21, 35)]


@pytest.mark.parametrize("count", [6, 8, 12, 20])
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


def test_efficiency_has_an_interval_over_rounds(tmp_path: Path) -> None:
    [curve] = scaling_curves([loaded(tmp_path / "one"), loaded(tmp_path / "two", nproc=2)])
    assert curve.points[0].half95 is None
    assert curve.points[1].half95 is not None
    assert 0 < curve.points[1].half95 < 1


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
