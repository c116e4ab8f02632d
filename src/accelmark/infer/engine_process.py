"""The processes of an engine: the rank starts them, sends them commands, and times them by the rank's clock.

A command is a pickled call of a method of :class:`accelmark.infer.worker.Worker`; a reply is JSON, so that the rank
unpickles nothing that a vendor's code wrote.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import statistics
import struct
import sys
import time
import timeit
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from accelmark.infer.engine import EngineExceptionError, EngineRequest, InferenceError, Rows, Slots, mapped
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError, raising
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.plugins.framework import RANK_VARIABLES, RankPlace, module_command

_LOOPBACK: Final = "127.0.0.1"
_END_S: Final = 10.0

Call = tuple[int, int]
"""(slot, number of items)."""


class TimedWindow(NamedTuple):
    """A window of calls."""

    took_s: float
    """By the clock of this process, from the command to the last output in shared memory."""
    calls_s: Sequence[float]
    """Durations of the calls; like ``computed_s`` by the clock of the engine's process."""
    excluded_s: Sequence[float]
    computed_s: float
    """From the beginning of the first call to the end of the last."""
    outputs: list[Tensor]
    """Copies of the outputs, with the rows of all calls in their order."""


class _Child(NamedTuple):
    """A process of the engine, and the descriptor of the memory for its outputs."""

    process: Popen[bytes]
    connection: Connection[Any, Any]
    outputs: int
    name: str


