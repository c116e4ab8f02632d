"""Who may join a Ray cluster: a token of our own for those that we start, the site's for one that runs already."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

_MODE: Final = "RAY_AUTH_MODE"
_TOKEN: Final = "RAY_AUTH_TOKEN"  # noqa: S105 - the name of a variable
_PATH: Final = "RAY_AUTH_TOKEN_PATH"


@cache
def own_token() -> str:
    """Return this process's token; one for all its clusters, since Ray keeps the first that it reads."""
    return secrets.token_hex(32)


@contextmanager
def guarded() -> Iterator[str]:
    """Let only those who have our token, which is given, into clusters started meanwhile. Nothing is written down.

    Left to itself, Ray would leave a token in the user's home, and say so on the terminal.
    """
    with _environment({_MODE: "token", _TOKEN: own_token()}):
        yield own_token()


@contextmanager
def showing_what_is_there() -> Iterator[None]:
    """Have Ray show the token of this machine, where there is one, when it joins a cluster.

    ``ray start`` uses a token that it finds, a program that joins does not unless told to: without this a cluster that
    ``ray start --head`` made here would refuse us.
    """
    there = _MODE not in os.environ and has_token()
    with _environment({_MODE: "token"} if there else {}):
        yield


def has_token() -> bool:
    """Tell whether there is a token at any of the places where Ray looks for one."""
    named = os.environ.get(_PATH)
    place = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return bool(os.environ.get(_TOKEN)) or place.is_file()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
