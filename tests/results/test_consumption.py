from __future__ import annotations

import math
from array import array

import pytest

from accelmark.results.figures import FigureName as F
from accelmark.results.read.telemetry import Samples
from accelmark.results.rounds.consumption import consumption_figures, integrate

NAN = math.nan


def test_the_integral_of_a_constant_is_exact_with_interpolated_ends() -> None:
    found = integrate([0, 1, 2, 3], [10, 10, 10, 10], [(0.5, 2.5)], 5)
    assert (found.value, found.mean) == (20, 10)


def test_a_missing_value_is_bridged_up_to_the_largest_gap() -> None:
    assert integrate([0, 1, 2], [10, NAN, 10], [(0, 2)], 5).value == 20
    assert "a gap of 2.0 s" in (integrate([0, 1, 2], [10, NAN, 10], [(0, 2)], 1.5).reason or "")


def test_samples_that_end_early_leave_energy_null() -> None:
    assert integrate([0, 1, 2], [1, 1, 1], [(0, 10)], 5).value is None


def test_no_samples_and_no_time_have_reasons() -> None:
    assert integrate([], [], [(0, 1)], 5).reason == "no sample has a value"
    assert integrate([0.0], [NAN], [(0, 1)], 5).reason == "no sample has a value"
    assert integrate([0.0], [1.0], [], 5).reason == "nothing was measured"


def _samples(**header: bool) -> Samples:
    """Ten seconds of a host whose CPUs are 25 % busy and whose device is 80 % busy at 120 W."""
    columns = {"utilisation": array("d", [0.8] * 11), "power_w": array("d", [119.0, 121.0] * 5 + [119.0])}
    host = {"cpu": array("d", [0.25] * 11), "rapl_j": array("d", [50.0 * i for i in range(11)])}
    return Samples(header=dict(header), t=array("d", range(11)), host=host, devices={0: columns})


@pytest.mark.parametrize(
    ("header", "utilisation", "power_w"),
    [({"devices_are_cpus": False}, 0.8, 120.0), ({"devices_are_cpus": True}, 0.25, 50.0), ({}, 0.25, 50.0)],
)
def test_a_vendor_whose_framework_computes_on_cpu_has_the_figures_of_its_own_devices(
    header: dict[str, bool], utilisation: float, power_w: float
) -> None:
    figures, _ = consumption_figures({"here": (_samples(**header), [(1.0, 9.0)])}, 100, "cpu", "")
    assert figures[F.DEVICE_UTILISATION].value == pytest.approx(utilisation)
    assert figures[F.MEAN_POWER].value == pytest.approx(power_w)
    assert figures[F.CPU_UTILISATION].value == pytest.approx(0.25)
