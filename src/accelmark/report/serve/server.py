"""The HTTP side: who may ask, what is answered, which headers go with it."""

from __future__ import annotations

import hmac
import ipaddress
import re
import sys
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from accelmark.report.serve.index import RunIndex
from accelmark.report.serve.pages import HTML, Pages, Reply, message
from accelmark.report.shell import fill, text_of

COOKIE: Final = "accelmark_token"
_STATIC: Final = {
    "/static/page.css": ("page.css", "text/css; charset=utf-8"),
    "/static/runs.css": ("runs.css", "text/css; charset=utf-8"),
    "/static/theme.js": ("theme.js", "text/javascript; charset=utf-8"),
    "/static/live.js": ("live.js", "text/javascript; charset=utf-8"),
}
_POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_INLINE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""For the page of a run, rendered here from its results with everything escaped: it may ask nothing of anybody."""
_MOST_BODY: Final = 4096


_LENGTH: Final = re.compile(r"[0-9]{1,9}")


@final
@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask: everybody on this machine, or whoever holds the token."""

    token: str | None
    hosts: frozenset[str] | None
    """Names that a request may address the server by (against DNS rebinding); None: any, since a token guards it."""

    def admits(self, presented: str) -> bool:
        """Tell whether ``presented`` is the token, in a time that does not depend on it."""
        return self.token is None or hmac.compare_digest(presented.encode(), self.token.encode())


def is_loopback(host: str) -> bool:
    """Tell whether an address reaches only this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(index: RunIndex, host: str, port: int, token: str | None) -> ThreadingHTTPServer:
    """Return a server that is bound and not yet serving.

    Raises:
        OSError: the address cannot be bound.
    """
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host.lower()}) if is_loopback(host) else None
    pages, access = Pages(index), Access(token, hosts)

    class Handler(_Handler):
        pass

    Handler.pages, Handler.access = pages, access
    family = ThreadingHTTPServer
    if ":" in host:
        import socket

        class Six(ThreadingHTTPServer):
            address_family = socket.AF_INET6

        family = Six
    server = family((host, port), Handler)
    server.daemon_threads = True
    return server


def _malformed() -> Reply:
    return message("This cannot be shown", "The address is malformed.", 400)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD, and the POST that signs in; everything else is refused."""

    pages: Pages
    access: Access
    timeout = 30
    server_version = "AccelMark"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        split = self._address()
        if split is None:
            return
        if split.path != "/sign-in" or self.access.token is None:
            self._send(message("Read-only", "Nothing here can be changed.", 405))
            return
        length = self.headers.get("Content-Length", "")
        if not _LENGTH.fullmatch(length) or int(length) > _MOST_BODY:
            self._send(message("Too much", "A token is shorter.", 413))
            return
        body = parse_qs(self.rfile.read(int(length)).decode("utf-8", errors="replace"))
        presented = (body.get("token") or [""])[0].strip()
        if not self.access.admits(presented):
            self._send(Reply(fill("sign_in.html", served=True, title="Sign in", wrong=True), status=403))
            return
        self.send_response(303)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{COOKIE}={presented}; HttpOnly; SameSite=Strict; Path=/")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self) -> None:
        split = self._address()
        if split is None:
            return
        path = unquote(split.path)
        if self.access.hosts is not None and self._asked_host() not in self.access.hosts:
            self._send(message("Misdirected", "This server answers only to names of this machine.", 421))
        elif path in _STATIC:
            name, kind = _STATIC[path]
            self._send(Reply(text_of(name), kind))
        elif not self.access.admits(self._presented()):
            self._send(Reply(fill("sign_in.html", served=True, title="Sign in", wrong=False), status=401))
        else:
            try:
                query = parse_qs(split.query, max_num_fields=200)
            except ValueError:
                self._send(_malformed())
                return
            try:
                reply = self.pages.reply(path, query)
            except Exception as error:  # noqa: BLE001 - one page that fails must not end the server
                print(f"serve: {path!r}: {type(error).__name__}: {error}", file=sys.stderr)
                reply = message("This page failed", "The server's terminal says why.", 500)
            self._send(reply)

    def _address(self) -> SplitResult | None:
        """Return what was asked for; None where that is no address, which is answered here."""
        try:
            return urlsplit(self.path)
        except ValueError:
            self._send(_malformed())
            return None

    def _asked_host(self) -> str:
        asked = self.headers.get("Host", "").lower()
        return asked[1:].partition("]")[0] if asked.startswith("[") else asked.partition(":")[0]

    def _presented(self) -> str:
        scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return bearer.strip()
        # Not by http.cookies, which stops at the first cookie that it does not like: others' stand beside ours.
        for part in self.headers.get("Cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == COOKIE:
                return value
        return ""

    def _send(self, reply: Reply) -> None:
        body = reply.body.encode("utf-8")
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(body)))
        if reply.kind == HTML:
            self.send_header("Content-Security-Policy", _INLINE_POLICY if reply.inline else _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        if reply.status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if reply.status == 405:
            self.send_header("Allow", "GET, HEAD")
        try:
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        except ConnectionError:  # whoever asked has gone
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing: addresses and headers of requests are nobody's business, and hold the token."""
