"""Start processes as forks of a process that has imported their modules, so that a test does not wait for the import.

``Forked`` takes the place of ``subprocess.Popen``: the forks run the same module with the same arguments, descriptors,
environment and log. ``python -m tests.fork_server`` is the process that forks.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final, NoReturn

_ABOVE: Final = 500
"""Descriptors are first copied to numbers from here, so that none replaces another."""
_LARGEST: Final = 1 << 20
_DEATH_SIGNAL: Final = 1


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


@functools.cache
def _server() -> ForkServer:
    """Return the server of this process, which ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


class Forked:
    """A fork, with what the tests and ``WorkerProcess`` use of ``Popen``.

    ``imports`` names further modules that the server imports before it forks.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[bytes],
        pass_fds: Sequence[int] = (),
        imports: Sequence[str] = (),
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        _, option, *words = command  # ``python -m MODULE``, or ``python -c CODE MODULE`` of module_command
        module, *arguments = words[1:] if option == "-c" else words
        request: dict[str, object] = {"module": module, "arguments": arguments, "environment": dict(environment)}
        request |= {"imports": list(imports), "descriptors": list(pass_fds), "parent": os.getpid()}
        self.pid: int = _server().ask(request, [*pass_fds, log.fileno()])

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        return code

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _server().ask({"wait": self.pid})
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def serve(connection: socket.socket) -> None:
    """Fork and wait on request until the connection is closed."""
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
            for module in (request["module"], *request["imports"]):
                with contextlib.suppress(Exception):  # the fork imports it again, and reports the error
                    importlib.import_module(module)
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
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)  # it ends with the server
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in received]
        *numbers, log = copies
        for copy, number in zip([*numbers, log, log], [*request["descriptors"], 1, 2], strict=True):
            os.dup2(copy, number)
        for copy in copies:
            os.close(copy)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
        parents = {str(request["parent"]): str(os.getppid())}
        sys.argv = [request["module"], *(parents.get(each, each) for each in request["arguments"])]
        code = importlib.import_module(request["module"]).main(sys.argv[1:]) or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:  # noqa: BLE001 - the exit code reports it
        traceback.print_exc()
    finally:
        for worker in multiprocessing.active_children():
            worker.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
