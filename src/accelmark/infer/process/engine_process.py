"""Start the process of an engine, and have it compile and compute; the clock is that of this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from accelmark.infer.failures import InferenceError, restored, shortened
from accelmark.infer.process.memory import Slots, aligned, create_memory, mapped
from accelmark.infer.process.worker import (
    DONE,
    ECHO,
    ENDED,
    GENERATE,
    PICK,
    RUN,
    START,
    TIMES_BYTES,
    TOKENS,
    times_of,
)
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import FolderRef

LOG_NAME: Final = "engine.out.log"
"""Output of the engine's process: not the rank's log, so that an engine cannot print events."""
_START_S: Final = 300.0
"""Time for the process to import PyTorch."""
_END_S: Final = 10.0
"""Time for the process to end by itself."""
_WITHHELD: Final = ("ACCELMARK_NODE_DIR", "RANK", "LOCAL_RANK")

Call = tuple[int, int]
"""(slot, number of items)."""


@final
@dataclass(frozen=True, slots=True)
class TimedWindow:
    """A window of calls."""

    took_s: float
    """By the clock of this process, from the first index sent to the last answer in shared memory."""
    calls_s: Sequence[float]
    """Durations of the calls, by the clock of the engine's process."""
    excluded_s: Sequence[float]
    """Part of each call that the engine reports as not inference."""
    computed_s: float
    """From the beginning of the first call to the end of the last, by the same clock."""
    outputs: list[Tensor]
    """Copies of the outputs, with the rows of all calls in their order."""


