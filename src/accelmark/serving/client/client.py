"""The client: processes that send the requests of a stage; their records come back as requests end."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Final, Self, cast, final

from accelmark.serving.client.messages import (
    FROM_CLIENT,
    Begin,
    Close,
    Done,
    Ended,
    First,
    FromClient,
    Open,
    Ready,
    Request,
    line,
)
from accelmark.serving.cores import started_on
from accelmark.serving.request import Answered, Endpoint, Load, PlannedRequest, Record
from accelmark.spec.errors import RunError
from accelmark.spec.log.serving import LoadStage

_START_S: Final = 120.0
"""Limit of the start of the processes."""
_LEAD_S: Final = 0.2
"""From the message that a stage begins to its beginning."""
_AHEAD_S: Final = 5.0
"""Time before it is due at which a request is given to its process."""
_SPARE_REQUESTS: Final = 16
"""Requests of a closed loop that a process holds in addition to twice those in progress."""
_WATCH_S: Final = 0.2
_END_S: Final = 10.0
"""Limit of the end of the processes."""


def _no_watch() -> None:
    return


@final
class Client:
    """Processes that send requests to one service; a context manager, which ends them."""

    def __init__(self, target: Endpoint, num_processes: int = 1, cores: Sequence[int] | None = None) -> None:
        """Start the processes, on ``cores`` only where they are given.

        Raises:
            RequestError: the target's URL is invalid.
        """
        command = [sys.executable, "-m", __package__, target.url()]
        self.target = target
        self._stage: _Stage | None = None
        self._is_stopped = False
        self._num_ended = 0
        self._messages: queue.SimpleQueue[tuple[int, FromClient | None]] = queue.SimpleQueue()
        with started_on(cores) if cores is not None else contextlib.nullcontext():
            self._processes = [
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(num_processes)
            ]
        self._inputs = [cast(IO[bytes], process.stdin) for process in self._processes]
        for number in range(num_processes):
            threading.Thread(target=self._read, args=(number,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_stage(
        self, requests: Iterable[PlannedRequest], load: Load, record: Record, watch: Callable[[], None] = _no_watch
    ) -> LoadStage:
        """Run one stage to the end of its last request.

        Args:
            requests: of a closed loop, as many as needed are taken; of an open loop, all, in the order of ``due_s``.
            load: the stage.
            record: called in this thread, as requests end.
            watch: called several times a second; what it raises ends the stage.

        Whatever ends the stage early (an exception of ``record``, ``watch`` or ``requests``, Ctrl-C): requests in
        progress are given up and recorded as cancelled, the processes end, and the exception is raised.

        Raises:
            RunError: a process of the client ended.
        """
        with self._opened(_Stage(self, load, record, watch, iter(requests))) as stage:
            return stage.finish()

    @contextmanager
    def live_stage(self, load: Load, record: Record, watch: Callable[[], None] = _no_watch) -> Iterator[_Stage]:
        """Open a stage whose requests are submitted one by one, and are due when they are submitted.

        Raises:
            RunError: a process of the client ended.
        """
        with self._opened(_Stage(self, load, record, watch, None)) as stage:
            yield stage

    @contextmanager
    def _opened(self, stage: _Stage) -> Iterator[_Stage]:
        self._stage = stage
        try:
            stage.open()
            yield stage
        except BaseException:
            self.close()
            raise
        self._stage = None

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return len(self._processes)

    def send(self, process: int, *parts: bytes) -> None:
        """Write to a process.

        Raises:
            RunError: it ended.
        """
        try:
            self._inputs[process].writelines(parts)
            self._inputs[process].flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._ended(process) from error

    def receive(self) -> tuple[int, FromClient] | None:
        """Return the next message with the number of its process, None if there is none for a while.

        Raises:
            RunError: a process ended.
        """
        try:
            process, message = self._messages.get(timeout=_WATCH_S)
        except queue.Empty:
            return None
        if message is None:
            self._num_ended += 1
            raise self._ended(process)
        return process, message

    def _ended(self, process: int) -> RunError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[process].wait(_END_S)
        code = self._processes[process].returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return RunError(f"process {process} of the client ended ({how}); its error is in the log of the rank")

    def _read(self, number: int) -> None:
        """Queue the messages of a process, and None at their end."""
        try:
            with cast(IO[bytes], self._processes[number].stdout) as output:
                for text in output:
                    if text.endswith(b"\n"):  # a process that is killed leaves a part of a line
                        self._messages.put((number, FROM_CLIENT.validate_json(text)))
        finally:
            self._messages.put((number, None))

    def close(self) -> None:
        """End the processes; record the requests that they give up."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for process in self._processes:
            process.terminate()
        num_left, end_s = len(self._processes) - self._num_ended, time.monotonic() + _END_S
        while num_left and (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                _, message = self._messages.get(timeout=left_s)
                num_left -= message is None
                if isinstance(message, Ended) and self._stage is not None:
                    self._stage.record(message)
        for process, pipe in zip(self._processes, self._inputs, strict=True):
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # what it did not read
                pipe.close()


@final
class _Stage:
    """One stage, shared by the processes of a client: with planned requests, or with submitted ones (None)."""

    def __init__(
        self,
        client: Client,
        load: Load,
        record: Record,
        watch: Callable[[], None],
        planned: Iterator[PlannedRequest] | None,
    ) -> None:
        self._client = client
        self._load = load
        self._record = record
        self._watch = watch
        self._planned = planned
        self._next = next(planned, None) if planned is not None else None
        self._processes = range(client.num_processes)
        self._sent: dict[int, tuple[PlannedRequest, Answered | None]] = {}
        """Requests that did not end, by number."""
        self._done: list[Done] = []
        self._num_given = self._num_requests = 0
        self._is_closed = False
        self._begin_ns = 0
        self._watched_s = 0.0
        self._last_due_s = load.until_s

    def open(self) -> None:
        """Give the processes the requests of the beginning, wait until they have read them, and let the stage begin."""
        num = len(self._processes)
        slots = [
            None if (most := self._load.concurrency) is None else most // num + (process < most % num)
            for process in self._processes
        ]
        for process in self._processes:
            order = Open(
                stage=self._load.stage,
                slots=slots[process],
                until_s=self._load.until_s,
                timeout_s=self._load.timeout_s,
                reports_first=self._planned is None,
            )
            self._client.send(process, line(order))
        if self._load.concurrency is None:
            self._give_due(_AHEAD_S)
        else:
            wanted = [2 * each + _SPARE_REQUESTS if each else 0 for each in slots]
            for number in range(max(wanted)):
                for process in self._processes:
                    if number < wanted[process]:
                        self._give(process)
        self._send_all(Ready())
        num_left, end_s = num, time.monotonic() + _START_S
        while num_left:
            if time.monotonic() > end_s:
                raise RunError(f"the client did not start within {_START_S:g} s")
            self._watch()
            num_left -= self._client.receive() is not None
        self._begin_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
        self._send_all(Begin(mono_ns=self._begin_ns))

    def submit(self, request: PlannedRequest, answered: Answered) -> None:
        """Send a request; from any thread, but not from two at the same time.

        Raises:
            RunError: a process of the client ended.
        """
        due_s = max(0.0, (time.monotonic_ns() - self._begin_ns) / 1e9)
        self._send(self._turn(), request, due_s, answered)

    def follow(self, is_over: Callable[[], bool]) -> None:
        """Report outputs and ends of requests until ``is_over``, which is called several times a second."""
        while not is_over():
            self._step()

    def finish(self) -> LoadStage:
        """Wait for the end of the last request, and return the stage."""
        if self._planned is None:
            self._close()
            self._last_due_s = (time.monotonic_ns() - self._begin_ns) / 1e9
        while len(self._done) < len(self._processes):
            self._step()
        duration_s = max(each.end_s for each in self._done)
        return self._load.ended(
            self._begin_ns,
            duration_s,
            self._num_requests,
            lag_p50_ms=max((each.lag_p50_ms for each in self._done if each.lag_p50_ms is not None), default=None),
            lag_p99_ms=max((each.lag_p99_ms for each in self._done if each.lag_p99_ms is not None), default=None),
            client_cpu_share=max(each.cpu_s for each in self._done) / duration_s if duration_s else 0.0,
        )

    def record(self, message: Ended) -> None:
        """Take the record of a request that ended."""
        request, answered = self._sent.pop(message.record.number)
        record = self._record(request, message.record, message.text)
        if answered is not None:
            answered.on_done(record or message.record)

    def _step(self) -> None:
        """Watch the server, give further requests, and take a message."""
        now_s = time.monotonic()
        if now_s - self._watched_s >= _WATCH_S:
            self._watch()
            self._watched_s = now_s
        passed_s = now_s - self._begin_ns / 1e9
        if self._planned is not None and self._load.concurrency is None:
            self._give_due(passed_s + _AHEAD_S)
        elif self._planned is not None and passed_s >= self._load.until_s:
            self._close()
        if self._is_closed and passed_s > self._last_due_s + self._load.timeout_s + _START_S:
            raise RunError("the client did not end its requests in time")
        if (received := self._client.receive()) is None:
            return
        process, message = received
        if isinstance(message, Done):
            self._done.append(message)
        elif isinstance(message, First):
            _, answered = self._sent[message.number]
            if answered is not None:
                answered.on_first()
        elif isinstance(message, Ended):
            self._num_requests += 1
            if self._load.concurrency is not None:
                self._give(process)
            self.record(message)

    def _give_due(self, until_s: float) -> None:
        """Give all planned requests that are due before a time, to the processes in turn."""
        while self._next is not None and (self._next.due_s or 0.0) < until_s:
            self._last_due_s = max(self._last_due_s, self._next.due_s or 0.0)
            self._give(self._turn())
        if self._next is None and self._planned is not None:
            self._close()

    def _give(self, process: int) -> None:
        """Give the next planned request to a process."""
        request = self._next
        if request is None or self._planned is None or self._is_closed:
            self._close()
            return
        self._send(process, request, request.due_s, None)
        self._next = next(self._planned, None)

    def _turn(self) -> int:
        """Return the process whose turn it is."""
        self._num_given += 1
        return (self._num_given - 1) % len(self._processes)

    def _send(self, process: int, request: PlannedRequest, due_s: float | None, answered: Answered | None) -> None:
        body = self._client.target.body(request)
        message = Request(
            number=request.number,
            prompt=request.prompt,
            requested_tokens=request.requested_tokens,
            due_s=due_s,
            input_tokens=request.input_tokens,
            num_bytes=len(body),
        )
        self._sent[request.number] = request, answered
        self._client.send(process, line(message), body)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._send_all(Close())

    def _send_all(self, message: Begin | Close | Ready) -> None:
        for process in self._processes:
            self._client.send(process, line(message))
