"""Energy over a window, against values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelmark.telemetry.energy import EnergyReason, energy, energy_of, integrate, sum_of
from accelmark.telemetry.reading import parse_recording

RAMP = [(0.0, 100.0), (1.0, 200.0), (2.0, 300.0), (3.0, 300.0)]


def test_trapezoids_with_interpolated_ends() -> None:
    # 150 W at 0.5 s, 200 at 1, 300 at 2, 300 at 2.5: 0.5*(150+200)/2 + 1*(200+300)/2 + 0.5*300 = 87.5 + 250 + 150
    assert integrate(RAMP, 0.5, 2.5) == pytest.approx(487.5)


def test_a_window_between_two_readings_lies_on_the_line_between_them() -> None:
    # 120 W at 0.2 s, 160 W at 0.6 s: 0.4 s at 140 W
    assert integrate(RAMP, 0.2, 0.6) == pytest.approx(56.0)


def test_a_covered_window_is_valid_and_gives_the_mean() -> None:
    found = energy(RAMP, 0.5, 2.5)
    assert found.energy_j == pytest.approx(487.5)
    assert found.mean_power_w == pytest.approx(243.75)
    assert found.method == "trapezoid"
    assert found.power_valid
    assert found.largest_gap_s == 1


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        ((-1.0, 2.0), EnergyReason.START_NOT_COVERED),
        ((1.0, 4.0), EnergyReason.END_NOT_COVERED),
        ((2.0, 2.0), EnergyReason.EMPTY_WINDOW),
    ],
)
def test_a_window_that_is_not_covered_has_no_energy(window: tuple[float, float], reason: EnergyReason) -> None:
    found = energy(RAMP, *window)
    assert (found.energy_j, found.power_valid) == (None, False)
    assert reason in found.reasons


def test_a_gap_of_more_than_three_seconds_makes_power_invalid() -> None:
    points = [(0.0, 100.0), (3.5, 100.0), (4.0, 100.0)]
    found = energy(points, 1.0, 4.0)
    assert found.energy_j == pytest.approx(300)
    assert not found.power_valid
    assert found.reasons == (EnergyReason.GAP_TOO_LONG,)
    assert energy(points, 1.0, 4.0, max_gap_s=4).power_valid
    assert energy(points, 3.6, 4.0).power_valid  # the gap is outside the window


def test_the_hardware_counter_may_differ_by_five_percent() -> None:
    power = [(0.0, 100.0), (1.0, 100.0), (2.0, 100.0)]
    near = [(0.0, 5000.0), (2.0, 5000.0 + 209.0)]
    far = [(0.0, 5000.0), (2.0, 5000.0 + 211.0)]
    assert energy(power, 0, 2, near).power_valid
    found = energy(power, 0, 2, far)
    assert found.energy_j == pytest.approx(200)
    assert found.counter_j == pytest.approx(211)
    assert found.reasons == (EnergyReason.COUNTER_DISAGREES,)


def test_a_counter_that_went_back_is_said_and_not_compared() -> None:
    found = energy([(0.0, 100.0), (2.0, 100.0)], 0, 2, [(0.0, 900.0), (1.0, 10.0), (2.0, 110.0)])
    assert (found.counter_j, found.reasons) == (None, (EnergyReason.COUNTER_WENT_BACK,))


def test_a_counter_alone_gives_energy() -> None:
    found = energy([], 0.5, 1.5, [(0.0, 1000.0), (1.0, 1100.0), (2.0, 1300.0)])
    assert found.energy_j == pytest.approx(150)
    assert (found.method, found.power_valid) == ("counter", True)


def test_without_power_and_counter_there_is_no_energy() -> None:
    assert energy([], 0, 1).reasons == (EnergyReason.NO_POWER,)
    assert sum_of([]).reasons == (EnergyReason.NO_POWER,)


def test_the_sum_over_devices_needs_all_of_them() -> None:
    one = energy(RAMP, 0.5, 2.5)
    assert sum_of([one, one]).energy_j == pytest.approx(975)
    part = sum_of([one, energy([], 0.5, 2.5)])
    assert (part.energy_j, part.power_valid) == (None, False)
    assert EnergyReason.DEVICE_MISSING in part.reasons


def test_two_dies_on_one_card_are_counted_once() -> None:
    header = '{"header": {"devices": [{"index": 0, "power_in": 1}, {"index": 1, "power_in": null}]}}'
    lines = [header] + [
        f'{{"t": {t}, "host": {{}}, "devices": [{{"index": 0, "power_w": null}}, {{"index": 1, "power_w": 100}}]}}'
        for t in range(4)
    ]
    assert energy_of(parse_recording(lines), 0.5, 2.5).energy_j == pytest.approx(200)
    assert energy_of(parse_recording(lines), 0.5, 2.5, [0]).energy_j == pytest.approx(200)


def test_a_reading_that_is_older_than_its_line_counts_where_it_was_taken() -> None:
    lines = ['{"t": 2.0, "host": {}, "devices": [{"index": 0, "power_w": 50, "age_s": 0.5}]}']
    assert parse_recording(lines).device_series(0, "power_w") == [(1.5, 50.0)]


@given(
    powers=st.lists(st.floats(0, 1000), min_size=3, max_size=30),
    at=st.floats(0.01, 0.99), cut=st.floats(0.01, 0.99),
)  # fmt: skip
def test_energy_of_two_halves_is_energy_of_the_whole(powers: list[float], at: float, cut: float) -> None:
    points = [(float(second), power) for second, power in enumerate(powers)]
    start, end = at, len(powers) - 1.0
    middle = start + (end - start) * cut
    whole = integrate(points, start, end)
    assert integrate(points, start, middle) + integrate(points, middle, end) == pytest.approx(whole, abs=1e-6)
    assert min(powers) * (end - start) - 1e-6 <= whole <= max(powers) * (end - start) + 1e-6
