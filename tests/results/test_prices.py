"""The reader's prices: costs of results, and what a buyer asks about two chips."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.report.comparison import buyer_lines, render_comparison
from accelmark.report.run_page import render_page
from accelmark.results.comparison import compare
from accelmark.results.figures import FigureName
from accelmark.results.prices import Prices, costs_of, read_prices
from accelmark.spec.errors import SpecError
from tests.results.compared_runs import loaded

RENTED = "currency: EUR\ndevices: {X1: {per_hour: 3.6}, X2: {per_hour: 7.2}}\n"


def read(tmp_path: Path, text: str) -> Prices:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    prices = read_prices(file)
    assert prices is not None
    return prices


def test_costs_of_a_rented_device(tmp_path: Path) -> None:
    values = {FigureName.THROUGHPUT_TRAIN: 1000.0, FigureName.TIME_TO_TARGET: 100.0}
    costs = costs_of(read(tmp_path, RENTED), "train", "token", "X1", 2, values.get, units_per_epoch=5e6)
    assert {cost.title: cost.value for cost in costs} == {
        "Cost per million tokens": pytest.approx(2.0), "Cost per epoch": pytest.approx(10.0),
        "Cost to the target": pytest.approx(0.2),
    }  # fmt: skip
    assert not costs_of(read(tmp_path, RENTED), "train", "token", "unknown", 2, values.get)


def test_a_bought_device_costs_its_price_and_its_power(tmp_path: Path) -> None:
    text = "{currency: EUR, power_per_kwh: 0.2, pue: 1.5, devices: {X1: {price: 17532, years: 2}}}"
    prices = read(tmp_path, text)
    assert prices.device_hour("X1", 1000.0) == pytest.approx(1.0 + 0.3)
    assert prices.device_hour("X1", None) is None


def test_page_and_comparison_have_costs_and_a_buyer_s_answers(tmp_path: Path) -> None:
    prices = read(tmp_path, RENTED)
    slow, fast = loaded(tmp_path / "slow"), loaded(tmp_path / "fast", step_ms=4.0, hardware="X2")
    assert "Cost per million tokens" in render_page(slow, prices)
    assert "Cost per million tokens" not in render_page(slow)
    comparison = compare([slow, fast])
    (line,) = buyer_lines(comparison, prices)
    assert line.chips == "X2 against X1"
    assert line.faster.startswith("+")
    assert " to " in line.faster
    assert next(title for title, _, _ in line.costs) == "Cost per million tokens"
    page = render_comparison(comparison, prices=prices)
    assert page.index("For buyers") < page.index("Other differences")
    assert not buyer_lines(compare([slow, loaded(tmp_path / "other")]))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{currency: EUR, devices: {X1: {per_hour: -1}}}", "devices.X1.per_hour"),
        ("{currency: EUR, power_per_kwh: -0.1, devices: {X1: {per_hour: 1}}}", "power_per_kwh"),
        ("{currency: EUR, devices: {X1: {price: 1000}}}", "devices.X1"),
        ("{currency: EUR, pue: 0.5, devices: {X1: {per_hour: 1}}}", "pue"),
        ("devices: {X1: {per_hour: 1}}", "currency"),
    ],
)
def test_bad_prices_are_one_error(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    assert [problem.key for problem in caught.value.problems] == [key]
