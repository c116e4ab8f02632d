"""Start a server as a child process on cores of its own, wait until it is healthy, and stop it with its children."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final
from urllib.parse import urlsplit

import psutil

from accelmark.spec.errors import DataError, RunError, raising
from accelmark.spec.log.serving import StartTimes
from accelmark.spec.plugins.server import ServerSpec
from accelmark.spec.plugins.trainer import fill
from accelmark.spec.settings.training import Scalar

_HAS_AFFINITY: Final = hasattr(os, "sched_setaffinity")


@final
@dataclass(frozen=True)
class Cores:
    """Cores of a run; both have all cores where they are not divided."""

    server: tuple[int, ...]
    client: tuple[int, ...]

    @property
    def are_divided(self) -> bool:
        """Whether the client's cores are its own."""
        return not set(self.server) & set(self.client)

    @classmethod
    def divided(cls, num_client: int) -> Cores:
        """Give the client the last ``num_client`` of the cores that this process may use, and the server the others.

        They are not divided where that leaves the server none, or where the system cannot bind processes to cores.
        """
        cores = tuple(sorted(os.sched_getaffinity(0))) if _HAS_AFFINITY else tuple(range(os.cpu_count() or 1))
        if not _HAS_AFFINITY or len(cores) <= num_client:
            return cls(cores, cores)
        return cls(cores[:-num_client], cores[-num_client:])


@contextmanager
def started_on(cores: Sequence[int]) -> Iterator[None]:
    """Let processes that this thread starts inside run on ``cores`` only."""
    if not _HAS_AFFINITY:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


HOST: Final = "127.0.0.1"
LOG_FILE: Final = "server.log"
"""In the node's directory: output of the server."""
_POLL_S: Final = 0.1
_REPORT_S: Final = 1.0
_HEALTH_TIMEOUT_S: Final = 5.0
_STOP_S: Final = 20.0
_KILL_S: Final = 5.0
"""SIGKILL takes effect some time after it was sent."""
_LAST_LINES: Final = 5
_PAGE_MIB: Final = resource.getpagesize() / 2**20
_SAMPLE_S: Final = 1.0
"""Between two samples of the server's memory and CPU time."""


class ServerMissingError(RunError):
    """The server's program does not exist."""


class NeverHealthyError(RunError):
    """The server did not become healthy in time."""


class ServerDiedError(RunError):
    """The server ended by itself."""


