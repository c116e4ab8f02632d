"""The node agent supervises one job on one host.

It starts the telemetry recorder and the ranks, ends them when a limit is exceeded or on request (SIGTERM or a stop
file; a second request kills them), and ends every process that they started.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, final

from pydantic import ValidationError

from accelmark.results.store.files import write_atomic
from accelmark.results.store.secret_list import SECRETS_FILE, secrets_of, write_secret_hashes
from accelmark.run.agent.adaptation import SITE_DIRECTORY, apply_adaptation
from accelmark.run.agent.background_load import BackgroundLoad
from accelmark.run.agent.environment import TELEMETRY_MODULE, launch_of, rank_environment
from accelmark.run.agent.host_setup import HostInUseError, clear_caches, host_lock, route
from accelmark.run.agent.limits import Breach, LimitChecker, size_of
from accelmark.run.agent.rank_exit import LogEnd, Termination, classify_node, classify_ranks, read_log_end
from accelmark.run.agent.sysinfo import system_information
from accelmark.run.agent.task import RANKS_FILE, STOP_FILES, AgentTask
from accelmark.run.processes import descendants, signal_all
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import NodeExit, RankExit
from accelmark.spec.plugins.catalog import load_framework
from accelmark.spec.plugins.framework import FrameworkSpec, LaunchRecord

_TELEMETRY_START_S: Final = 5.0
"""Longest time to wait for the recorder's first line when a job ends immediately."""
_TELEMETRY_END_S: Final = 10.0
_MAX_TELEMETRY_STARTS: Final = 3
_ORPHAN_GRACE_S: Final = 1.0
_BREACHES: Final = {
    "timed_out": ("timed_out", "timed_out"),
    "stalled": ("stalled", "timed_out"),
    "disk_full": ("failed", "failed"),
    "abandoned": ("lost", "lost"),
}