class EngineProcess:
    """An engine in its own process; with several devices, in a process for each device, the ranks of a process group.

    All of them get the same commands. The first one answers and its memory has the outputs; the others confirm.
    """

    slots: Slots
    answers: Slots
    shared: Tensor
    """Memory with the layout of ``slots``, which the engine reads."""
    staged: Tensor
    """Memory of this process with the same layout, for the framework's comparison."""

    def __init__(
        self, engine: str, log_dir: Path, timeout_s: float, worker: str = "accelmark.infer.worker", num_devices: int = 1
    ) -> None:
        self.engine = engine
        self.log = log_dir / "engine.out.log"
        """Not the rank's log, so that an engine cannot print events."""
        self.timeout_s = timeout_s
        self.activity = "its start"
        """The step that uses the process, for messages."""
        self.concurrency = 1
        self.is_busy = False
        """Whether a reply is missing."""
        self._values: list[Any] = []
        """Replies of all processes to the last command."""
        self._inputs = os.memfd_create("accelmark")
        self._children: list[_Child] = []
        variables: dict[str, str] = {}
        withheld = ("ACCELMARK_NODE_DIR", *RANK_VARIABLES)
        if num_devices > 1:
            self._store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
            port = str(self._store.port)
            variables = {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        for rank in range(num_devices):
            log = self.log if rank == 0 else log_dir / f"engine.rank{rank}.out.log"
            environment = {name: value for name, value in os.environ.items() if name not in withheld} | variables
            name = "its process"
            if num_devices > 1:
                name = f"its process of rank {rank}"
                environment |= RankPlace(rank, rank, num_devices, num_devices).variables()
            outputs = os.memfd_create("accelmark")
            ours, theirs = socket.socketpair()
            descriptors = (theirs.fileno(), self._inputs, outputs)
            command = module_command(sys.executable, worker, *map(str, descriptors), str(os.getpid()))
            with theirs, log.open("ab") as stream:
                process = Popen(
                    command, pass_fds=descriptors, env=environment, stdin=DEVNULL, stdout=stream, stderr=stream
                )
            self._children.append(_Child(process, Connection(ours.detach()), outputs, name))
        self.limit_replies(max(timeout_s, 300.0))

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [child.process.pid for child in self._children]

    def wait_until_ready(self) -> None:
        """Wait until the processes have imported their modules; from then on ``timeout_s`` is the limit of a reply."""
        self.call("echo")
        self.limit_replies(self.timeout_s)

    def limit_replies(self, seconds: float) -> None:
        """Wait for a reply for ``seconds`` at most, by an option of the socket: a poll would cost microseconds."""
        self._limit_s = seconds
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for child in self._children:
            with socket.socket(fileno=os.dup(child.connection.fileno())) as ours:
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def call(self, command: str, *arguments: Any, **named: Any) -> Any:
        """Have the processes execute a command; return the first one's reply. Raises AccelmarkError: it failed."""
        self._send(command, *arguments, **named)
        for _ in self._parts():
            raise InferenceError(f"engine {self.engine}: sent an unexpected message in {self.activity}")
        return self._values[0]

    def compile(self, request: EngineRequest, modules: Sequence[tuple[FolderRef, str]]) -> dict[str, Any]:
        """Compile, or load an engine; return its details. ``modules`` have the classes of the model."""
        problem = "the model cannot be sent to the engine's process; define its classes at the top level of a module"
        causes = (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError)
        with os.fdopen(os.dup(self._inputs), "wb") as file, raising(RequestError, problem, *causes):
            torch.save(request, file)
        details: dict[str, Any] = self.call("compile", list(modules))
        os.ftruncate(self._inputs, 0)
        self.concurrency = details["concurrency"]
        return details

    def allocate_inputs(self, slots: Slots, warm: Call, batch: Sequence[Tensor]) -> None:
        """Provide memory for inputs: ``batch`` in the first slot, ``warm`` the call before each window."""
        self.slots = slots
        os.ftruncate(self._inputs, slots.size)
        self.shared = mapped(self._inputs)
        self.staged = torch.empty(slots.size, dtype=torch.uint8)
        self.stage(0, batch)
        self.shared.copy_(self.staged)
        self.call("allocate_inputs", slots, warm)

    def warm_up(self, calls: Sequence[Call]) -> tuple[Rows, float]:
        """Compute calls; return the types and shapes of an item of the outputs, and the duration in s."""
        began = time.perf_counter()
        rows = self.call("warm_up", calls)
        return tuple((dtype, tuple(shape)) for dtype, shape in rows), time.perf_counter() - began

    def allocate_outputs(self, rows: Rows, num_items: int, num_slots: int = 1) -> None:
        """Provide memory for the outputs of up to ``num_items`` items; calls that are started need a slot each."""
        self.answers = Slots(rows, num_items, num_slots)
        for child in self._children:
            os.ftruncate(child.outputs, self.answers.size)
        self._outputs = mapped(self._children[0].outputs)
        self.call("allocate_outputs", self.answers)

    def stage(self, slot: int, inputs: Sequence[Tensor], num_calls: int = 1) -> None:
        """Write the items of calls of equal size to ``staged`` from ``slot`` on; the engine cannot see them yet."""
        size = inputs[0].shape[0] // num_calls
        for view, tensor in zip_strict(self.slots.blocks(self.staged, slot, num_calls, size), inputs):
            view.copy_(tensor.view_as(view))

    def run(self, calls: Sequence[Call], *, warm: bool = True) -> TimedWindow:
        """Compute a window of calls on staged slots, after an untimed call of other inputs if ``warm``."""
        self.call("prepare", calls, warm=warm)
        end = (max(slot for slot, _ in calls) + 1) * self.slots.slot_bytes
        self.shared[:end].copy_(self.staged[:end])  # not before: an engine could compute ahead of the clock
        began = time.perf_counter()
        self.call("run")
        took_s = time.perf_counter() - began
        outputs = [each.clone() for each in self.outputs_of(0, sum(size for _, size in calls))]
        begins, ends, excluded = self.call("times")
        durations = [end - begin for begin, end in zip_strict(begins, ends)]
        return TimedWindow(took_s, durations, excluded, max(ends) - min(begins), outputs)

    def pick(self, indices: Sequence[int]) -> list[Tensor]:
        """Compute one call of items of the first slot; return its outputs, which the next call overwrites."""
        self.call("pick", indices)
        return self.outputs_of(0, len(indices))

    def start(self, slot: int, indices: Sequence[int]) -> None:
        """Start a call of items of the first slot, with its outputs in a slot that no running call uses."""
        self._send("start", slot, indices)

    def ended(self) -> int:
        """Wait until a call that was started has ended; return the slot of its outputs. Raises as :meth:`call`."""
        slot: int = self._received(self._children[0])["part"]
        self.is_busy = False
        return slot

    def outputs_of(self, slot: int, num_items: int) -> list[Tensor]:
        """Return the outputs in a slot, which the next call in it overwrites."""
        return self.answers.views(self._outputs, slot, num_items)

    def generate(self, tokens: Tensor, num_tokens: int) -> Iterator[tuple[int, Tensor]]:
        """Yield when the next tokens of all rows arrived (``time.monotonic_ns``), and these, ``num_tokens`` times."""
        self._send("generate", tokens.tolist(), num_tokens)
        num_steps = 0
        for step in self._parts():
            at_ns = time.monotonic_ns()
            num_steps += 1
            if len(step) != len(tokens) or num_steps > num_tokens:
                raise InferenceError(f"engine {self.engine}: generates {len(step)} tokens for {len(tokens)} prompts")
            yield at_ns, torch.tensor(step)
        if num_steps != num_tokens:
            raise InferenceError(f"engine {self.engine}: generated {num_steps} tokens instead of {num_tokens}")

    def round_trip_s(self) -> float:
        """Return the median duration of a command that does nothing, and its reply."""
        return statistics.median_high(timeit.repeat(lambda: self.call("echo"), number=1, repeat=100))

    def usage(self) -> Mapping[str, Any]:
        """Return the largest peak memory of a device, and the sum of the processes' peak resident memory; or None."""
        self.call("device_memory_mib")
        device = [value for value in self._values if value is not None]
        status = "".join(Path(f"/proc/{pid}/status").read_text(encoding="ascii") for pid in self.pids)
        resident = [int(kib) / 1024 for kib in re.findall(r"^VmHWM:\s+(\d+)", status, re.MULTILINE)]
        return {
            "peak_device_memory_mib": max(device, default=None),
            "peak_host_memory_mib": sum(resident) if resident else None,
        }

    def close(self) -> None:
        """End the processes; at once where they do not end by themselves."""
        for child in self._children:
            child.connection.close()  # at which a process that waits for a command ends
        for child in self._children:
            try:
                child.process.wait(0 if self.is_busy else _END_S)
            except TimeoutExpired:
                child.process.kill()
                child.process.wait()
            os.close(child.outputs)
        os.close(self._inputs)

    def _send(self, command: str, *arguments: Any, **named: Any) -> None:
        self.is_busy = True
        message = pickle.dumps((command, arguments, named))
        for child in self._children:
            try:
                child.connection.send_bytes(message)
            except OSError as error:
                raise self._end_error(child) from error

    def _parts(self) -> Iterator[Any]:
        """Yield the parts of the first process's reply until all processes have sent their last message."""
        self._values = [None] * len(self._children)
        waiting = list(self._children)
        while waiting:
            ready = waiting
            if len(self._children) > 1:
                connections = wait([child.connection for child in waiting], self._limit_s)
                ready = [child for child in waiting if child.connection in connections]
                if not ready:
                    raise self._silent()
            for child in list(ready):
                message = self._received(child)
                if "part" in message:
                    yield message["part"]
                else:
                    self._values[self._children.index(child)] = message["value"]
                    waiting.remove(child)
        self.is_busy = False

    def _received(self, child: _Child) -> dict[str, Any]:
        try:
            message: dict[str, Any] = json.loads(child.connection.recv_bytes())
        except BlockingIOError:
            self._fail(self._silent())
        except (EOFError, OSError):
            self._fail(self._end_error(child))
        if "error" in message:
            self.is_busy = len(self._children) > 1
            text, end_reason = message["error"], message.get("end_reason")
            self._fail(InferenceError(text, end_reason) if end_reason else EngineExceptionError(text))
        return message

    def _fail(self, error: Exception) -> NoReturn:
        """Raise ``error``, or that another process ended within a second, which is its cause then."""
        until_s = time.monotonic() + (1.0 if len(self._children) > 1 else 0.0)
        while time.monotonic() < until_s:
            for child in self._children:
                try:
                    child.process.wait(0)
                except TimeoutExpired:
                    continue
                raise self._end_error(child) from error
            time.sleep(0.02)
        raise error

    def _silent(self) -> InferenceError:
        problem = f"engine {self.engine}: did not answer for {self._limit_s:g} s (engine_timeout_s) in {self.activity}"
        return InferenceError(f"{problem}, so it was ended; see {self.log}")

    def _end_error(self, child: _Child) -> InferenceError:
        try:
            code: int | None = child.process.wait(_END_S)
        except TimeoutExpired:
            code = None
        how = "closed the connection" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            how = f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return InferenceError(f"engine {self.engine}: {child.name} {how} in {self.activity}; see {self.log}")