@final
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
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """Let the server's declaration convert the model, and start the server on ``cores``.

        ``report`` is called every second of the conversion.

        Raises:
            ServerMissingError: its program does not exist.
            DataError: the model could not be converted.
        """
        self.spec = spec
        self.peak_memory_mib: float | None = None
        """Largest resident memory of the server and its children so far; null where the kernel does not report it."""
        self._sampled_s = 0.0
        self._cpu_s: dict[psutil.Process, float] = {}
        self.port = _free_port()
        values = {
            "python": sys.executable, "model_dir": str(model_dir), "host": HOST, "port": str(self.port),
            "device": device, "num_devices": str(num_devices), "node_dir": str(node_dir),
            "precision": str(settings.get("precision")),
        }  # fmt: skip
        begun_s, cpu_s = time.monotonic(), _ended_cpu_s()
        if spec.prepare:
            _prepare(spec, fill(spec.prepare, values), node_dir, report)
        self._prepared = StartTimes(cpu_s=_ended_cpu_s() - cpu_s, wall_s=time.monotonic() - begun_s)
        self.command = tuple(spec.arguments(values, settings))
        self.log = node_dir / LOG_FILE
        self.started_s = time.monotonic()
        missing = raising(ServerMissingError, f"{self.command[0]}: cannot be started", OSError)
        with missing, self.log.open("wb") as stream, started_on(cores):
            self._process = subprocess.Popen(
                self.command,
                cwd=node_dir,
                env=_environment(spec.environment, settings.get("threads")),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    @property
    def endpoint(self) -> str:
        """Base URL of the server's API."""
        return f"{self._address}{self.spec.api_path}"

    @property
    def _address(self) -> str:
        return f"http://{HOST}:{self.port}"

    def wait_until_healthy(self, timeout_s: float, report: Callable[[], None]) -> float:
        """Return the seconds from the start until the server answered its health check with status 200.

        Raises NeverHealthyError after ``timeout_s``, ServerDiedError if it ends before.
        """
        told_s = 0.0
        while True:
            self.check()
            waited_s = time.monotonic() - self.started_s
            if is_healthy(f"{self._address}{self.spec.health}"):
                self._sample()
                return waited_s
            if waited_s > timeout_s:
                problem = f"{self.spec.title} did not answer {self.spec.health} with 200 within {timeout_s:g} s"
                raise NeverHealthyError(f"{problem}{self._last_lines()}; see {LOG_FILE}, or raise start_timeout_s")
            if waited_s - told_s > _REPORT_S:
                told_s = waited_s
                report()
            time.sleep(_POLL_S)

    def times(self, start_s: float) -> StartTimes:
        """Return what conversion and start took, where :meth:`wait_until_healthy` has just returned ``start_s``."""
        cpu_s = self._prepared.cpu_s + sum(self._cpu_s.values())
        return StartTimes(cpu_s=cpu_s, wall_s=self._prepared.wall_s + start_s)

    def check(self) -> None:
        """Raise ServerDiedError if the server has ended; sample its memory and CPU time."""
        code = self._process.poll()
        if code is not None:
            raise ServerDiedError(f"{self.spec.title} ended by itself with status {code}{self._last_lines()}")
        if time.monotonic() - self._sampled_s > _SAMPLE_S:
            self._sample()

    def _sample(self) -> None:
        self._sampled_s = time.monotonic()
        if (used := _resident_mib(self._family())) is not None:
            self.peak_memory_mib = max(used, self.peak_memory_mib or 0.0)
        for process in self._started():
            with suppress(psutil.Error):
                self._cpu_s[process] = sum(process.cpu_times()[:2])

    def stop(self) -> None:
        """End the server and all its children: by SIGTERM, and those left after 20 s by SIGKILL."""
        family = self._family()
        for process in family:
            _signal(process.terminate)
        _, left = psutil.wait_procs(family, timeout=_STOP_S)
        for process in left:
            _signal(process.kill)
        psutil.wait_procs(left, timeout=_KILL_S)
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        """Return the server's process and all its children."""
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
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-_LAST_LINES:]
        return f": {' / '.join(lines)}" if lines else " without output"


def is_healthy(url: str) -> bool:
    """Return whether a GET of ``url`` is answered with status 200."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _prepare(spec: ServerSpec, command: Sequence[str], node_dir: Path, report: Callable[[], None]) -> None:
    done = run_reporting(command, report, cwd=node_dir)
    if done.returncode:
        lines = [line for line in f"{done.stdout}{done.stderr}".splitlines() if line.strip()][-_LAST_LINES:]
        raise DataError(f"{spec.title}: the model could not be converted: {' / '.join(lines) or 'no output'}")


def run_reporting(
    command: Sequence[str], report: Callable[[], None], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
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
    """Return the CPU time of this process's children that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _resident_mib(family: Sequence[psutil.Process]) -> float | None:
    """Return the resident memory of processes: their unshared parts, and the largest part that each may share.

    From Linux's ``/proc/PID/statm``, which takes no lock of the process as ``smaps_rollup`` does.
    """
    alone, shared = 0, []
    for process in family:
        try:
            _, resident, common = Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[:3]
        except (OSError, ValueError):
            continue  # it has ended, or this is not Linux
        alone += int(resident) - int(common)
        shared.append(int(common))
    return (alone + max(shared)) * _PAGE_MIB if shared else None


def _signal(send: Callable[[], None]) -> None:
    with suppress(psutil.NoSuchProcess):
        send()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(variables: Mapping[str, str], threads: Scalar) -> dict[str, str]:
    environment = os.environ | variables
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    return environment
