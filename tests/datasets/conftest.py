"""A real https server on this machine, and a data set that it serves."""

from __future__ import annotations

import hashlib
import http.server
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accelmark.datasets.ensure import CACHE_VARIABLE
from accelmark.datasets.spec import DatasetSpec
from accelmark.spec.model import parse

CONTENT = {"train/a.bin": b"a" * 40_000, "b.txt": b"to be or not to be\n"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_of(content: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"path": path, "sha256": sha256(data), "bytes": len(data)} for path, data in content.items()]


def dataset(*sources: dict[str, Any], content: dict[str, bytes] = CONTENT, **more: Any) -> DatasetSpec:
    values = {
        "name": "toy",
        "title": "Toy set",
        "licence": "Apache-2.0",
        "files": files_of(content),
        "sources": sources,
    }
    return parse(DatasetSpec, {**values, **more}, "test")


def write(root: Path, content: dict[str, bytes] = CONTENT) -> Path:
    for path, data in content.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


@dataclass
class Web:
    """The server's contents and what it was asked; ``redirect`` and ``breaks_off`` say how it misbehaves."""

    base: str = ""
    content: dict[str, bytes] = field(default_factory=lambda: dict(CONTENT))
    asked: list[str] = field(default_factory=list)
    redirect: dict[str, str] = field(default_factory=dict)
    breaks_off: set[str] = field(default_factory=set)
    slow_s: float = 0.0

    def source(self) -> dict[str, str]:
        return {"kind": "url", "base": self.base}

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        path = handler.path.lstrip("/")
        self.asked.append(path)
        time.sleep(self.slow_s)
        if path in self.redirect:
            handler.send_response(302)
            handler.send_header("Location", self.redirect[path])
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        data = self.content.get(path)
        if data is None:
            handler.send_error(404)
            return
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2] if path in self.breaks_off else data)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    more = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(path), "-out", str(path) + ".crt"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    return path


@pytest.fixture
def web(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    """An https server that this process and its children trust."""
    state = Web()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{certificate}.crt", certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.base = f"https://localhost:{server.server_address[1]}/"
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for every test."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "datasets"


Reports = list[tuple[str, int, int | None]]


@pytest.fixture
def reports() -> Reports:
    """Calls of a progress callback."""
    return []


def collect_in(reports: Reports) -> Callable[[str, int, int | None], None]:
    return lambda what, done, total: reports.append((what, done, total))


def leftovers(cache: Path) -> list[str]:
    """Names in the cache that are neither a data set nor its lock."""
    return [path.name for path in cache.iterdir() if path.name.startswith(".")] if cache.exists() else []
