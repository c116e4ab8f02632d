"""Processes of the client, which share a load; their records come back as requests end."""

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

from accelmark.serving.client.messages import FROM_CLIENT, Ended, FromClient
from accelmark.serving.client.shared import LiveStage, PlannedStage, Record
from accelmark.serving.cores import started_on
from accelmark.serving.request import Endpoint, Load, PlannedRequest
from accelmark.spec.errors import RunError
from accelmark.spec.log.serving import LoadStage, RequestRecord

_END_S: Final = 10.0
"""Limit of the end of the processes."""


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
        stage = PlannedStage(self, requests, load, record, watch)
        try:
            return stage.run()
        except BaseException:
            self._stop(record)
            raise

    @contextmanager
    def live_stage(
        self,
        load: Load,
        record: Callable[[RequestRecord, str], RequestRecord],
        watch: Callable[[], None] = lambda: None,
    ) -> Iterator[LiveStage]:
        """Open a stage whose requests are submitted one by one; its end is that of :meth:`run_stage`.

        Raises:
            RunError: a process of the client ended.
        """
        try:
            yield LiveStage(self, load, record, watch)
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
            self._num_ended += 1
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
        num_left, end_s = len(self._processes) - self._num_ended, time.monotonic() + _END_S
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
