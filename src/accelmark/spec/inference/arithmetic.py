"""Arithmetic on numbers, for FLOP counts such as ``2*512*0.33e9``: parsed, never evaluated as code."""

from __future__ import annotations

import math
import re
from typing import Final

_TOKEN: Final = re.compile(r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|(?P<sign>[-+*/()]))")
_MAX_CHARACTERS: Final = 200
_MAX_NESTING: Final = 20
"""Maximum nesting of parentheses and signs."""


def calculate(text: str) -> float:
    """Return the value of ``text``: decimal numbers, ``+ - * /`` and parentheses.

    Raises:
        ValueError: it contains anything else, divides by zero, nests too deeply, or is not finite.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"is longer than {_MAX_CHARACTERS} characters")
    tokens = _tokens(text)
    value, rest = _sum(tokens, 0)
    if rest:
        raise ValueError(f"cannot be read from {rest[0]!r} on")
    if not math.isfinite(value):
        raise ValueError("is not finite")
    return value


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"is not arithmetic on numbers: {text[at:].strip()[:20]!r} (only numbers and + - * / ( ))")
        tokens.append(match.group("number") or match.group("sign"))
        at = match.end()
    return tokens


def _sum(tokens: list[str], depth: int) -> tuple[float, list[str]]:
    value, rest = _product(tokens, depth)
    while rest and rest[0] in "+-":
        sign = rest[0]
        term, rest = _product(rest[1:], depth)
        value = value + term if sign == "+" else value - term
    return value, rest


def _product(tokens: list[str], depth: int) -> tuple[float, list[str]]:
    value, rest = _atom(tokens, depth)
    while rest and rest[0] in "*/":
        sign = rest[0]
        factor, rest = _atom(rest[1:], depth)
        if sign == "/" and factor == 0:
            raise ValueError("divides by zero")
        value = value * factor if sign == "*" else value / factor
    return value, rest


def _atom(tokens: list[str], depth: int) -> tuple[float, list[str]]:
    if depth > _MAX_NESTING:
        raise ValueError(f"nests deeper than {_MAX_NESTING} levels")
    if not tokens:
        raise ValueError("ends where a number is expected")
    first, *rest = tokens
    if first in "+-":
        value, rest = _atom(rest, depth + 1)
        return (value if first == "+" else -value), rest
    if first == "(":
        value, rest = _sum(rest, depth + 1)
        if not rest or rest[0] != ")":
            raise ValueError("has a parenthesis that is not closed")
        return value, rest[1:]
    if first in ")*/":
        raise ValueError(f"has {first!r} where a number is expected")
    return float(first), rest
