"""The node agent supervises one job on one host: ``python -m accelmark.run.agent.agent NODE_DIR``.

It starts the telemetry recorder and the ranks, ends them when a limit is exceeded or on request (SIGTERM or a stop
file; a second request kills them), and ends every process that they started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import accelmark
from accelmark.results.store.files import write_atomic
from accelmark.results.store.secret_list import SECRETS_FILE, secrets_of, write_secret_hashes
from accelmark.run import processes
from accelmark.run.agent import host, rank_exit
from accelmark.run.agent.adaptation import SITE_DIRECTORY, apply_adaptation, keep_ours_first
from accelmark.run.agent.file_watch import BytecodeCheck, FileWatch, LogEvents
from accelmark.run.agent.stall import LimitChecker, diagnose, rank_log, size_of
from accelmark.run.agent.task import EXIT_FILE, IDENTITY_FILE, LOCK_FILE, RANKS_FILE, STOP_FILES, TASK_FILE, AgentTask
from accelmark.run.onhost.program import KILLED_FOR_MEMORY, kernel_messages
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import JobSpec, NodeExit, RankExit, StallRecord
from accelmark.spec.log.records import ENVIRONMENT_FILE, AdaptationRecord, ClockReading, HostClocks, LogSeal
from accelmark.spec.plugins.catalog import load_framework, load_launch
from accelmark.spec.plugins.framework import HostPlace, Launch, LaunchRecord, module_command

_RECORDER_MODULE: Final = "accelmark.telemetry.record"
_RECORDER_END_S: Final = 10.0
_PEERS_S: Final = 10.0
"""Time for which stalled ranks are kept, until the agents of all hosts have noticed the stall."""


def main(arguments: list[str]) -> int:
    """Run the agent for the node directory in ``arguments``; returns its exit code."""
    node_dir = Path(arguments[0]).absolute()
    processes.become_subreaper()
    agent = Agent(AgentTask.model_validate_json((node_dir / TASK_FILE).read_bytes()), node_dir)
    agent.handle_signals()
    lock = os.open(node_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    write_atomic(node_dir / IDENTITY_FILE, processes.ProcessId.own().model_dump_json())
    reserve = node_dir / ".reserve"
    reserve.write_bytes(os.urandom(512 * 1024))  # so that exit.json can be written when the disk is full
    ended = agent.run()
    reserve.unlink(missing_ok=True)
    write_atomic(node_dir / EXIT_FILE, ended.model_dump_json(indent=2))
    return 0 if ended.state == "succeeded" else 1


class _RecorderProcess:
    """The telemetry recorder of a host; ``warn`` receives its failures."""

    def __init__(self, node_dir: Path, warn: Callable[[str], None]) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._dir = node_dir
        self._warn = warn
        self._environment: dict[str, str] = {}
        self._num_starts = 0

    def start(self, environment: dict[str, str]) -> None:
        self._environment = environment | {"OMP_NUM_THREADS": "1"}
        self._num_starts += 1
        command = module_command(sys.executable, _RECORDER_MODULE, str(self._dir))
        with (self._dir / "telemetry.log").open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def restart(self) -> None:
        """Start the recorder again if it died; telemetry then has a gap, which is a warning."""
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return
        again = self._num_starts < 3
        action = "" if again else "not "
        self._warn(f"the telemetry recorder ended with exit code {code}; it was {action}started again")
        self.process = None
        if again:
            self.start(self._environment)

    def stop(self, wait: Callable[[float], bool]) -> None:
        """End the recorder, once it has recorded anything; ``wait(seconds)`` returns True to end it at once."""
        if self.process is None:
            return
        deadline = time.monotonic() + 5.0  # a job may end before the first sample
        while not size_of(self._dir / "telemetry.jsonl") and self.process.poll() is None:
            if wait(0.05) or time.monotonic() > deadline:
                break
        self.process.terminate()
        for _ in range(2):
            try:
                code = self.process.wait(_RECORDER_END_S)
                break
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGCONT)  # a suspended recorder ends with its notes
        else:
            self.process.kill()
            self._warn(f"the telemetry recorder did not end within {2 * _RECORDER_END_S:g} s")
            return
        if code != 0:
            self._warn(f"the telemetry recorder ended with exit code {code}")

    def pids(self) -> set[int]:
        if self.process is None:
            return set()
        return {self.process.pid, *(process.pid for process in processes.descendants(self.process.pid))}


class Agent:
    """Supervises the ranks of one job on this host."""

    def __init__(self, task: AgentTask, node_dir: Path) -> None:
        self._task = task
        self._job = JobSpec.model_validate_json(task.job_file.read_bytes())
        self._adapted = self._job.adaptation.path if self._job.adaptation is not None else None
        self._launcher_log = f"start_{self._job.framework}_task.log"  # FlagPerf's name
        self._dir = node_dir
        self._started_at = utc_now()
        # Enroot's, which hold the file system that this process runs in.
        self._sandbox = processes.descendants(os.getpid())
        self._limits = LimitChecker(task.limits, node_dir, task.ranks, self._launcher_log)
        self._environment: dict[str, str] = {}
        self._others_began_s = host.others_cpu_s()
        self._warnings: list[str] = []
        self._temporary = [node_dir / SITE_DIRECTORY, node_dir / host.CODE_DIRECTORY]
        self._ranks: subprocess.Popen[bytes] | None = None
        self._recorder = _RecorderProcess(node_dir, self._warnings.append)
        self._ending: rank_exit.Termination | None = None
        self._terminate_at = 0.0
        self._kill_at: float | None = None
        self._stall: StallRecord | None = None
        self._num_requests = 0
        self._signal: str | None = None
        self._began = ClockReading.now()
        self._log_events = LogEvents(rank_log(node_dir, task.ranks[0]))
        self._data: FileWatch | None = None
        self._code: FileWatch | None = None
        self._bytecode: BytecodeCheck | None = None
        self._sealed: dict[int, LogSeal] = {}

    def run(self) -> NodeExit:
        """Run the job to its end; call :meth:`handle_signals` first."""
        exit_code: int | None = None
        try:
            locked = host.host_lock(self._task.run, self._waits_for_host) if self._task.locks_host else None
            with locked or contextlib.nullcontext():
                self._prepare()
                exit_code = self._supervise()
                logs = {rank: rank_log(self._dir, rank) for rank in self._task.ranks}
                self._sealed = {rank: LogSeal.of(log.read_bytes()) for rank, log in logs.items() if log.is_file()}
        except host.HostInUseError as error:
            self._ending = self._cancelled() or rank_exit.Termination("failed", "failed", str(error))
        except (OSError, AccelmarkError) as error:
            failed = rank_exit.Termination("failed", "failed", f"the node agent failed: {error}")
            self._ending = self._ending or failed
        self._end_everything()
        self._log_events.look()
        clocks = HostClocks(began=self._began, ended=ClockReading.now(), seen=self._log_events.seen)
        ranks = self._rank_exits(exit_code)
        state, reason = rank_exit.classify_node(ranks, self._ending)
        began_s, now_s = self._others_began_s, host.others_cpu_s()
        return NodeExit(
            host=self._task.host,
            noderank=self._task.noderank,
            state=state,
            reason=reason,
            started_at=self._started_at,
            duration_s=time.monotonic() - self._limits.started,
            ranks=ranks,
            warnings=tuple(self._warnings),
            clocks=clocks,
            logs=self._sealed,
            stall=self._stall,
            changed_data=self._data.changed() if self._data is not None else (),
            changed_code=self._code.changed() if self._code is not None else (),
            stale_bytecode=(self._bytecode or BytecodeCheck(self._code_folders())).found(),
            others_cpu_s=max(0.0, now_s - began_s) if now_s is not None and began_s is not None else None,
        )

    def _waits_for_host(self) -> bool:
        """Wait a moment for another run to end; returns whether to go on waiting."""
        waited_s = time.monotonic() - self._limits.started
        self._wait(1.0)
        return not self._num_requests and waited_s < self._task.limits.host_wait_s

    def _prepare(self) -> None:
        job, framework = self._job, load_framework(self._job.framework)
        self._temporary = [self._dir / name for name in temporary_directories(job.framework)]
        if self._task.clear_caches and (problem := host.clear_caches()) is not None:
            self._warnings.append(f"the page cache could not be dropped: {problem}")
        if self._task.nnodes > 1:
            self._task = host.route(self._task)
        task = self._task
        self._data, self._code = FileWatch(job.data_dirs.values()), host.watch_code(task, job)
        self._warnings += filter(None, (self._data.problem, self._code.problem))
        self._environment = rank_environment(task, job, self._dir, os.environ)
        python = task.python or sys.executable
        information = host.system_information(task, self._dir, self._environment, framework)
        write_atomic(self._dir / "sys_info.json", json.dumps(information, indent=2))
        self._list_secrets()
        if task.telemetry is not None:  # before the vendor's script, which is for the ranks: its figures are evidence
            request = task.telemetry.model_dump(mode="json") | {"pids": [os.getpid()]}
            write_atomic(self._dir / "telemetry.json", json.dumps(request, indent=2))
            self._recorder.start(self._environment)
        script = AdaptationRecord()
        if self._adapted is not None or task.requirements is not None:
            self._environment, script = apply_adaptation(
                self._adapted, task.requirements, self._dir, self._environment, framework, python
            )
            self._list_secrets()
        record = host.environment_record(task, self._dir, self._environment, os.environ, script, framework)
        write_atomic(self._dir / ENVIRONMENT_FILE, record.model_dump_json(indent=1))

    def _code_folders(self) -> Iterator[Path]:
        """Yield the folders of the code that ranks run and that AccelMark hashes."""
        vendor = self._task.telemetry.vendor_folder if self._task.telemetry is not None else None
        yield Path(accelmark.__file__).parent
        yield from filter(None, (self._job.case.path, self._adapted, vendor))

    def _list_secrets(self) -> None:
        """Write hashes of secrets that a rank may print, so that bundles can remove them from logs."""
        secrets = secrets_of(self._environment)
        if secrets or (self._dir / SECRETS_FILE).exists():
            write_secret_hashes(self._dir / SECRETS_FILE, secrets)

    def handle_signals(self) -> None:
        """Make signals end a wait; unlike a signal mask, handlers are not inherited by child processes."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._sockets = (reader, writer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _supervise(self) -> int:
        command = launch_of(self._task, self._job).command
        with (self._dir / self._launcher_log).open("ab") as log:
            self._ranks = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=self._dir
            )
        self._bytecode = BytecodeCheck(self._code_folders())
        while (exit_code := self._ranks.poll()) is None:
            self._watch(self._limits.interval_s)
            self._reap_orphans()
            if self._ending is None:
                self._recorder.restart()
            self._enforce()
        return exit_code

    def _watch(self, timeout_s: float) -> None:
        """Wait until a signal or the timeout, and note the events that appear meanwhile in the first rank's log."""
        deadline = time.monotonic() + timeout_s
        watched = [self._sockets[0].fileno(), *filter(None, [self._log_events.descriptor])]
        ready: list[int] = []
        while watched[0] not in ready and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(watched, [], [], left)
            self._log_events.look()
        self._wait(0.0)

    def _wait(self, timeout_s: float) -> bool:
        """Sleep until a signal or the timeout, and count requests to end; returns whether to end at once."""
        if select.select([self._sockets[0]], [], [], timeout_s)[0]:
            for number in self._sockets[0].recv(4096):
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._num_requests += 1
                    self._signal = self._signal or signal.Signals(number).name
        for urgency, name in enumerate(STOP_FILES, start=1):
            if self._num_requests < urgency and (self._dir / name).exists():
                self._num_requests = urgency
        return self._num_requests > 1

    def _enforce(self) -> None:
        """End the ranks on a request or at a limit, and kill those that do not end in time."""
        now = time.monotonic()
        if self._ending is None:
            self._ending = self._cancelled() or self._limits.check()
            if self._ending is not None:
                self._terminate_at = now + self._diagnose(self._ending)
        if self._kill_at is None and self._ending is not None and (self._num_requests or now >= self._terminate_at):
            self._kill_at = now + self._task.limits.grace_s
            if self._ranks is not None:
                self._ranks.terminate()
        if self._num_requests > 1 or (self._kill_at is not None and time.monotonic() > self._kill_at):
            processes.signal_all(self._rank_tree(), signal.SIGKILL)

    def _cancelled(self) -> rank_exit.Termination | None:
        """Return the end that a request requires: a stop file is the coordinator's, a signal comes from elsewhere."""
        if not self._num_requests:
            return None
        reason = "was cancelled"
        if self._signal is not None and not any((self._dir / name).exists() for name in STOP_FILES):
            reason = f"its node agent received {self._signal} from a user, a scheduler or a shutdown"
        return rank_exit.Termination("cancelled", "cancelled", reason)

    def _diagnose(self, ending: rank_exit.Termination) -> float:
        """Record the activity of silent ranks; returns how long to keep them for the agents of other hosts."""
        silent, limit_s = self._limits.silent_s(), self._task.limits.stall_timeout_s
        if self._num_requests < 2 and silent and max(silent.values()) > limit_s / 2:
            self._stall = diagnose(self._dir, self._rank_tree(), silent, self._limits.started)
        return min(_PEERS_S, limit_s) if ending.rank_state == "stalled" and self._task.nnodes > 1 else 0.0

    def _rank_tree(self) -> list[int]:
        """Return all descendants except the telemetry recorder's, which starts tools meanwhile."""
        recorder = self._recorder.pids()
        tree = processes.descendants(os.getpid(), self._sandbox)
        recorder |= self._recorder.pids()
        return [process.pid for process in tree if process.pid not in recorder and processes.is_alive(process)]

    def _end_everything(self) -> None:
        """End processes left behind by the ranks, then the recorder, then all remaining descendants."""
        deadline = time.monotonic() + 1.0
        if self._ending is None and (left := self._rank_tree()):
            self._warnings.append(f"the ranks left processes running, which were ended: {processes.named(left)}")
        while left := self._rank_tree():
            at_once = self._num_requests > 1 or time.monotonic() > deadline
            processes.signal_all(left, signal.SIGKILL if at_once else signal.SIGTERM)
            self._wait(0.05)
            self._reap_orphans()
        self._recorder.stop(self._wait)
        while left := [process.pid for process in processes.descendants(os.getpid(), self._sandbox)]:
            processes.signal_all(left, signal.SIGKILL)
            self._wait(0.05)
            self._reap_orphans()
        for directory in self._temporary:
            shutil.rmtree(directory, ignore_errors=True)

    def _reap_orphans(self) -> None:
        """Reap re-parented processes; the exit codes of own children are kept for their handles."""
        children = {process.pid: process for process in (self._ranks, self._recorder.process) if process is not None}
        with contextlib.suppress(ChildProcessError):
            while (exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if exited.si_pid in children:
                    children[exited.si_pid].poll()
                else:
                    os.waitpid(exited.si_pid, 0)

    def _rank_exits(self, exit_code: int | None) -> tuple[RankExit, ...]:
        """Classify every rank by its exit code, where the launch recorded it, else by the launch's."""
        logs = {rank: rank_exit.read_log_end(rank_log(self._dir, rank)) for rank in self._task.ranks}
        launch = rank_exit.read_log_end(self._dir / self._launcher_log)._replace(state=None)
        logs = {rank: log if log.cause or log.lines else launch for rank, log in logs.items()}
        errors = load_framework(self._job.framework).connection_errors
        record = LaunchRecord.stored(self._dir / RANKS_FILE)
        ends = rank_exit.classify_ranks(logs, exit_code, record, self._ending, errors)
        killed = [end for end in ends if (end.state, end.signal) == ("signaled", "SIGKILL")]
        messages = kernel_messages(self._limits.started, re.compile(KILLED_FOR_MEMORY))[0] if killed else []
        if not messages:
            return ends
        reason = rank_exit.explained(f"killed by SIGKILL: {rank_exit.escaped_line(messages[-1])}")
        return tuple(end.model_copy(update={"reason": reason}) if end in killed else end for end in ends)


def temporary_directories(framework: str) -> list[str]:
    """Return the names of the directories in a node directory that the agent removes at the end."""
    return [SITE_DIRECTORY, host.CODE_DIRECTORY, *load_framework(framework).caches.values()]


def launch_of(task: AgentTask, job: JobSpec, python: str = sys.executable) -> Launch:
    """Return how the job's framework starts its ranks on this host; ``python`` and ``job.json`` are filled in.

    ``python`` is the agent's, which ranks use unless the task names another.
    """
    python = task.python or python
    filled = {"python": python, "job.json": str(task.job_file)}
    place = HostPlace(
        nnodes=task.nnodes,
        nproc=task.nproc,
        num_ranks=task.num_ranks,
        noderank=task.noderank,
        master_address=task.master_address,
        master_port=task.master_port,
        local_address=task.local_address,
        interface=task.interface,
        servers=task.servers,
        python=python,
        rank_command=[filled.get(argument, argument) for argument in task.command],
    )
    return load_launch(job.framework).launch(place)


def rank_environment(task: AgentTask, job: JobSpec, node_dir: Path, ambient: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the process that starts a task's ranks.

    Variables of the vendor and the cluster file take precedence over ``ambient``, and both over AccelMark's defaults
    (threads, visible devices, directories of caches). Their ``PYTHONPATH`` is appended to AccelMark's.
    """
    launch, num_threads = launch_of(task, job), job.work.threads
    threads = str(num_threads or max(1, len(os.sched_getaffinity(0)) // task.num_ranks))
    visible = task.visible_devices
    environment = {
        "OMP_NUM_THREADS": threads,
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        **{name: str(node_dir / cache) for name, cache in load_framework(job.framework).caches.items()},
        **launch.defaults,
        **({visible.variable: ",".join(map(str, range(visible.count)))} if visible is not None else {}),
        **ambient,
        **({"OMP_NUM_THREADS": threads} if num_threads is not None else {}),
        **task.environment,
    }
    keep_ours_first(environment, ambient)
    if task.python is not None:
        environment |= host.environment_variables(Path(task.python), environment, node_dir)
    return environment | {processes.RUN_MARKER: task.run, processes.NODE_MARKER: str(node_dir), **launch.environment}


def agent_commands(task: AgentTask, job: JobSpec, node_dir: Path, python: str = sys.executable) -> list[list[str]]:
    """Return the commands that an agent starts: the telemetry recorder, then the ranks with their variables."""
    recorder = [module_command(python, _RECORDER_MODULE, str(node_dir))] if task.telemetry is not None else []
    launch = launch_of(task, job, python)
    variables = [f"{name}={value}" for name, value in {**task.environment, **launch.environment}.items()]
    return [*recorder, [*(["env", *variables] if variables else []), *launch.command]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
