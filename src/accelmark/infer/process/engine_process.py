"""Start the processes of an engine, and have them compile and compute; the clock is that of this process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, NoReturn, final

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from accelmark.infer.engine import EngineRequest
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
from accelmark.infer.process.worker_process import START_S, WorkerProcess, silent
from accelmark.spec.errors import RequestError
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.plugins.framework import RankPlace

LOG_NAME: Final = "engine.out.log"
"""Output of the engine's process: not the rank's log, so that an engine cannot print events."""
_LOOPBACK: Final = "127.0.0.1"
_BROKEN_S: Final = 1.0
"""Time in which the end of a process is looked for after another one has failed, whose exchange it may have broken."""

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
    """An engine in a process of its own; with several devices in as many, which are ranks of a process group.

    All of them get the same messages. The first one answers and fills the memory of the outputs, the others only
    confirm that they have done the same.
    """

    def __init__(
        self,
        engine: str,
        log_dir: Path,
        timeout_s: float,
        worker: str = "accelmark.infer.process.worker",
        num_devices: int = 1,
    ) -> None:
        self.engine = engine
        self.log = log_dir / LOG_NAME
        self.timeout_s = timeout_s
        self.inputs = create_memory()
        self.workers: list[WorkerProcess] = []
        meeting = self._meeting() if num_devices > 1 else {}
        for number in range(num_devices):
            place = RankPlace(number, number, num_devices, num_devices)
            log = self.log if number == 0 else log_dir / f"engine.rank{number}.out.log"
            own = {**meeting, **place.variables()} if num_devices > 1 else {}
            self.workers.append(WorkerProcess(engine, log, self.inputs, place, own, worker))
        self.limit_answers(max(timeout_s, START_S))
        self.first, *self.others = self.workers
        self._missing = list(self.others)
        """Those that have not yet confirmed the message that is being answered."""
        self._confirmed: list[bytes] = []
        """Confirmations of the last message."""
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

    def _meeting(self) -> dict[str, str]:
        """Open the store at which the processes find each other; return the variables that name it."""
        self._store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
        interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        return interface | {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(self._store.port)}

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [each.process.pid for each in self.workers]

    def wait_until_ready(self) -> None:
        """Wait until the process has imported its modules; from then on ``timeout_s`` is the limit of an answer."""
        self._exchange(ECHO)
        self.limit_answers(self.timeout_s)

    def limit_answers(self, seconds: float) -> None:
        """Wait for an answer for ``seconds`` at most."""
        self._limit_s = seconds
        for each in self.workers:
            each.limit_wait(seconds)

    def ask(self, command: str, **values: Any) -> Any:
        """Have the process execute a command; return its reply.

        Raises:
            AccelmarkError: the engine failed, its process ended, or it did not answer in time.
        """
        self._send(json.dumps([command, values]).encode())
        return json.loads(self._answer())["reply"]

    def compile(self, request: EngineRequest, modules: Sequence[tuple[FolderRef, str]]) -> dict[str, Any]:
        """Compile, or load an engine; return its details. ``modules`` have the classes of the model.

        Raises:
            RequestError: the model cannot be sent to another process.
            AccelmarkError: the engine failed.
        """
        with os.fdopen(os.dup(self.inputs), "wb") as file:
            try:
                held = {name: getattr(request, name) for name in ("model", "example", "calibration")}
                torch.save(held, file)
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                what = f"the model cannot be sent to the engine's process ({shortened(error, 200)})"
                raise RequestError(f"{what}; define its classes at the top level of a module") from error
        named = [(folder.model_dump(mode="json"), module) for folder, module in modules]
        paths = ("onnx_path", "engine_path", "work_dir", "model_dir")
        others = ("precision", "optimize_for", "input_names", "output_names")
        values = {name: str(path) if (path := getattr(request, name)) else None for name in paths}
        values |= {name: getattr(request, name) for name in others} | {"options": dict(request.options)}
        details: dict[str, Any] = self.ask("compile", request=values, modules=named)
        os.ftruncate(self.inputs, 0)
        self.concurrency = details["concurrency"]
        return details

    def arrange(self, slots: Slots, warm: Call, batch: Sequence[Tensor]) -> None:
        """Lay the inputs out; ``batch`` is the first slot's content, and ``warm`` the call before each window."""
        self.slots = slots
        os.ftruncate(self.inputs, slots.end)
        self.shared = mapped(self.inputs)
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
        for each in self.workers:
            os.ftruncate(each.outputs, self.answers.end)
        self.outputs = mapped(self.first.outputs)
        self.ask("expect", answers=self.answers.values(), num_calls=num_calls)

    def stage(self, slot: int, inputs: Sequence[Tensor], num_calls: int = 1) -> None:
        """Write the items of calls of equal size to ``staged``, which the engine cannot see before the window.

        The first call gets ``slot``, the next one the slot after it.
        """
        size = inputs[0].shape[0] // num_calls
        for view, each in zip(self.slots.blocks(self.staged, slot, num_calls, size), inputs, strict=True):
            view.copy_(each.view_as(view))

    def staged_items(self, slots: Tensor, places: Tensor) -> list[Tensor]:
        """Return a copy of the items that are staged in ``slots``, each at its place of ``places`` there."""
        blocks = self.slots.blocks(self.staged, 0, self.slots.num_slots, self.slots.slot_items)
        return [each[slots, places] for each in blocks]

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
        """Return the largest peak of memory of a device that the engine reports, and of resident memory together.

        The latter is the sum over the engine's processes, as the kernel counts it.
        """
        peaks = [peak for each in self.workers if (peak := each.peak_memory_mib()) is not None]
        found: dict[str, Any] = self.ask("usage")
        for each in self._confirmed:
            of_other = json.loads(each)["reply"]
            found |= {name: max(value, of_other[name]) for name, value in found.items() if value is not None}
        return found | {"peak_host_memory_mib": sum(peaks) if peaks else None}

    def close(self) -> None:
        """End the processes; at once where they do not end by themselves."""
        for each in self.workers:
            each.hang_up()
        for each in self.workers:
            each.close(at_once=self.is_busy)
        os.close(self.inputs)

    def _exchange(self, message: bytes) -> None:
        self._send(message)
        self._answer()

    def _send(self, message: bytes) -> None:
        self.is_busy = True
        self._confirmed = []
        for each in self.workers:
            each.send(message, self.activity)

    def _answer(self) -> bytes:
        """Return the first process's next message; the others have then confirmed the end of what they were sent."""
        if self.others:
            self._watch_until_the_first_answers()
        message = self._checked(self.first)
        if message[:1] == TOKENS:
            return message
        if message[:1] != ENDED:
            while self._missing:
                self._watch([])
            self._missing = list(self.others)
        self.is_busy = False
        return message

    def _watch_until_the_first_answers(self) -> None:
        while not self._watch([self.first]):
            pass

    def _watch(self, wanted: list[WorkerProcess]) -> bool:
        """Wait for a message of ``wanted``, whether there is one, or for confirmations, which are read."""
        connections = {each.connection: each for each in (*wanted, *self._missing)}
        ready = [connections[each] for each in wait(list(connections), self._limit_s)]  # type: ignore[index]
        if not ready:
            raise silent(self.engine, self.activity, self._limit_s, self.log)
        for each in ready:
            if each not in wanted:
                self._confirmed.append(self._checked(each))
                self._missing.remove(each)
        return any(each in wanted for each in ready)

    def _checked(self, worker: WorkerProcess) -> bytes:
        """Return the next message of a process.

        Raises:
            AccelmarkError: it has none, or reports a failure; where another one has ended, that is the cause.
        """
        try:
            message = worker.receive(self.activity, self._limit_s)
        except InferenceError as error:
            self._fail(error)
        if message != DONE and message[:1] not in (ENDED, TOKENS) and "error" in (reply := json.loads(message)):
            self.is_busy = bool(self.others)
            self._fail(restored(reply["error"]))
        return message

    def _fail(self, error: Exception) -> NoReturn:
        until_s = time.monotonic() + (_BROKEN_S if self.others else 0.0)
        while time.monotonic() < until_s:
            for each in self.workers:
                if each.has_ended():
                    raise each.ended(self.activity) from error
            time.sleep(0.02)
        raise error
