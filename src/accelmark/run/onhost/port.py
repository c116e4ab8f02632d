"""Check a port between hosts.

``port listen PORT TOKEN`` answers connections with the token until standard input ends; ``port reach ADDRESS PORT TOKEN
TIMEOUT`` checks that this listener answers. Each prints one line of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import time


def report(**values: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def listen(port: int, token: str) -> None:
    """Answer connections with the token, for a minute at most."""
    server = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
    try:
        if server.family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
    except OSError as error:
        report(ok=False, busy=error.errno == errno.EADDRINUSE, why=error.strerror)
        return
    server.listen(128)
    report(ok=True)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ready, _, _ = select.select([server.fileno(), 0], [], [], 1)
        if 0 in ready and not os.read(0, 4096):
            return
        if server.fileno() in ready:
            peer, _ = server.accept()
            with peer:
                peer.sendall(token.encode())


def reach(address: str, port: int, token: str, timeout: float) -> None:
    """Connect to the listener."""
    try:
        with socket.create_connection((address, port), timeout) as peer:
            ok = peer.makefile("rb").read(len(token)) == token.encode()
        report(ok=ok, why=None if ok else "another program answers")
    except OSError as error:
        report(ok=False, why=error.strerror or str(error))


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(int(sys.argv[2]), sys.argv[3])
    else:
        reach(sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
