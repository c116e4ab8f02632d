"""Energy over a window, against values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accelmark.results.figures import FigureName
from accelmark.results.read.telemetry import Samples, read_samples
from accelmark.results.rounds.consumption import EnergyReason, consumption_figures, energy
from accelmark.results.schema import Figure

RAMP = [(0.0, 100.0), (1.0, 200.0), (2.0, 300.0), (3.0, 300.0)]


def test_power_over_a_covered_window_gives_its_energy() -> None:
    found = energy(RAMP, 0.5, 2.5)
    assert found.energy_j == pytest.approx(487.5)
    assert found.reasons == ()


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
    assert found.energy_j is None
    assert reason in found.reasons


def test_a_gap_of_more_than_three_seconds_between_power_readings_is_a_reason() -> None:
    points = [(0.0, 100.0), (3.5, 100.0), (4.0, 100.0)]
    found = energy(points, 1.0, 4.0)
    assert found.energy_j == pytest.approx(300)
    assert found.reasons == (EnergyReason.GAP_TOO_LONG,)
    assert energy(points, 1.0, 4.0, max_gap_s=4).reasons == ()
    assert energy(points, 3.6, 4.0).reasons == ()  # the gap is outside the window


def test_the_energy_counter_is_the_figure_and_integrated_power_the_cross_check() -> None:
    power = [(0.0, 100.0), (1.0, 100.0), (2.0, 100.0)]
    near = [(0.0, 5000.0), (2.0, 5000.0 + 209.0)]
    far = [(0.0, 5000.0), (2.0, 5000.0 + 211.0)]
    found = energy(power, 0, 2, near)
    assert found.energy_j == pytest.approx(209)
    assert found.reasons == ()
    found = energy(power, 0, 2, far)
    assert found.energy_j == pytest.approx(211)
    assert found.reasons == (EnergyReason.COUNTER_DISAGREES,)


def test_a_decreasing_counter_is_a_reason_and_integrated_power_is_used() -> None:
    found = energy([(0.0, 100.0), (2.0, 100.0)], 0, 2, [(0.0, 900.0), (1.0, 10.0), (2.0, 110.0)])
    assert found.energy_j == pytest.approx(200)
    assert found.reasons == (EnergyReason.COUNTER_WENT_BACK,)


def test_a_counter_alone_gives_energy() -> None:
    found = energy([], 0.5, 1.5, [(0.0, 1000.0), (1.0, 1100.0), (2.0, 1300.0)])
    assert found.energy_j == pytest.approx(150)
    assert found.reasons == ()
    assert energy([], 0.5, 3, [(0.0, 1000.0), (1.0, 1100.0)]).reasons == (EnergyReason.END_NOT_COVERED,)


def _samples(path: Path, infos: list[dict[str, Any]], devices: list[dict[str, Any]], count: int = 4) -> Samples:
    lines: list[dict[str, Any]] = [{"header": {"interval_s": 1.0, "devices": infos}}]
    for t in range(count):
        # Power varies by a thousandth, as that of a sensor does.
        read = [
            {**one, "power_w": (1 + 0.001 * (t % 2)) * one["power_w"]} if one["power_w"] else one for one in devices
        ]
        lines.append({"t": float(t), "host": {}, "devices": read})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_samples(path)


def _energy_of(samples: Samples) -> Figure:
    return consumption_figures({"host": (samples, [(0.5, 2.5)])}, 1, "cuda", "")[0][FigureName.ENERGY]


def test_the_energy_of_several_devices_needs_all_of_them(tmp_path: Path) -> None:
    infos: list[dict[str, Any]] = [{"index": 0}, {"index": 1, "reasons": {"power_w": "no sensor"}}]
    both = _samples(tmp_path / "both", infos, [{"index": 0, "power_w": 100}, {"index": 1, "power_w": 50}])
    assert _energy_of(both).value == pytest.approx(300, rel=1e-3)
    one = _samples(tmp_path / "one", infos, [{"index": 0, "power_w": 100}, {"index": 1, "power_w": None}])
    assert (_energy_of(one).value, _energy_of(one).reason) == (None, "device 1: no sensor")


def test_two_dies_on_one_card_are_counted_once(tmp_path: Path) -> None:
    infos: list[dict[str, Any]] = [{"index": 0, "power_in": 1}, {"index": 1, "power_in": None}]
    samples = _samples(tmp_path / "dies", infos, [{"index": 0, "power_w": None}, {"index": 1, "power_w": 100}])
    assert _energy_of(samples).value == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize(("end", "is_marked"), [(29.9, True), (31.0, False)])
def test_energy_over_less_than_half_a_minute_is_marked(end: float, is_marked: bool, tmp_path: Path) -> None:
    samples = _samples(tmp_path / "t.jsonl", [{"index": 0}], [{"index": 0, "power_w": 100.0}], 40)
    figures, warnings = consumption_figures({"host": (samples, [(0.5, end)])}, 1, "cuda", "")
    assert figures[FigureName.ENERGY].value == pytest.approx(100 * (end - 0.5), rel=1e-3)
    assert any("a published figure needs 30 s" in warning for warning in warnings) is is_marked


@pytest.mark.parametrize(("count", "is_published"), [(5, True), (6, False)])
def test_power_that_never_varies_is_not_published(count: int, is_published: bool, tmp_path: Path) -> None:
    path = tmp_path / "constant.jsonl"
    lines: list[dict[str, Any]] = [{"header": {"interval_s": 1.0, "devices": [{"index": 0}]}}]
    lines += [{"t": float(t), "host": {}, "devices": [{"index": 0, "power_w": 12}]} for t in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = _energy_of(read_samples(path))
    assert (found.value is not None) is is_published
    assert is_published or found.reason == "device 0: all 6 readings of power are 12 W, idle and busy"
