"""Start engine processes as forks of a process that has imported PyTorch, so that a test does not wait for the import.

``Forked`` takes the place of ``subprocess.Popen`` in ``engine_process``; the forks run the same module with the same
arguments, descriptors, environment and log. ``python -m tests.infer.fork_server`` is the process that forks.
"""

from __future__ import annotations

import array
import fcntl
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

_ABOVE: Final = 500
"""Descriptors are first copied to numbers from here, so that none replaces another."""
_LARGEST: Final = 1 << 20


class ForkServer:
    """The process that forks, seen from the tests."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def ask(self, request: Mapping[str, object], descriptors: Sequence[int] = ()) -> Any:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.socket.sendmsg([json.dumps(request).encode()], rights)
        return json.loads(self.socket.recv(_LARGEST))

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # a data loader's worker may have inherited it, so closing is not enough
        self.socket.close()
        self.process.wait()


class Forked:
    """A fork, with what ``EngineProcess`` uses of ``Popen``."""

    def __init__(
        self, server: ForkServer, command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str], stdout: Any
    ) -> None:
        self._server = server
        self.args = command
        self.returncode: int | None = None
        _, _, module, *arguments = command
        request = {"module": module, "arguments": arguments, "descriptors": list(pass_fds), "environment": dict(env)}
        self.pid: int = server.ask(request | {"parent": os.getpid()}, [*pass_fds, stdout.fileno()])

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self._server.ask({"wait": self.pid}) if self.returncode is None else self.returncode) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        self.returncode = code
        return code

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def serve(connection: socket.socket) -> None:
    """Fork and wait on request until the connection is closed."""
    importlib.import_module("accelmark.infer.process.worker")
    while True:
        message, rights, _, _ = connection.recvmsg(_LARGEST, socket.CMSG_SPACE(64))
        if not message:
            return
        request = json.loads(message)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        else:
            received = array.array("i")
            for _, _, data in rights:
                received.frombytes(data)
            reply = os.fork()
            if reply == 0:
                connection.close()
                _run(request, received)
            for descriptor in received:
                os.close(descriptor)
        connection.send(json.dumps(reply).encode())


def _run(request: Mapping[str, Any], received: Sequence[int]) -> NoReturn:
    """Run a module's ``main`` in a fork; its parent is this module's process, not that of the test."""
    code = 1
    try:
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in received]
        *numbers, log = copies
        for copy, number in zip([*numbers, log, log], [*request["descriptors"], 1, 2], strict=True):
            os.dup2(copy, number)
        for copy in copies:
            os.close(copy)
        os.environ.clear()
        os.environ.update(request["environment"])
        parents = {str(request["parent"]): str(os.getppid())}
        sys.argv = [request["module"], *(parents.get(each, each) for each in request["arguments"])]
        importlib.import_module(request["module"]).main(sys.argv[1:])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:  # noqa: BLE001 - the exit code reports it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
