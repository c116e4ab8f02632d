"""Start a server as a child process on cores of its own, wait until it is healthy, and stop it with its children."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from accelmark.serving.request import ServeError, Watch
from accelmark.spec.errors import DataError, raising
from accelmark.spec.log.inference import StartTimes
from accelmark.spec.plugins.programs import ServerSpec, fill
from accelmark.spec.settings.training import Scalar


class Cores(NamedTuple):
    """Cores of a run; both have all cores where they are not divided."""

    server: tuple[int, ...]
    client: tuple[int, ...]

    @classmethod
    def divided(cls, num_client: int) -> Cores:
        """Give the client the last ``num_client`` of this process's cores; both all if the server would have none."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        if len(cores) <= num_client:
            return cls(cores, cores)
        return cls(cores[:-num_client], cores[-num_client:])


@contextmanager
def started_on(cores: Sequence[int]) -> Iterator[None]:
    """Let processes that this thread starts inside run on ``cores`` only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


HOST: Final = "127.0.0.1"
LOG_FILE: Final = "server.log"
_REPORT_S: Final = 1.0
_STOP_S: Final = 20.0


class ServerProcess:
    """A running server."""

    def __init__(
        self,
        spec: ServerSpec,
        model_dir: Path,
        node_dir: Path,
        *,
        device: str,
        num_devices: int,
        settings: Mapping[str, Scalar],
        cores: Sequence[int],
        report: Watch = lambda: None,
    ) -> None:
        """Let the server's declaration convert the model, and start the server on ``cores``."""
        self.spec = spec
        self.peak_memory_mib: float | None = None
        """Largest resident memory of the server and its children so far."""
        self._sampled_s = 0.0
        self._cpu_s: dict[psutil.Process, float] = {}
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        self.endpoint = f"http://{HOST}:{port}{spec.api_path}"
        self._port = port
        values = {
            "python": sys.executable, "model_dir": str(model_dir), "host": HOST, "port": str(port),
            "device": device, "num_devices": str(num_devices), "node_dir": str(node_dir),
            "precision": str(settings.get("precision")),
        }  # fmt: skip
        begun_s, cpu_s = time.monotonic(), _ended_cpu_s()
        if spec.prepare:
            done = run_reporting(fill(spec.prepare, values), report, cwd=node_dir)
            if done.returncode:
                lines = f"{done.stdout}{done.stderr}".split("\n")
                raise DataError(f"{spec.title}: the model could not be converted{_last_of(lines)}")
        self._prepared = StartTimes(cpu_s=_ended_cpu_s() - cpu_s, wall_s=time.monotonic() - begun_s)
        self.command = tuple(spec.arguments(values, settings))
        self.log = node_dir / LOG_FILE
        self.started_s = time.monotonic()
        environment = os.environ | spec.environment
        if (threads := settings.get("threads")) is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        with (
            raising(partial(ServeError, end_reason="server_missing"), f"{self.command[0]}: cannot be started", OSError),
            self.log.open("wb") as stream,
            started_on(cores),
        ):
            self._process = subprocess.Popen(
                self.command, cwd=node_dir, env=environment, stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def wait_until_healthy(self, timeout_s: float, report: Watch) -> float:
        """Return the seconds from the start until the server answered its health check with status 200."""
        told_s = 0.0
        while True:
            self.check()
            waited_s = time.monotonic() - self.started_s
            if self._is_healthy():
                self._sample()
                return waited_s
            if waited_s > timeout_s:
                problem = f"{self.spec.title} did not answer {self.spec.health} with 200 within {timeout_s:g} s"
                problem += f"{self._last_lines()}; see {LOG_FILE}, or raise start_timeout_s"
                raise ServeError(problem, "never_healthy")
            if waited_s - told_s > _REPORT_S:
                told_s = waited_s
                report()
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=5.0)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", self.spec.health)
            return connection.getresponse().status == http.client.OK
        return False

    def times(self, start_s: float) -> StartTimes:
        """Return what conversion and start took, where :meth:`wait_until_healthy` has just returned ``start_s``."""
        cpu_s = self._prepared.cpu_s + sum(self._cpu_s.values())
        return StartTimes(cpu_s=cpu_s, wall_s=self._prepared.wall_s + start_s)

    def check(self) -> None:
        """Raise ServeError if the server has ended; sample its memory and CPU time."""
        code = self._process.poll()
        if code is not None:
            raise ServeError(f"{self.spec.title} ended by itself with status {code}{self._last_lines()}", "server_died")
        if time.monotonic() - self._sampled_s > 1.0:
            self._sample()

    def _sample(self) -> None:
        self._sampled_s = time.monotonic()
        alone, shared = 0, [0]
        for process in self._family():
            with suppress(psutil.Error):
                memory = process.memory_info()  # takes no lock of the process, as memory_full_info() does
                alone += memory.rss - getattr(memory, "shared", 0)
                shared.append(getattr(memory, "shared", 0))
        # The unshared parts, and the largest part that each may share.
        self.peak_memory_mib = max((alone + max(shared)) / 2**20, self.peak_memory_mib or 0.0)
        for process in self._started():
            with suppress(psutil.Error):
                self._cpu_s[process] = sum(process.cpu_times()[:2])

    def stop(self) -> None:
        """End the server and all its children: by SIGTERM, and those left after 20 s by SIGKILL."""
        left = self._family()
        for number, limit_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 5.0)):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            _, left = psutil.wait_procs(left, timeout=limit_s)
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def _started(self) -> list[psutil.Process]:
        """Return the server with all processes since its start, also those that the node agent adopted."""
        with suppress(psutil.Error):
            begun_s = psutil.Process(self._process.pid).create_time()
            every = psutil.Process(os.getppid()).children(recursive=True)
            return [process for process in every if process.create_time() >= begun_s]
        return []

    def _last_lines(self) -> str:
        return _last_of(self.log.read_text(errors="replace").splitlines())


def _last_of(lines: Sequence[str]) -> str:
    last = [line for line in lines if line.strip()][-5:]
    return f": {' / '.join(last)}" if last else " without output"


def run_reporting(command: Sequence[str], report: Watch, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; call ``report`` every second, since a rank that logs nothing is ended as stalled."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=cwd, stdout=pipe, stderr=pipe, text=True, errors="replace") as process:
        while True:
            try:
                output, errors = process.communicate(timeout=_REPORT_S)
            except subprocess.TimeoutExpired:
                report()
            except BaseException:
                process.kill()
                raise
            else:
                return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _ended_cpu_s() -> float:
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
