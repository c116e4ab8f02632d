"""The client: processes that send the requests of a stage; their records come back as requests end."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import IO, Final, cast

from accelmark.serving.client.stage import FROM_CLIENT, Done, Ended, FromClient, Request, StageOrder, line
from accelmark.serving.request import Endpoint, Load, PlannedRequest, Record, Watch
from accelmark.serving.server_process import started_on
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RunError
from accelmark.spec.log.inference import LoadStage
from accelmark.spec.plugins.framework import module_command

_LEAD_S: Final = 0.2
"""From the message that a stage begins to its beginning."""
_SPARE_REQUESTS: Final = 16
"""Requests of a closed loop that a process holds in addition to twice those in progress."""
_WATCH_S: Final = 0.2
_END_S: Final = 10.0
_NO_MORE: Final = b"null\n"


class Client(contextlib.AbstractContextManager["Client"]):
    """Processes that send requests to one service; a context manager, which ends them."""

    def __init__(self, target: Endpoint, num_processes: int = 1, cores: Sequence[int] | None = None) -> None:
        command = module_command(sys.executable, "accelmark.serving.client.stage", target.url())
        self.target = target
        self._is_stopped = False
        self._num_ended = 0
        self._watched_s = 0.0
        self._sent: dict[int, PlannedRequest] = {}
        """Requests of the stage that did not end, by number."""
        self._record_ended: Record
        self._messages: queue.SimpleQueue[tuple[int, FromClient | None]] = queue.SimpleQueue()
        with started_on(cores) if cores is not None else contextlib.nullcontext():
            self._processes = [
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(num_processes)
            ]
        self._inputs = [cast(IO[bytes], process.stdin) for process in self._processes]
        for number in range(num_processes):
            threading.Thread(target=self._read, args=(number,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def run_stage(
        self, requests: Iterable[PlannedRequest], load: Load, record: Record, watch: Watch = lambda: None
    ) -> LoadStage:
        """Run one stage to the end of its last request.

        ``requests`` of an open loop are taken at once, in the order of ``due_s``, others as needed. ``record`` is
        called in this thread as requests end, ``watch`` several times a second. Whatever ends the stage early (an
        exception of one of them, Ctrl-C): requests in progress are recorded as cancelled, and the processes end.
        """
        self._sent, self._record_ended = {}, record
        try:
            return self._run(iter(requests), load, watch)
        except BaseException:
            self.close()
            raise

    def _run(self, planned: Iterator[PlannedRequest], load: Load, watch: Watch) -> LoadStage:
        most = len(self._processes)
        num_used = 1 if load.loadgen is not None else min(most, load.concurrency or most)
        processes = range(num_used)
        is_open = load.concurrency is None and load.loadgen is None
        num_held = load.num_drawn or 2 * (load.concurrency or 0) + _SPARE_REQUESTS * num_used
        first = list(planned if is_open else islice(planned, num_held))
        are_all = is_open or len(first) < num_held
        for process in processes:
            share = first[process::num_used]
            slots = None
            if load.concurrency is not None:
                slots = load.concurrency // num_used + (process < load.concurrency % num_used)
            self._send(process, line(StageOrder(load=load, slots=slots, num_first=len(share))))
            for request in share:
                self._send_request(process, request)
                self._watch(watch)
        for _ in processes:
            self._receive(watch)
        begin_ns = time.monotonic_ns() + round(_LEAD_S * 1e9)
        for process in processes:
            self._send(process, b"%d\n" % begin_ns, _NO_MORE if are_all else b"")
        closed = set(processes if are_all else ())
        num_requests, done = 0, list[Done]()
        while len(done) < num_used:
            process, message = self._receive(watch)
            if isinstance(message, Ended):
                num_requests += 1
                self._record_end(message)
            elif isinstance(message, Done):
                done.append(message)
            if process in closed:
                continue
            is_over = load.loadgen is None and time.monotonic_ns() - begin_ns >= load.until_s * 1e9
            if not isinstance(message, Done) and not is_over and (further := next(planned, None)) is not None:
                self._send_request(process, further)
                continue
            for pipe in {process} if isinstance(message, Done) else {*processes} - closed:
                closed.add(pipe)
                self._send(pipe, _NO_MORE)
        duration_s = max(pipe.end_s for pipe in done)
        return load.ended(
            begin_ns,
            duration_s,
            num_requests,
            lag_p50_ms=max((pipe.lag_p50_ms for pipe in done if pipe.lag_p50_ms is not None), default=None),
            lag_p99_ms=max((pipe.lag_p99_ms for pipe in done if pipe.lag_p99_ms is not None), default=None),
            client_cpu_share=max(pipe.cpu_s for pipe in done) / duration_s if duration_s else 0.0,
        )

    def _send_request(self, process: int, request: PlannedRequest) -> None:
        body, planned = self.target.body(request), request._asdict()
        del planned["content"]
        self._sent[request.number] = request
        self._send(process, line(Request(**planned, num_bytes=len(body))), body)

    def _record_end(self, message: Ended) -> None:
        self._record_ended(self._sent.pop(message.record.number), message.record, message.text)

    def _send(self, process: int, *parts: bytes) -> None:
        try:
            self._inputs[process].writelines(parts)
            self._inputs[process].flush()
        except (BrokenPipeError, ValueError) as error:
            raise self._end_error(process) from error

    def _receive(self, watch: Watch) -> tuple[int, FromClient]:
        """Wait for the next message; return it with the number of its process."""
        while True:
            self._watch(watch)
            with contextlib.suppress(queue.Empty):
                process, message = self._messages.get(timeout=_WATCH_S)
                if message is None:
                    self._num_ended += 1
                    raise self._end_error(process)
                return process, message

    def _watch(self, watch: Watch) -> None:
        if (now_s := time.monotonic()) - self._watched_s >= _WATCH_S:
            self._watched_s = now_s
            watch()

    def _end_error(self, process: int) -> RunError:
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
                if isinstance(message, Ended):
                    self._record_end(message)
        for process, pipe in zip_strict(self._processes, self._inputs):
            process.kill()
            process.wait()
            with contextlib.suppress(BrokenPipeError):  # input that it did not read
                pipe.close()
