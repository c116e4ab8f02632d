"""Access control: loopback host names, and the token that other machines need."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from starlette.requests import Request

from accelmark.spec.errors import RequestError

COOKIE: Final = "accelmark_token"
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{20,256}")


@final
@dataclass(frozen=True, slots=True)
class Access:
    """Who may read the pages: any process on this machine, or any client that presents the token."""

    token: str | None
    hosts: frozenset[str] | None
    """Host names that a request may use (protection from DNS rebinding); None: any, since a token is required."""

    @classmethod
    def to(cls, host: str, token: str | None) -> Access:
        """Return the access rules of a server that listens on ``host``."""
        names = frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if is_loopback(host) else None
        return cls(token, names)

    def accepts(self, token: str) -> bool:
        """Compare with the token in constant time."""
        return self.token is None or hmac.compare_digest(token.encode(), self.token.encode())

    def names_this_machine(self, request: Request) -> bool:
        """Return whether the Host header is one that this server may be called by."""
        host = request.headers.get("host", "").lower()
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return self.hosts is None or name in self.hosts


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_of(request: Request) -> str:
    """Return the token of a request's Authorization header or cookie; empty where it has none."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    # Not ``request.cookies``: http.cookies rejects a header in which another application's cookie is malformed.
    for part in request.headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def read_or_create_token(path: Path) -> str:
    """Return the token in ``path``; a missing file is created with a new one, readable by its owner only.

    Raises RequestError if the file cannot be read or written, is readable by other users, or has no token.
    """
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        if path.stat().st_mode & 0o077:
            raise RequestError(f"{path}: other users can read or write the token file: run chmod 600 on it")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be used as the token file: {error}") from error
    if not _TOKEN.fullmatch(token):
        raise RequestError(f"{path}: a token is one line of 20 to 256 letters, digits, - and _")
    return token
