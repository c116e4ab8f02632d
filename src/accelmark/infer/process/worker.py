"""``python -m accelmark.infer.process.worker CONNECTION INPUTS OUTPUTS PARENT``: the process of an engine.

It gets shapes, indices and inputs, never labels, a data set or a job, and runs the only code of the run that a vendor
writes. The numbers that it reports count as far as the rank's own clock and comparisons confirm them. With several
devices each has a process, and the variables of ``RankPlace`` say which one this is; all but the first send no outputs.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from accelmark.infer.contract import check_outputs, check_separate_memory
from accelmark.infer.engine import Engine, EngineRequest
from accelmark.infer.engines import engine_class
from accelmark.infer.failures import InferenceError, described
from accelmark.infer.hashes import code_of, engine_hashes
from accelmark.infer.process.memory import Slots, mapped
from accelmark.infer.setup import ComputeDevice
from accelmark.spec.plugins.catalog import FolderRef, folder_module
from accelmark.spec.plugins.framework import RankPlace

DONE: Final = b"1"
"""Reply to a window whose answers are in shared memory."""
RUN: Final = b"r"
"""Compute the calls that were prepared."""
PICK: Final = b"p"
"""Compute one call of the items whose indices (int64) follow."""
START: Final = b"s"
"""Start a call: the slot of its answers and its items' indices (int64) follow."""
ENDED: Final = b"d"
"""A call that was started has its answers in the slot (int64) that follows."""
GENERATE: Final = b"g"
"""Generate text: the number of prompts and of new tokens and the prompts' tokens (int64) follow."""
TOKENS: Final = b"t"
"""Reply with the next token of each row (int64)."""
ECHO: Final = b"e"
"""Do nothing: measures the crossing."""

