"""Detect and remove secrets: values of variables with certain names, and the user part of addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

LEFT_OUT: Final = "(left out)"
MIN_SECRET_LENGTH: Final = 4
"""Minimum length of a searched secret; shorter values would match parts of unrelated words."""

_NAME: Final = re.compile(r"KEY|TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH(?!OR)", re.IGNORECASE)
_ASSIGNED: Final = re.compile(r"(?:-\S*=)?([A-Za-z_][A-Za-z0-9_]*)=(.+)", re.DOTALL)
_INNER: Final = r"[^\s/?#\"'<>\\]"
_USERINFO: Final = re.compile(rf"((?<!ssh)://|://(?={_INNER}*:{_INNER}*@))({_INNER}+)@", re.ASCII)
"""A user without a password in an SSH address (``git@``) is no secret; in other addresses it may be a token."""
_PLAIN: Final = frozenset({"true", "false", "none", "null", "auto", "default", "enabled", "disabled"})


def is_secret(name: str) -> bool:
    """Return whether a variable's name marks its value as a secret."""
    return _NAME.search(name) is not None


def without_userinfo(text: str) -> str:
    """Return ``text`` without the part between ``://`` and ``@`` of its addresses."""
    return _USERINFO.sub(rf"\g<1>{LEFT_OUT}@", text) if "://" in text else text


def displayed_value(name: str, value: str) -> str:
    """Return a variable's value for display, masked if it is a secret."""
    return LEFT_OUT if is_secret(name) else without_userinfo(value)


def passwords(text: str) -> Iterator[str]:
    """Yield the passwords of the addresses in ``text``, as written and decoded."""
    for address in _USERINFO.finditer(text):
        password = address[2].partition(":")[2]
        if is_searchable(password):
            yield from {password, unquote(password)}


def is_searchable(value: str) -> bool:
    """Return whether a value can be searched for; switches, small numbers and short words cannot."""
    return len(value) >= MIN_SECRET_LENGTH and value.lower() not in _PLAIN and not (value.isdigit() and len(value) < 8)


def secrets_in(value: Any) -> Iterator[str]:
    """Yield all secrets of parsed JSON: of every ``environment``, of ``NAME=value`` texts, and of addresses."""
    if isinstance(value, str):
        yield from passwords(value)
        assigned = _ASSIGNED.fullmatch(value)
        if assigned and is_secret(assigned[1]) and is_searchable(assigned[2]) and assigned[2] != LEFT_OUT:
            yield assigned[2]
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name == "environment" and isinstance(item, Mapping):
                named = (str(text) for key, text in item.items() if is_secret(str(key)))
                yield from (text for text in named if is_searchable(text) and text != LEFT_OUT)
            yield from secrets_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from secrets_in(item)


def without(text: str, secrets: Iterable[str]) -> str:
    """Return ``text`` without ``secrets`` and without the user part of its addresses."""
    text = without_userinfo(text)
    for secret in sorted(set(secrets), key=len, reverse=True):
        text = text.replace(secret, LEFT_OUT)
    return text


def shown(value: Any, secrets: Iterable[str]) -> Any:
    """Return parsed JSON for display, with ``secrets`` and the values of secret variables replaced."""
    known = tuple(secrets)
    if isinstance(value, str):
        return without(value, known)
    if isinstance(value, Mapping):
        return {
            name: {key: LEFT_OUT if is_secret(key) else shown(text, known) for key, text in item.items()}
            if name == "environment" and isinstance(item, Mapping)
            else shown(item, known)
            for name, item in value.items()
        }
    return [shown(item, known) for item in value] if isinstance(value, (list, tuple)) else value
