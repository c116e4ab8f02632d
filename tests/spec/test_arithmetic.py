from __future__ import annotations

import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelmark.spec.number_format import THIN, duration, quantity, subtracted
from accelmark.spec.settings.inference import calculate

_Written = tuple[str, float]
_NUMBERS = st.floats(min_value=1e-3, max_value=1e6, allow_nan=False).map(lambda value: (repr(value), value))
_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def _pair(left: _Written, sign: str, right: _Written) -> _Written:
    return f"({left[0]} {sign} {right[0]})", _SIGNS[sign](left[1], right[1])


def _larger(inner: st.SearchStrategy[_Written]) -> st.SearchStrategy[_Written]:
    return st.builds(_pair, inner, st.sampled_from(sorted(_SIGNS)), inner)


@given(st.recursive(_NUMBERS, _larger, max_leaves=6))
def test_arithmetic_agrees_with_python(written: _Written) -> None:
    text, expected = written
    if len(text) <= 200:
        assert math.isclose(calculate(text), expected, rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("text", ["", "2**64", "__import__('os')", "1e999", "(1", "1 2", "a", "1/0", "9" * 201, "1,5"])
def test_other_input_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        calculate(text)


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (12345.6, "images/s", "12,346 images/s"),
        (0.012345, "J", "12.35 mJ"),
        (0.4235, "ratio", "42.4 %"),
        (59.5, "s", "59.50 s"),
        (3000, "s", "50.00 min"),
        (90000, "s", "25.00 h"),
        (81920, "MiB", "80.00 GiB"),
        (1.5e6, "J", "1,500 kJ"),
        (0, "s", "0 s"),
        (-3.5, "", "−3.500"),
        (1.25e-7, "J", "125.0 nJ"),
        (1.25e-7, "images/s", "1.250×10⁻⁷ images/s"),
        (5.716e-6, "TFLOP/s", "5.716 MFLOP/s"),
        (56.1e12, "OP/s", "56.10 TOP/s"),
        (0.0042, "ms", "4.200 µs"),
        (12345.0, "ms", "12.35 s"),
        (99.996, "W", "100.0 W"),
        (42.0, "trials", "42 trials"),
        (float("nan"), "s", "–"),
        (None, "s", "–"),
    ],
)
def test_a_value_is_shown_with_four_digits_and_its_unit(value: float | None, unit: str, shown: str) -> None:
    assert quantity(value, unit).replace(THIN, " ") == shown


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        (6.33804, 6.33516, ("6.3380", "6.3352", "0.0028")),
        (0.916544, 0.916602, ("0.916544", "0.916602", "−0.000058")),
        (0.9164, 0.9163, ("0.91640", "0.91630", "0.00010")),  # the difference of these floats is 0.0000999…
        (6.335, 6.335, ("6.335", "6.335", "0")),
        (1234.6, 1234.0, ("1,234.60", "1,234.00", "0.60")),
        (6.3350001, 6.335, ("6.335", "6.335", "1.0×10⁻⁷")),
    ],
)
def test_two_numbers_are_shown_so_that_they_give_their_difference(
    first: float, second: float, shown: tuple[str, str, str]
) -> None:
    assert subtracted(first, second) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(8.2, "8 s"), (125, "2 m 05 s"), (11_070, "3 h 04 m")])
def test_elapsed_times_are_in_whole_seconds(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
