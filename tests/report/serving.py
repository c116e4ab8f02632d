"""A server over made runs, for tests: on a free port, in a thread of this process."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelmark.report.view import RunIndex, listen, make_app, server_for


@contextmanager
def serving(directory: Path, token: str | None = None) -> Iterator[int]:
    """Serve a directory; yield the port."""
    server = server_for(make_app(RunIndex(directory), "127.0.0.1", token))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


class Asked:
    """One reply."""

    def __init__(self, port: int, path: str, method: str = "GET", body: str | None = None, **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        self.status, self.headers = reply.status, reply.headers
        self.text = reply.read().decode()
        connection.close()
