"""A server over made runs, for tests: on a free port, in a thread of this process."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelmark.report.serve.index import RunIndex
from accelmark.report.serve.server import make_server


@contextmanager
def serving(directory: Path, token: str | None = None) -> Iterator[int]:
    """Serve a directory; yield the port."""
    server = make_server(RunIndex(directory), "127.0.0.1", 0, token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Asked:
    """One reply."""

    def __init__(self, port: int, path: str, method: str = "GET", body: str | None = None, **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        self.status, self.headers = reply.status, dict(reply.getheaders())
        self.text = reply.read().decode()
        connection.close()
