from __future__ import annotations

import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2**64",
        "__import__('os')",
        "1e999",
        "2*",
        "(1",
        "1)",
        "1 2",
        "a",
        "1/0",
        "1//2",
        "*2",
        "9" * 201,
        "1,5",
        "()",
    ],
)
def test_other_input_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        calculate(text)
