"""Read the options of an engine (``engine_options``)."""

from __future__ import annotations

from collections.abc import Mapping

from accelmark.spec.errors import RequestError, nearest
from accelmark.spec.settings.inference import EngineOption


def number_option(options: Mapping[str, EngineOption], name: str, default: int, *, least: int = 0) -> int:
    """Return an integer option of an engine.

    Raises:
        RequestError: it is not an integer of at least ``least``.
    """
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"engine_options.{name} must be an integer of at least {least}, found {value!r}")
    return value


def text_options(options: Mapping[str, EngineOption], name: str) -> tuple[str, ...]:
    """Return an option that is one string or a list as a tuple of strings; empty if it is not set."""
    value = options.get(name)
    if value is None:
        return ()
    return tuple(str(each) for each in value) if isinstance(value, tuple) else (str(value),)


def switch_option(options: Mapping[str, EngineOption], name: str, *, default: bool = False) -> bool:
    """Return an option that is on or off.

    Raises:
        RequestError: it is neither true nor false.
    """
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"engine_options.{name} must be true or false, found {value!r}")
    return value


def choice_option(options: Mapping[str, EngineOption], name: str, choices: Mapping[str, str], default: str) -> str:
    """Return what ``choices`` has for the value of an option.

    Raises:
        RequestError: it is none of them.
    """
    value = options.get(name, default)
    if not isinstance(value, str) or value not in choices:
        raise RequestError(f"engine_options.{name}: unknown value {value!r} ({nearest(str(value), choices)})")
    return choices[value]


def streams_option(options: Mapping[str, EngineOption]) -> int:
    """Return ``engine_options.streams``, the number of calls at the same time (1).

    Raises:
        RequestError: it is not an integer of at least 1.
    """
    return number_option(options, "streams", 1, least=1)