@final
class Agent:
    """Supervises the ranks of one job on this host."""

    def __init__(self, task: AgentTask, node_dir: Path) -> None:
        self._task = task
        self._dir = node_dir
        self._started_at = utc_now()
        self._limits = LimitChecker(task.limits, node_dir, task.ranks, task.launcher_log)
        self._environment: dict[str, str] = {}
        self._background_load = BackgroundLoad()
        self._warnings: list[str] = []
        self._temporary = [node_dir / SITE_DIRECTORY]
        self._ranks: subprocess.Popen[bytes] | None = None
        self._telemetry: subprocess.Popen[bytes] | None = None
        self._telemetry_starts = 0
        self._ending: Termination | None = None
        self._kill_at: float | None = None
        self._num_requests = 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> NodeExit:
        """Run the job to its end; call :meth:`handle_signals` first."""
        exit_code: int | None = None
        try:
            with host_lock(self._task.host_lock, self._task.run):
                framework = load_framework(self._task.framework)
                self._temporary += [self._dir / cache for cache in framework.caches.values()]
                self._prepare_host()
                self._environment = rank_environment(self._task, self._dir, os.environ)
                self._write_system_information(framework)
                self._list_secrets()
                adaptation, requirements = self._task.adaptation, self._task.requirements
                if adaptation is not None or requirements is not None:
                    self._environment = apply_adaptation(
                        adaptation, requirements, self._dir, self._environment, framework
                    )
                    self._list_secrets()
                self._start_telemetry()
                exit_code = self._supervise()
        except HostInUseError as error:
            self._ending = Termination("failed", "failed", str(error))
        except (OSError, AccelmarkError) as error:
            self._ending = self._ending or Termination("failed", "failed", f"the node agent failed: {error}")
        self._end_everything()
        for directory in self._temporary:
            shutil.rmtree(directory, ignore_errors=True)
        ranks = self._rank_exits(exit_code)
        state, reason = classify_node(ranks, self._ending)
        return NodeExit(
            host=self._task.host,
            noderank=self._task.noderank,
            state=state,
            reason=reason,
            started_at=self._started_at,
            duration_s=time.monotonic() - self._limits.started,
            ranks=ranks,
            warnings=tuple(self._warnings),
            others_cpu_s=self._background_load.cpu_s(),
        )

    def _list_secrets(self) -> None:
        """Write hashes of secrets that a rank may print, so that bundles can remove them from logs."""
        found = secrets_of(self._environment)
        if found or (self._dir / SECRETS_FILE).exists():
            write_secret_hashes(self._dir / SECRETS_FILE, found)

    def _prepare_host(self) -> None:
        if self._task.clear_caches and (problem := clear_caches()) is not None:
            self._warnings.append(f"the page cache could not be dropped: {problem}")
        if self._task.nnodes > 1:
            self._task = route(self._task)

    def handle_signals(self) -> None:
        """Make signals wake the selector; unlike a signal mask, handlers are not inherited by child processes."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._sockets = (reader, writer)
        self._selector.register(reader, selectors.EVENT_READ)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _supervise(self) -> int:
        log = self._dir / self._task.launcher_log
        with log.open("ab") as output:
            self._ranks = subprocess.Popen(
                launch_of(self._task).command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._dir,
            )
        while (exit_code := self._ranks.poll()) is None:
            self._wait(self._limits.interval_s)
            self._reap_orphans()
            self._restart_telemetry()
            self._enforce()
        return exit_code

    def _wait(self, timeout_s: float) -> None:
        """Sleep until a signal or the timeout, and count requests to end."""
        for _ in self._selector.select(timeout_s):
            with contextlib.suppress(BlockingIOError):
                for number in self._sockets[0].recv(4096):
                    self._num_requests += number in (signal.SIGTERM, signal.SIGINT)
        for urgency, name in enumerate(STOP_FILES, start=1):
            if self._num_requests < urgency and (self._dir / name).exists():
                self._num_requests = urgency

    def _enforce(self) -> None:
        if self._num_requests and self._ending is None:
            self._end(Termination("cancelled", "cancelled", "was cancelled"))
        breach = self._limits.check() if self._ending is None else None
        if breach is not None:
            self._end(_ending_of(breach))
        if self._num_requests > 1 or (self._kill_at is not None and time.monotonic() > self._kill_at):
            signal_all(self._rank_tree(), signal.SIGKILL)

    def _end(self, ending: Termination) -> None:
        """Ask the ranks to end; those left after the grace period are killed."""
        self._ending = ending
        self._kill_at = time.monotonic() + self._task.limits.grace_s
        if self._ranks is not None:
            with contextlib.suppress(ProcessLookupError):
                self._ranks.send_signal(signal.SIGTERM)

    def _rank_tree(self) -> list[int]:
        """Return all descendants except the telemetry recorder's."""
        telemetry = {os.getpid()}
        if self._telemetry is not None:
            telemetry |= {self._telemetry.pid, *(stat.pid for stat in descendants(self._telemetry.pid))}
        return [stat.pid for stat in descendants(os.getpid()) if stat.pid not in telemetry]

    def _end_everything(self) -> None:
        """End processes left behind by the ranks, then the recorder, then all remaining descendants."""
        deadline = time.monotonic() + _ORPHAN_GRACE_S
        left = self._rank_tree()
        if left and self._ending is None:
            self._warnings.append(f"the ranks left {len(left)} processes running; they were ended")
        signal_all(left, signal.SIGTERM)
        while self._rank_tree():
            number = signal.SIGKILL if time.monotonic() > deadline or self._num_requests > 1 else signal.SIGTERM
            signal_all(self._rank_tree(), number)
            self._wait(0.05)
            self._reap_orphans()
        self._stop_telemetry()
        while left := [stat.pid for stat in descendants(os.getpid())]:
            signal_all(left, signal.SIGKILL)
            self._wait(0.05)
            self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Reap re-parented processes; the exit codes of own children are kept for their handles."""
        own = {process.pid for process in (self._ranks, self._telemetry) if process is not None}
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            if found.si_pid in own:
                for process in (self._ranks, self._telemetry):
                    if process is not None and process.pid == found.si_pid:
                        process.poll()
                continue
            os.waitpid(found.si_pid, 0)

    def _start_telemetry(self) -> None:
        task = self._task.telemetry
        if task is None:
            return
        request = task.model_dump(mode="json") | {"pids": [os.getpid()]}
        write_atomic(self._dir / "telemetry.json", json.dumps(request, indent=2))
        self._telemetry_starts += 1
        with (self._dir / "telemetry.log").open("ab") as output:
            self._telemetry = subprocess.Popen(
                [sys.executable, "-m", TELEMETRY_MODULE, str(self._dir)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment | {"OMP_NUM_THREADS": "1"},
            )

    def _restart_telemetry(self) -> None:
        """Restart a recorder that died; telemetry then has a gap, which is a warning."""
        if self._telemetry is None or (code := self._telemetry.poll()) is None:
            return
        again = self._telemetry_starts < _MAX_TELEMETRY_STARTS and self._ending is None
        action = "it was started again" if again else "it was not started again"
        self._warnings.append(f"the telemetry recorder ended with exit code {code}; {action}")
        self._telemetry = None
        if again:
            self._start_telemetry()

    def _stop_telemetry(self) -> None:
        if self._telemetry is None:
            return
        deadline = time.monotonic() + _TELEMETRY_START_S
        while not size_of(self._dir / "telemetry.jsonl") and self._telemetry.poll() is None:
            if time.monotonic() > deadline or self._num_requests > 1:
                break
            self._wait(0.05)
        self._telemetry.terminate()
        try:
            code = self._telemetry.wait(_TELEMETRY_END_S)
        except subprocess.TimeoutExpired:
            self._telemetry.kill()
            self._warnings.append(f"the telemetry recorder did not end within {_TELEMETRY_END_S:g} s")
            return
        if code != 0:
            self._warnings.append(f"the telemetry recorder ended with exit code {code}")

    def _write_system_information(self, framework: FrameworkSpec) -> None:
        visible = self._task.visible_devices
        reported = (*framework.reported_variables, *((visible.variable,) if visible is not None else ()))
        found = system_information(self._dir, self._environment, self._task.host, *reported)
        write_atomic(self._dir / "sys_info.json", json.dumps(found, indent=2))

    def _rank_exits(self, exit_code: int | None) -> tuple[RankExit, ...]:
        """Classify every rank by its exit code, where the launch recorded it, else by that of the launch."""
        logs = {rank: read_log_end(self._dir / f"rank{rank}.out.log") for rank in self._task.ranks}
        if any(log.cause is None and not log.lines for log in logs.values()):
            launch = read_log_end(self._dir / self._task.launcher_log)
            logs = {
                rank: LogEnd(launch.lines, None, launch.cause) if log.cause is None and not log.lines else log
                for rank, log in logs.items()
            }
        return classify_ranks(logs, exit_code, self._launch_record(), self._ending)

    def _launch_record(self) -> LaunchRecord | None:
        try:
            return LaunchRecord.model_validate_json((self._dir / RANKS_FILE).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            self._warnings.append(f"{RANKS_FILE} is damaged; the launcher's exit code is used for all ranks")
            return None


def _ending_of(breach: Breach) -> Termination:
    rank_state, node_state = _BREACHES[breach.kind]
    return Termination(rank_state, node_state, breach.reason)  # type: ignore[arg-type]
