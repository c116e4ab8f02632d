from __future__ import annotations

import math

import pytest

from accelmark.results.figures import FigureName
from accelmark.results.rounds.summary import finding_texts, rounds_needed, spread, spread_warnings, student_t
from accelmark.results.schema import Figure, Finding, Spread


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (9, 2.26216), (29, 2.04523), (100, 1.98397)]
)
def test_the_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, rel=1e-5)


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


def test_one_round_has_no_interval() -> None:
    found = spread([Figure(value=5.0)])
    assert (found.mean, found.stdev, found.ci95, found.rounds_needed, found.num_rounds) == (5.0, None, None, None, 1)


def test_a_figure_nobody_measured_keeps_its_reason() -> None:
    found = spread([Figure(value=None, reason="no counter")] * 2)
    assert (found.mean, found.num_rounds, found.reason) == (None, 0, "no counter")


def test_no_rounds_at_all_say_so() -> None:
    assert spread([]).reason == "no round succeeded"


def test_a_warning_of_several_rounds_is_shown_once() -> None:
    one = Finding(severity="warning", rule="r", expected="e", actual="a")
    changes: tuple[dict[str, object], ...] = ({"round": 3}, {"round": 1}, {"actual": "b"}, {"severity": "error"})
    told = [one.model_copy(update=change) for change in changes]
    assert finding_texts(told, "warning") == ["rounds 1, 3: a (expected: e) [r]", "b (expected: e) [r]"]


def test_a_figure_that_fewer_rounds_have_says_how_many() -> None:
    def of(*values: float) -> Spread:
        return spread([Figure(value=value) for value in values])

    figures = {FigureName.THROUGHPUT_STEADY: of(1.0, 2.0, 3.0), FigureName.TIME_TO_TARGET: of(1.0, 2.0)}
    (warning,) = spread_warnings(figures)
    assert "after 3 rounds: throughput, steady ±124 %; time to target ±424 % (2 rounds)." in warning