@final
class EngineProcess:
    """A process with one engine."""

    def __init__(
        self, engine: str, log_dir: Path, timeout_s: float, worker: str = "accelmark.infer.process.worker"
    ) -> None:
        self.engine = engine
        self.log = log_dir / LOG_NAME
        self.timeout_s = timeout_s
        self.descriptors = (create_memory(), create_memory())
        ours, theirs = socket.socketpair()
        _limit_wait(ours, max(timeout_s, _START_S))
        handed = (theirs.fileno(), *self.descriptors)
        command = [sys.executable, "-m", worker, *map(str, handed), str(os.getpid())]
        environment = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
        with theirs, self.log.open("ab") as log:
            self.process = Popen(command, pass_fds=handed, env=environment, stdin=DEVNULL, stdout=log, stderr=log)
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.is_busy = False
        """Whether an answer is missing."""
        self.activity = "its start"
        """What the process is used for, for messages: a step."""
        self.concurrency = 1
        """Calls that the engine computes at the same time."""
        self.slots: Slots
        self.answers: Slots
        self.staged: Tensor
        """Memory of this process with the layout of the inputs: what they are compared by."""

    def wait_until_ready(self) -> None:
        """Wait until the process has imported its modules; from then on ``timeout_s`` is the limit of an answer."""
        self._exchange(ECHO)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            _limit_wait(ours, self.timeout_s)

    def ask(self, command: str, **values: Any) -> Any:
        """Have the process execute a command; return its reply.

        Raises:
            AccelmarkError: the engine failed, its process ended, or it did not answer in time.
        """
        self._send(json.dumps([command, values]).encode())
        return json.loads(self._answer())["reply"]

    def compile(
        self, model: nn.Module | None, example: Sequence[Tensor], modules: Sequence[tuple[FolderRef, str]],
        **request: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Compile (``model`` is None for an engine that reads no model), or load an engine; return its details.

        Raises:
            RequestError: the model cannot be sent to another process.
            AccelmarkError: the engine failed.
        """
        with os.fdopen(os.dup(self.descriptors[0]), "wb") as file:
            try:
                torch.save({"model": model, "example": tuple(example)}, file)
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                what = f"the model cannot be sent to the engine's process ({shortened(error, 200)})"
                raise RequestError(f"{what}; define its classes at the top level of a module") from error
        named = [(folder.model_dump(mode="json"), module) for folder, module in modules]
        details: dict[str, Any] = self.ask("compile", request=request, modules=named)
        os.ftruncate(self.descriptors[0], 0)
        self.concurrency = details["concurrency"]
        return details

    def arrange(self, slots: Slots, warm: Call, batch: Sequence[Tensor]) -> None:
        """Lay the inputs out; ``batch`` is the first slot's content, and ``warm`` the call before each window."""
        self.slots = slots
        os.ftruncate(self.descriptors[0], slots.end)
        self.shared = mapped(self.descriptors[0])
        self.staged = torch.empty(slots.end, dtype=torch.uint8)
        self.stage(0, batch)
        self.shared.copy_(self.staged)
        self.ask("arrange", slots=slots.values(), warm=warm)

    def warm_up(self, calls: Sequence[Call]) -> tuple[Slots, float]:
        """Compute calls; return the layout of one item's outputs, and the duration in s."""
        began = time.perf_counter()
        found = self.ask("warm_up", calls=calls)
        return Slots.of(found), time.perf_counter() - began

    def expect(self, output: Slots, num_items: int, num_calls: int, num_slots: int = 1) -> None:
        """Provide memory for the answers of windows of up to ``num_items`` items in ``num_calls`` calls.

        Calls that are started need a slot each.
        """
        self.answers = Slots(output.rows, num_items, num_slots, aligned(TIMES_BYTES * num_calls))
        self.num_calls = num_calls
        os.ftruncate(self.descriptors[1], self.answers.end)
        self.outputs = mapped(self.descriptors[1])
        self.ask("expect", answers=self.answers.values(), num_calls=num_calls)

    def stage(self, slot: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Write a batch to a slot of ``staged``, which the engine cannot see before the window; return views of it."""
        views = self.slots.views(self.staged, slot, inputs[0].shape[0])
        for view, each in zip(views, inputs, strict=True):
            view.copy_(each)
        return views

    def run(self, calls: Sequence[Call], *, warm: bool = True) -> TimedWindow:
        """Compute a window of calls on staged slots, after an untimed call of other inputs if ``warm``.

        Raises:
            AccelmarkError: the engine failed.
        """
        self.ask("prepare", calls=calls, warm=warm)
        used = max(slot for slot, _ in calls) + 1
        end = used * (self.slots.end // self.slots.num_slots)
        self.shared[:end].copy_(self.staged[:end])  # not before: an engine could compute ahead of the clock
        began = time.perf_counter()
        self._exchange(RUN)
        took_s = time.perf_counter() - began
        outputs = [each.clone() for each in self.answers.views(self.outputs, 0, sum(size for _, size in calls))]
        self._answer()
        durations, excluded, begins = times_of(self.outputs, self.num_calls)[:, : len(calls)]
        computed_s = float((begins + durations).max() - begins.min())
        return TimedWindow(took_s, durations.tolist(), excluded.tolist(), computed_s, outputs)

    def pick(self, indices: Sequence[int]) -> list[Tensor]:
        """Compute one call of items of the first slot; return its outputs, which the next call overwrites.

        Raises:
            AccelmarkError: the engine failed.
        """
        self._exchange(PICK + torch.tensor(indices, dtype=torch.int64).numpy().tobytes())
        return self.answers_of(0, len(indices))

    def start(self, slot: int, indices: Sequence[int]) -> None:
        """Start a call of items of the first slot, whose answers go to a slot that no running call has.

        Raises:
            AccelmarkError: the engine's process ended.
        """
        self._send(START + torch.tensor([slot, *indices], dtype=torch.int64).numpy().tobytes())

    def ended(self) -> int:
        """Wait until a call that was started has ended; return its slot, whose answers :meth:`answers_of` returns.

        Raises:
            AccelmarkError: a call failed.
        """
        return int.from_bytes(self._answer()[1:], sys.byteorder)

    def answers_of(self, slot: int, num_items: int) -> list[Tensor]:
        """Return the outputs in a slot, which the next call in it overwrites."""
        return self.answers.views(self.outputs, slot, num_items)

    def generate(self, tokens: Tensor, num_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """Yield when the next tokens of all rows arrived (``time.monotonic_ns``), and these, ``num_tokens`` times.

        Raises:
            AccelmarkError: the engine failed, or answered with another number of tokens.
        """
        head = torch.tensor([len(tokens), num_tokens], dtype=torch.int64)
        self._send(GENERATE + torch.cat([head, tokens.flatten()]).numpy().tobytes())
        num_steps = 0
        while (message := self._answer()) != DONE:
            at_ns = time.monotonic_ns()
            found = torch.frombuffer(bytearray(message[1:]), dtype=torch.int64)
            num_steps += 1
            if len(found) != len(tokens) or num_steps > num_tokens:
                raise InferenceError(f"engine {self.engine}: generates {len(found)} tokens for {len(tokens)} prompts")
            yield at_ns, found
        if num_steps != num_tokens:
            raise InferenceError(f"engine {self.engine}: generated {num_steps} tokens instead of {num_tokens}")

    def crossing_s(self, times: int = 100) -> float:
        """Return the median duration of a message and its reply."""
        taken = []
        for _ in range(times):
            began = time.perf_counter()
            self._exchange(ECHO)
            taken.append(time.perf_counter() - began)
        return sorted(taken)[times // 2]

    def usage(self) -> Mapping[str, Any]:
        """Return the peak of device memory that the engine reports, and of resident memory as the kernel counts it."""
        found: dict[str, Any] = self.ask("usage")
        status = Path(f"/proc/{self.process.pid}/status")
        lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
        peaks = [int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")]
        return found | {"peak_host_memory_mib": peaks[0] if peaks else None}

    def close(self) -> None:
        """End the process; at once where it does not end by itself."""
        self.connection.close()
        try:
            self.process.wait(0 if self.is_busy else _END_S)
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def _exchange(self, message: bytes) -> None:
        self._send(message)
        self._answer()

    def _send(self, message: bytes) -> None:
        self.is_busy = True
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise self._ended() from error

    def _answer(self) -> bytes:
        try:
            message = self.connection.recv_bytes()
        except BlockingIOError as error:
            what = (
                f"engine {self.engine}: did not answer for {self.timeout_s:g} s (engine_timeout_s) in {self.activity}"
            )
            raise InferenceError(f"{what}, so it was ended; see {self.log}") from error
        except (EOFError, OSError) as error:
            raise self._ended() from error
        self.is_busy = False
        if message[:1] == TOKENS:
            self.is_busy = True
            return message
        if message != DONE and message[:1] != ENDED and "error" in (reply := json.loads(message)):
            raise restored(reply["error"])
        return message

    def _ended(self) -> InferenceError:
        try:
            code = self.process.wait(_END_S)
        except TimeoutExpired:
            return InferenceError(
                f"engine {self.engine}: its process closed the connection in {self.activity}; see {self.log}"
            )
        if code >= 0:
            how = f"ended with exit code {code}"
        else:
            name = signal.Signals(-code).name
            how = f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return InferenceError(f"engine {self.engine}: its process {how} in {self.activity}; see {self.log}")


def _limit_wait(connection: socket.socket, seconds: float) -> None:
    """Let reads fail after ``seconds``; a poll before each would cost microseconds."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
