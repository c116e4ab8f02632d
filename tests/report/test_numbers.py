from __future__ import annotations

import pytest

from accelmark.report.numbers import THIN, quantity, scale_of
from accelmark.results.figures.definitions import FIGURES, FigureName


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (12345.6, "images/s", "12,346 images/s"),
        (0.012345, "J", "0.01235 J"),
        (0.4235, "ratio", "42.4 %"),
        (59.5, "s", "59.50 s"),
        (3000, "s", "50.00 min"),
        (90000, "s", "25.00 h"),
        (512, "MiB", "512.0 MiB"),
        (81920, "MiB", "80.00 GiB"),
        (1.5e6, "J", "1,500 kJ"),
        (1.5e8, "J", "150.0 MJ"),
        (8e9, "FLOP", "8.000 GFLOP"),
        (0, "s", "0 s"),
        (-3.5, "", "−3.500"),
        (1.25e-7, "J", "1.250×10⁻⁷ J"),
        (None, "s", "–"),
    ],
)
def test_numbers_are_short_and_carry_their_unit(value: float | None, unit: str, shown: str) -> None:
    assert quantity(value, unit).replace(THIN, " ") == shown


def test_rounds_share_the_scale_of_their_mean() -> None:
    scale = scale_of(700.0, "s")
    assert (scale.unit, scale.number(590.0)) == ("min", "9.833")


def test_every_figure_has_its_words() -> None:
    assert set(FIGURES) == set(FigureName)
