"""The web application: routes, access by loopback host names or a token, response headers, start and shutdown."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from accelmark.report.templating import fill, text_of
from accelmark.report.view.index import RunIndex
from accelmark.report.view.pages import Pages, message, respond
from accelmark.spec.errors import RequestError

COOKIE: Final = "accelmark_token"
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{20,256}")
_STATIC: Final = {
    "page.css": "text/css",
    "runs/runs.css": "text/css",
    "theme.js": "text/javascript",
    "run/live.js": "text/javascript",
}
_MAX_BODY: Final = 4096
_SHUTDOWN_S: Final = 3


class Access(NamedTuple):
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


def make_app(index: RunIndex, access: Access) -> Starlette:
    """Return the application: GET and HEAD of pages, and the POST that signs in."""
    pages = Pages(index)
    routes = [
        Route("/static/{name:path}", _static),
        Route("/sign-in", _sign_in(access), methods=["POST"]),
        Route("/run/{name:path}", pages.run),
        *(Route(path, endpoint) for path, endpoint in pages.endpoints.items()),
    ]

    async def check(request: Request, proceed: RequestResponseEndpoint) -> Response:
        if not access.names_this_machine(request):
            return message("Misdirected request", "This server answers only to the names of this machine.", 421)
        is_open = request.url.path == "/sign-in" or request.url.path.startswith("/static/")
        if not is_open and not access.accepts(token_of(request)):
            reply = respond(fill("sign_in.html", served=True, title="Sign in", wrong=False), status=401)
            reply.headers["WWW-Authenticate"] = "Bearer"
            return reply
        return await proceed(request)

    return Starlette(
        routes=routes,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=check)],
        exception_handlers={HTTPException: _http_error, RequestError: _bad_request, Exception: _failed},
    )


def server_for(app: Starlette) -> uvicorn.Server:
    """Return a server that runs until SIGINT or SIGTERM and then gives open responses a few seconds to finish."""
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
        server_header=False, timeout_graceful_shutdown=_SHUTDOWN_S,
    )  # fmt: skip
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """Return a bound, listening socket; port 0 takes a free one. Raises RequestError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise RequestError(f"{host}:{port}: cannot listen: {error.strerror}; try --port 0") from error


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        raise HTTPException(404)
    return respond(text_of(name), _STATIC[name])


def _sign_in(access: Access) -> Callable[[Request], object]:
    async def sign_in(request: Request) -> Response:
        if access.token is None:
            raise HTTPException(405)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY:
                return message("Request too large", "A token has at most 256 characters.", 413)
        token = (parse_qs(body.decode("utf-8", errors="replace")).get("token") or [""])[0].strip()
        if not access.accepts(token):
            return respond(fill("sign_in.html", served=True, title="Sign in", wrong=True), status=403)
        reply = Response(status_code=303, headers={"Location": "/"})
        reply.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return reply

    return sign_in


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    if error.status_code == 405:
        reply = message("Read-only", "Nothing can be changed here.", 405)
        reply.headers["Allow"] = "GET, HEAD"
        return reply
    return message("Page not found", "The run may have been moved or renamed.", error.status_code)


def _bad_request(request: Request, error: Exception) -> Response:
    return message("This page cannot be shown", str(error), 400)


def _failed(request: Request, error: Exception) -> Response:
    print(f"view: {request.url.path!r}: {type(error).__name__}: {error}", file=sys.stderr)
    return message("This page failed", "The server printed the error on its terminal.", 500)
