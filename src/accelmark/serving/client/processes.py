"""Processes of the client, which share a load; their records come back as requests end."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Final, Self, cast, final

from accelmark.serving.client.messages import (
    FROM_CLIENT,
    Begin,
    Close,
    Done,
    Ended,
    FromClient,
    Open,
    Ready,
    Request,
    line,
)
from accelmark.serving.cores import started_on
from accelmark.serving.request import Endpoint, PlannedRequest
from accelmark.spec.errors import RunError
from accelmark.spec.log.serving import LoadStage, RequestRecord
from accelmark.spec.settings.serving import Arrival

Record = Callable[[RequestRecord, str], None]
"""Called with the record of each request that ended and the text of its answer."""

_START_S: Final = 120.0
"""Limit of the start of the processes."""
_END_S: Final = 10.0
"""Limit of their end."""
_LEAD_S: Final = 0.2
"""From the message that a stage begins to its beginning."""
_AHEAD_S: Final = 5.0
"""Time before it is due at which a request is given to its process."""
_SPARE_REQUESTS: Final = 16
"""Requests of a closed loop that a process holds in addition to twice those in progress."""
_WATCH_S: Final = 0.2


@final
@dataclass(frozen=True, slots=True)
class Load:
    """What a stage is."""

    stage: int
    """-1 for warm-up."""
    until_s: float
    """Time in which requests are started; those in progress are waited for."""
    timeout_s: float
    """Longest duration of a request."""
    arrival: Arrival = "closed"
    concurrency: int | None = None
    """Requests in progress of a closed loop."""
    rate: float | None = None
    """Requests per second of an open loop, as it was planned."""
    is_search: bool = False
    input_tokens: int | None = None
    """Lengths of prompts and answers; None where the settings of prompts state them."""
    output_tokens: int | None = None


@final
class Client:
    """Processes that send requests to one service; a context manager, which ends them."""

    def __init__(self, target: Endpoint, num_processes: int = 1, cores: Sequence[int] | None = None) -> None:
        """Start the processes, on ``cores`` only where they are given.

        Raises:
            RequestError: the target's URL is invalid.
        """
        command = [sys.executable, "-m", __package__, target.url()]
        self._target = target
        self._is_stopped = False
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
        self,
        requests: Iterable[PlannedRequest],
        load: Load,
        record: Record,
        watch: Callable[[], None] = lambda: None,
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
        stage = _Stage(self, requests, load, record, watch)
        try:
            return stage.run()
        except BaseException:
            self._stop(record)
            raise

    def close(self) -> None:
        """End the processes."""
        self._stop(lambda record, text: None)

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

    def receive(self, timeout_s: float) -> tuple[int, FromClient] | None:
        """Return the next message with the number of its process, None if there is none in time.

        Raises:
            RunError: a process ended.
        """
        try:
            process, message = self._messages.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if message is None:
            raise self._ended(process)
        return process, message

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return len(self._processes)

    @property
    def target(self) -> Endpoint:
        """The service."""
        return self._target

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

    def _stop(self, record: Record) -> None:
        """End the processes; record the requests that they give up."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for process in self._processes:
            process.terminate()
        num_left, end_s = len(self._processes), time.monotonic() + _END_S
        while num_left and (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                _, message = self._messages.get(timeout=left_s)
                num_left -= message is None
                if isinstance(message, Ended):
                    record(message.record, message.text)
        for process, pipe in zip(self._processes, self._inputs, strict=True):
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # what it did not read
                pipe.close()


class _Stage:
    """One stage, shared by the processes of a client."""

    def __init__(
        self,
        client: Client,
        requests: Iterable[PlannedRequest],
        load: Load,
        record: Record,
        watch: Callable[[], None],
    ) -> None:
        self._client = client
        self._requests = iter(requests)
        self._next: PlannedRequest | None = next(self._requests, None)
        self._load = load
        self._record = record
        self._watch = watch
        self._turn = 0
        self._num_requests = 0
        self._is_closed = False
        self._last_due_s = load.until_s

    def run(self) -> LoadStage:
        """Run it."""
        processes = range(self._client.num_processes)
        slots = [
            None if self._load.concurrency is None else _share(self._load.concurrency, processes, one)
            for one in processes
        ]
        for process in processes:
            order = Open(
                stage=self._load.stage, slots=slots[process], until_s=self._load.until_s, timeout_s=self._load.timeout_s
            )
            self._client.send(process, line(order))
        self._fill(slots)
        self._wait_until_ready()
        begin_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
        self._send_all(Begin(mono_ns=begin_ns))
        done = self._follow(begin_ns / 1e9)
        duration_s = max(each.end_s for each in done)
        return LoadStage(
            stage=self._load.stage,
            arrival=self._load.arrival,
            concurrency=self._load.concurrency,
            rate=self._load.rate,
            is_search=self._load.is_search,
            input_tokens=self._load.input_tokens,
            output_tokens=self._load.output_tokens,
            begin_mono_s=begin_ns / 1e9,
            duration_s=duration_s,
            num_requests=self._num_requests,
            lag_p50_ms=_greatest([each.lag_p50_ms for each in done]),
            lag_p99_ms=_greatest([each.lag_p99_ms for each in done]),
            client_cpu_share=max(each.cpu_s for each in done) / duration_s if duration_s else 0.0,
        )

    def _fill(self, slots: list[int | None]) -> None:
        """Give the processes the requests of their beginning."""
        if self._load.concurrency is None:
            self._give_due(_AHEAD_S)
            return
        wanted = [2 * each + _SPARE_REQUESTS if each else 0 for each in slots]
        for round_ in range(max(wanted)):
            for process, number in enumerate(wanted):
                if round_ < number:
                    self._give(process)

    def _wait_until_ready(self) -> None:
        self._send_all(Ready())
        num_left, end_s = self._client.num_processes, time.monotonic() + _START_S
        while num_left:
            if time.monotonic() > end_s:
                raise RunError(f"the client did not start within {_START_S:g} s")
            self._watch()
            num_left -= self._client.receive(_WATCH_S) is not None

    def _follow(self, begin_s: float) -> list[Done]:
        """Give further requests and take records until all processes are done."""
        done: list[Done] = []
        watch_s = 0.0
        while len(done) < self._client.num_processes:
            now_s = time.monotonic()
            if now_s >= watch_s:
                self._watch()
                watch_s = now_s + _WATCH_S
            if self._load.concurrency is None:
                self._give_due(now_s - begin_s + _AHEAD_S)
            elif now_s - begin_s >= self._load.until_s:
                self._close()
            if now_s - begin_s > self._last_due_s + self._load.timeout_s + _START_S:
                raise RunError("the client did not end its requests in time")
            if (found := self._client.receive(_WATCH_S)) is None:
                continue
            process, message = found
            if isinstance(message, Done):
                done.append(message)
            elif isinstance(message, Ended):
                self._num_requests += 1
                if self._load.concurrency is not None:
                    self._give(process)
                self._record(message.record, message.text)
        return done

    def _give_due(self, until_s: float) -> None:
        """Give all requests that are due before a time, to the processes in turn."""
        while self._next is not None and (self._next.due_s or 0.0) < until_s:
            self._last_due_s = max(self._last_due_s, self._next.due_s or 0.0)
            self._give(self._turn)
            self._turn = (self._turn + 1) % self._client.num_processes
        if self._next is None:
            self._close()

    def _give(self, process: int) -> None:
        """Give the next request to a process."""
        request = self._next
        if request is None or self._is_closed:
            self._close()
            return
        body = self._client.target.body(request)
        message = Request(
            number=request.number,
            prompt=request.prompt,
            requested_tokens=request.requested_tokens,
            due_s=request.due_s,
            input_tokens=request.input_tokens,
            num_bytes=len(body),
        )
        self._client.send(process, line(message), body)
        self._next = next(self._requests, None)

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._send_all(Close())

    def _send_all(self, message: Begin | Close | Ready) -> None:
        for process in range(self._client.num_processes):
            self._client.send(process, line(message))


def _share(concurrency: int, processes: Sequence[int], process: int) -> int:
    return concurrency // len(processes) + (process < concurrency % len(processes))


def _greatest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