TIMES_BYTES: Final = 24
"""Memory for the times of a call."""
_DEATH_SIGNAL: Final = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class Worker:
    """Executes commands, one at a time."""

    engine: Engine
    inputs: Tensor
    outputs: Tensor
    slots: Slots
    answers: Slots
    calls: list[list[Tensor]]
    sizes: list[int]
    picked: list[Tensor]
    warm: list[Tensor]
    begins: list[float]
    """When each call of the window began, and ended."""
    ends: list[float]
    excluded: list[float]
    results: list[Any]
    """Outputs of the window's calls, until its times are reported."""

    def __init__(self, descriptors: tuple[int, int]) -> None:
        self.descriptors = descriptors
        self.place = RankPlace.from_environment()
        self.views: dict[tuple[int, int], list[Tensor]] = {}

    def open(self, engine: str, vendor: str | None, device: dict[str, Any]) -> dict[str, Any]:
        """Import the engine's class, and open the device where the run needs it."""
        self.device = ComputeDevice(**device)
        found = self.type = engine_class(engine, Path(vendor) if vendor is not None else None)
        options = None if found.known_options is None else sorted(found.known_options)
        return {
            "reads": found.reads,
            "loads": found.loads,
            "fixed_batch": found.fixed_batch,
            "generates": found.generates,
            "iterates": found.iterates,
            "has_logits": found.logits is not Engine.logits,
            "max_devices": found.max_devices,
            "known_options": options,
        }

    @torch.inference_mode(False)  # compilers refuse parameters that were created in it
    def compile(self, request: dict[str, Any], modules: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
        """Compile the model, or load an engine; return the engine's details."""
        self.device.prepare(self.place)
        for folder, module in modules:  # the classes of the model
            folder_module(FolderRef.model_validate(folder), module)
        # Mapped: processes that inherited one descriptor share its position.
        with mmap.mmap(self.descriptors[0], 0, access=mmap.ACCESS_READ) as file:
            held = torch.load(file, weights_only=False, map_location="cpu")  # type: ignore[arg-type]  # from the rank
        onnx, engine, model_dir = (
            Path(request[name]) if request[name] else None for name in ("onnx_path", "engine_path", "model_dir")
        )
        options = {name: tuple(each) if isinstance(each, list) else each for name, each in request["options"].items()}
        self.engine = self.type(
            EngineRequest(
                **held,
                onnx_path=onnx,
                engine_path=engine,
                work_dir=Path(request["work_dir"]),
                device=self.device.device,
                device_type=self.device.device_type,
                threads=self.device.threads,
                precision=request["precision"],
                optimize_for=request["optimize_for"],
                options=options,
                input_names=tuple(request["input_names"]),
                output_names=tuple(request["output_names"]),
                model_dir=model_dir,
                num_devices=self.place.world_size,
            )
        )
        details: dict[str, Any] = {**self.engine.describe(), "concurrency": self.engine.concurrency}
        if self.engine.file is not None:
            details["engine_file"] = str(self.engine.file)
        if (types := self.engine.graph_types()) is not None:
            details["graph_types"] = " ".join(f"{name}:{count}" for name, count in sorted(types.items()))
        return details

    def hashes(self) -> dict[str, Any]:
        """Return hashes of the engine's files and code."""
        return engine_hashes(self.engine) | code_of(self.type)

    def arrange(self, slots: list[Any], warm: list[int]) -> None:
        """Map the inputs; ``warm`` is the slot and the size of the batch for untimed calls."""
        self.views.clear()
        self.inputs = mapped(self.descriptors[0])
        self.device.pin(self.inputs)
        self.slots = Slots.of(slots)
        self.picked = self._view(0, self.slots.slot_items)
        self.warm = [each.clone() for each in self._view(warm[0], warm[1])]

    def warm_up(self, calls: list[tuple[int, int]]) -> list[Any]:
        """Compute calls without a clock; check their outputs, and return the types and shapes of an item of them."""
        results = [self.engine(list(self._view(*call))) for call in calls]
        for result in results:
            check_outputs(result, self.engine.name)
        check_separate_memory([outputs for outputs, _ in results], self.engine.name)
        return Slots.like(results[0][0], 1, 1).values()

    def expect(self, answers: list[Any], num_calls: int) -> None:
        """Map the memory for the answers, and for the times of ``num_calls`` calls in front of it."""
        self.outputs = mapped(self.descriptors[1])
        self.answers = Slots.of(answers)
        self.times = times_of(self.outputs, num_calls)

    def prepare(self, calls: list[tuple[int, int]], *, warm: bool = True) -> None:
        """Make the calls of a window, and compute one untimed call if ``warm``: threads awake, code in caches."""
        self.calls = [list(self._view(slot, size)) for slot, size in calls]
        self.sizes = [size for _, size in calls]
        self.room = self.answers.views(self.outputs, 0, sum(self.sizes))
        if warm:
            self.engine([each.clone() for each in self.warm])

    def run(self) -> None:
        """Compute the window that was prepared."""
        if self.engine.concurrency > 1:
            self._run_concurrently()
            return
        engine, clock = self.engine, time.perf_counter
        results: list[Any] = []
        append = results.append
        instants = [clock()]
        mark = instants.append
        for inputs in self.calls:
            append(engine(inputs))
            mark(clock())
        self._keep(results, self.sizes, self.room)
        self.results = results  # freed after the window
        self.excluded = [other for _, other in results]
        self.begins, self.ends = instants[:-1], instants[1:]

    def _run_concurrently(self) -> None:
        found = self.engine.concurrently(self.calls)
        self.results = [(outputs, 0.0) for outputs, _, _ in found]
        self._keep(self.results, self.sizes, self.room)
        self.excluded = [0.0] * len(found)
        self.begins, self.ends = [begin for _, begin, _ in found], [end for _, _, end in found]

    def pick(self, indices: Tensor) -> None:
        """Compute one call of the items with these indices in the first slot."""
        result = self.engine([each.index_select(0, indices) for each in self.picked])
        self._keep([result], [len(indices)], self.answers.views(self.outputs, 0, len(indices)))

    def start(self, sent: Tensor, reply: Callable[[bytes], None]) -> None:
        """Start a call of the items with these indices in the first slot; reply when it has ended."""
        slot, indices = int(sent[0]), sent[1:].clone()

        def done(outputs: list[Tensor], error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                with torch.inference_mode():  # which the shared memory was mapped in
                    self._keep([(outputs, 0.0)], [len(indices)], self.answers.views(self.outputs, slot, len(indices)))
            except Exception as raised:  # noqa: BLE001 - an engine may raise anything
                traceback.print_exception(raised)
                reply(error_reply(raised))
            else:
                reply(ENDED + sent[:1].numpy().tobytes())

        self.engine.submit([each.index_select(0, indices) for each in self.picked], done)

    def generate(self, sent: Tensor) -> Iterator[bytes]:
        """Yield the tokens of each step as a message."""
        batch, num_tokens = sent[:2].tolist()
        for tokens in self.engine.generate(sent[2:].view(batch, -1).clone(), num_tokens):
            yield TOKENS + tokens.to(torch.int64).contiguous().numpy().tobytes()

    def score(self, tokens: list[list[int]], continuations: list[list[list[int]]]) -> list[list[tuple[float, bool]]]:
        """Return the log-likelihood of each continuation in nats, and whether greedy decoding gives it.

        Args:
            tokens: for each prompt its tokens and those of its continuations but the last one; all of one length.
            continuations: for each prompt its continuations, all of one length, which differ in the last token only.
        """
        length = len(continuations[0][0])
        found = self.engine.logits(torch.tensor(tokens), length).float()
        if found.shape[:2] != (len(tokens), length):
            what = f"engine {self.engine.name}: returns logits of shape {tuple(found.shape)}"
            raise InferenceError(f"{what}, expected ({len(tokens)}, {length}, vocabulary)", "wrong_shape")
        return [
            [(float(row[range(length), each].sum()), row.argmax(-1).tolist() == each) for each in candidates]
            for row, candidates in zip(found.log_softmax(-1), continuations, strict=True)
        ]

    def answer(self, tokens: list[list[int]], num_tokens: int, stops: list[list[int]]) -> list[list[int]]:
        """Return greedy answers to prompts of one length: ``num_tokens``, fewer where each has one of ``stops``."""
        answers: list[list[int]] = [[] for _ in tokens]
        waiting = set(range(len(tokens)))
        for step in self.engine.generate(torch.tensor(tokens), num_tokens):
            for row, token in enumerate(step.tolist()):
                answers[row].append(token)
                if any(answers[row][-len(stop) :] == stop for stop in stops):
                    waiting.discard(row)
            if not waiting:
                break
        return answers

    def report(self) -> None:
        """Write the times of the calls to shared memory, after the rank has taken the time of the window."""
        begins, ends, excluded = torch.tensor((self.begins, self.ends, self.excluded), dtype=torch.float64)
        self.times[:, : len(self.calls)] = torch.stack((ends - begins, excluded, begins))
        self.results.clear()

    def usage(self) -> dict[str, Any]:
        """Return the engine's peak device memory."""
        return {"peak_device_memory_mib": self.engine.device_memory_mib()}

    def _view(self, slot: int, size: int) -> list[Tensor]:
        key = (slot, size)
        if key not in self.views:
            self.views[key] = self.slots.views(self.inputs, slot, size)
        return self.views[key]

    def _keep(self, results: list[Any], sizes: list[int], room: list[Tensor]) -> None:
        """Copy the outputs of calls to shared memory.

        Raises:
            InferenceError: they are no outputs for these calls.
        """
        try:
            for index, target in enumerate(room):
                parts = [outputs[index] for outputs, _ in results]
                if sum([part.shape[0] for part in parts]) != target.shape[0]:
                    raise IndexError
                torch.cat(parts, out=target)
        except Exception:
            for result, size in zip(results, sizes, strict=True):
                check_outputs(result, self.engine.name, size, self.answers.rows)
            raise


def main(arguments: list[str], worker_type: type[Worker] = Worker) -> None:
    """Serve the rank until it closes the connection."""
    connection_fd, inputs_fd, outputs_fd, parent = map(int, arguments)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides what an interruption of the terminal ends
    connection: Connection[Any, Any] = Connection(connection_fd)
    worker = worker_type((inputs_fd, outputs_fd))
    sending = threading.Lock()

    def reply(message: bytes) -> None:
        if worker.place.rank and message[:1] in (TOKENS, ENDED):
            return
        with sending:
            connection.send_bytes(message)

    with torch.inference_mode():  # entered once, not in each call
        while True:
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                _serve(worker, message, reply)
            except Exception as error:  # noqa: BLE001 - an engine may raise anything
                traceback.print_exc()
                reply(error_reply(error))


def error_reply(error: Exception) -> bytes:
    """Return the reply of a command that failed."""
    return json.dumps({"error": described(error)}).encode()


def times_of(memory: Tensor, num_calls: int) -> Tensor:
    """Return the times of calls in s, of shape (3, calls): durations, parts that are not inference, beginnings."""
    return memory[: TIMES_BYTES * num_calls].view(torch.float64).view(3, num_calls)


def _serve(worker: Worker, message: bytes, reply: Callable[[bytes], None]) -> None:
    if message == RUN:
        worker.run()
        reply(DONE)
        worker.report()
        reply(DONE)
    elif message == ECHO:
        reply(DONE)
    elif message[:1] == GENERATE:
        for tokens in worker.generate(_numbers(message)):
            reply(tokens)
        reply(DONE)
    elif message[:1] == PICK:
        worker.pick(_numbers(message))
        reply(DONE)
    elif message[:1] == START:
        worker.start(_numbers(message), reply)
    else:
        command, values = json.loads(message)
        found = getattr(worker, command)(**values)
        reply(json.dumps({"reply": found}).encode())


def _numbers(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message[1:]), dtype=torch.int64)


if __name__ == "__main__":
    from accelmark.infer.process import worker  # by its own name: what an engine finds in __main__ is not this module

    worker.main(sys.argv[1:])
