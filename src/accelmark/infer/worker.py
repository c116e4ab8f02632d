"""``python -m accelmark.infer.worker CONNECTION INPUTS OUTPUTS PARENT``: the process of an engine.

It gets shapes, indices and inputs, never labels, a data set or a job. The numbers that it reports count as far as the
rank's own clock and comparisons confirm them. With several devices each has a process, which the variables of
``RankPlace`` identify; all but the first send no outputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import mmap
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelmark.infer.engine import (
    ComputeDevice,
    Engine,
    EngineRequest,
    InferenceError,
    Rows,
    Slots,
    check_outputs,
    check_separate_memory,
    described,
    file_hash,
    mapped,
    rows_of,
)
from accelmark.infer.engines import engine_class
from accelmark.infer.language_model import load_model
from accelmark.spec.backports import zip_strict
from accelmark.spec.plugins.catalog import FolderRef, folder_module
from accelmark.spec.plugins.framework import RankPlace


class Worker:
    """Executes commands, one at a time; each public method but ``start`` is a command, and its result is the reply."""

    results: list[Any]
    """Outputs of the window's calls, until its times are reported."""

    def __init__(self, inputs: int, outputs: int, reply: Callable[[dict[str, Any]], None]) -> None:
        """Take the descriptors of the memory of inputs and outputs, and a function that sends a message."""
        self.place = RankPlace.from_environment()
        self._descriptors = inputs, outputs
        self._reply = reply
        self._views: dict[tuple[int, int], list[Tensor]] = {}

    def echo(self) -> None:
        """Do nothing: measures the round trip."""

    def open(self, engine: str, vendor: Path | None, device: ComputeDevice) -> dict[str, Any]:
        """Import the engine's class; return its stated properties."""
        self.device = device
        kind = self.kind = engine_class(engine, vendor)
        stated = ("reads", "loads", "fixed_batch", "generates", "iterates", "max_devices")
        return {name: getattr(kind, name) for name in stated} | {
            "has_logits": kind.logits is not Engine.logits,
            "known_options": None if kind.known_options is None else sorted(kind.known_options),
        }

    @torch.inference_mode(False)  # compilers refuse parameters that were created in it
    def compile(self, modules: list[tuple[FolderRef, str]]) -> dict[str, Any]:
        """Compile the model, or load an engine, as requested in the memory of inputs; return the engine's details."""
        self.device.prepare(self.place)
        for folder, module in modules:
            folder_module(folder, module)
        # Mapped: processes that inherited one descriptor share its position.
        with mmap.mmap(self._descriptors[0], 0, access=mmap.ACCESS_READ) as file:
            request: EngineRequest = torch.load(file, weights_only=False, map_location="cpu")  # type: ignore[arg-type]
        device = self.device
        request = replace(request, device=device.device, threads=device.threads, num_devices=self.place.world_size)
        directory = request.model_dir
        if directory is not None and self.place.world_size == 1 and request.gives_model(self.kind.reads):
            request = replace(request, model=load_model(directory))
        self.engine = self.kind(request)
        self.engine.request = replace(request, model=None)  # an accelerator has its own copy
        details: dict[str, Any] = {**self.engine.describe(), "concurrency": self.engine.concurrency}
        if self.engine.file is not None:
            details["engine_file"] = str(self.engine.file)
        if (types := self.engine.graph_types()) is not None:
            details["graph_types"] = " ".join(f"{name}:{count}" for name, count in sorted(types.items()))
        return details

    def hashes(self) -> dict[str, Any]:
        """Return hashes of the engine's input, of its saved file, and of its code if that is not AccelMark's."""
        engine, request = self.engine, self.engine.request
        hashes: dict[str, Any] = {"reads": engine.reads}
        if request.engine_path is not None:
            hashes["engine_given_sha256"] = file_hash(request.engine_path)
        elif engine.reads != "model" and request.onnx_path is not None:
            hashes["onnx_sha256"] = file_hash(request.onnx_path)
        if engine.file is not None and engine.file.exists():
            hashes["engine_sha256"] = file_hash(engine.file)
        if not self.kind.__module__.startswith("accelmark.infer.engines."):
            path = Path(inspect.getfile(self.kind))
            lines = map(str.strip, path.read_text(encoding="utf-8", errors="replace").splitlines())
            hashes["engine_code"] = "/".join(path.parts[-2:])
            hashes["engine_code_lines"] = sum(1 for line in lines if line and not line.startswith("#"))
            hashes["engine_code_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        return hashes

    def allocate_inputs(self, slots: Slots, warm: tuple[int, int]) -> None:
        """Map the inputs; ``warm`` is the slot and the size of the batch for untimed calls."""
        self._views.clear()
        self.slots, self.inputs = slots, mapped(self._descriptors[0])
        self.device.pin(self.inputs)
        self.items = self._view(0, slots.slot_items)
        self.warm = [each.clone() for each in self._view(*warm)]

    def warm_up(self, calls: list[tuple[int, int]]) -> Rows:
        """Compute calls without a clock; check their outputs, and return the types and shapes of an item of them."""
        results = [self.engine(list(self._view(*call))) for call in calls]
        for result in results:
            check_outputs(result, self.engine.name)
        check_separate_memory([outputs for outputs, _ in results], self.engine.name)
        return rows_of(results[0][0])

    def allocate_outputs(self, answers: Slots) -> None:
        """Map the memory for outputs."""
        self.answers, self.outputs = answers, mapped(self._descriptors[1])

    def prepare(self, calls: list[tuple[int, int]], *, warm: bool = True) -> None:
        """Make the calls of a window, and compute one untimed call if ``warm``: threads awake, code in caches."""
        self.calls = [list(self._view(slot, size)) for slot, size in calls]
        self.sizes = [size for _, size in calls]
        self.room = self.answers.views(self.outputs, 0, sum(self.sizes))
        if warm:
            self.engine([tensor.clone() for tensor in self.warm])

    def run(self) -> None:
        """Compute the window that was prepared."""
        if self.engine.concurrency > 1:
            timed = self.engine.concurrently(self.calls)
            self.results = [(outputs, 0.0) for outputs, _, _ in timed]
            self.begins, self.ends = [begin for _, begin, _ in timed], [end for _, _, end in timed]
            self._keep(self.results, self.sizes, self.room)
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
        self.begins, self.ends = instants[:-1], instants[1:]

    def times(self) -> list[list[float]]:
        """Return when the calls of the window began and ended in s, and the seconds of each that were not inference."""
        excluded = [other_s for _, other_s in self.results]
        self.results.clear()
        return [self.begins, self.ends, excluded]

    def pick(self, indices: list[int]) -> None:
        """Compute one call of the items with these indices in the first slot."""
        chosen = torch.tensor(indices)
        result = self.engine([item.index_select(0, chosen) for item in self.items])
        self._keep([result], [len(indices)], self.answers.views(self.outputs, 0, len(indices)))

    def start(self, slot: int, indices: list[int]) -> None:
        """Start a call of the items with these indices in the first slot; send its slot when it has ended."""

        def done(call: Future[tuple[list[Tensor], float]]) -> None:
            try:
                with torch.inference_mode():  # which the shared memory was mapped in
                    self._keep([call.result()], [len(indices)], self.answers.views(self.outputs, slot, len(indices)))
            except Exception as raised:  # noqa: BLE001 - an engine may raise anything
                traceback.print_exception(raised)
                self._reply(described(raised))
            else:
                self._reply({"part": slot})

        chosen = torch.tensor(indices)
        self.engine.submit([item.index_select(0, chosen) for item in self.items]).add_done_callback(done)

    def generate(self, tokens: list[list[int]], num_tokens: int) -> Iterator[list[int]]:
        """Yield the tokens of each step."""
        for step in self.engine.generate(torch.tensor(tokens), num_tokens):
            yield step.tolist()

    def score(self, tokens: list[list[int]], continuations: list[list[list[int]]]) -> list[list[tuple[float, bool]]]:
        """Return the log-likelihood of each continuation in nats, and whether greedy decoding gives it.

        ``tokens`` are each prompt's and its continuations' but their last one, which alone differs; all of one length.
        """
        length = len(continuations[0][0])
        logits = self.engine.logits(torch.tensor(tokens), length).float()
        if logits.shape[:2] != (len(tokens), length):
            problem = f"engine {self.engine.name}: returns logits of shape {tuple(logits.shape)}"
            raise InferenceError(f"{problem}, expected ({len(tokens)}, {length}, vocabulary)", "wrong_shape")
        return [
            [(float(row[range(length), each].sum()), row.argmax(-1).tolist() == each) for each in candidates]
            for row, candidates in zip_strict(logits.log_softmax(-1), continuations)
        ]

    def answer(self, tokens: list[list[int]], num_tokens: int, stops: list[list[int]]) -> list[list[int]]:
        """Return greedy answers to prompts of one length: ``num_tokens``, fewer where each has one of ``stops``."""
        answers: list[list[int]] = [[] for _ in tokens]
        unfinished = set(range(len(tokens)))
        for step in self.engine.generate(torch.tensor(tokens), num_tokens):
            for row, token in enumerate(step.tolist()):
                answers[row].append(token)
                if any(answers[row][-len(stop) :] == stop for stop in stops):
                    unfinished.discard(row)
            if not unfinished:
                break
        return answers

    def device_memory_mib(self) -> float | None:
        """Return the engine's peak device memory."""
        return self.engine.device_memory_mib()

    def _view(self, slot: int, size: int) -> list[Tensor]:
        key = (slot, size)
        if key not in self._views:
            self._views[key] = self.slots.views(self.inputs, slot, size)
        return self._views[key]

    def _keep(self, results: list[Any], sizes: list[int], room: list[Tensor]) -> None:
        """Copy the outputs of calls to shared memory. Raises InferenceError: they are not outputs of these calls."""
        try:
            for index, target in enumerate(room):
                parts = [outputs[index] for outputs, _ in results]
                if sum([part.shape[0] for part in parts]) != target.shape[0]:
                    raise IndexError
                torch.cat(parts, out=target)
        except Exception:
            for result, size in zip_strict(results, sizes):
                check_outputs(result, self.engine.name, size, self.answers.rows)
            raise


def main(arguments: list[str], worker_type: type[Worker] = Worker) -> None:
    """Execute the rank's commands until it closes the connection."""
    connection_fd, inputs_fd, outputs_fd, parent = map(int, arguments)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank handles an interruption from the terminal
    connection: Connection[Any, Any] = Connection(connection_fd)
    sending = threading.Lock()

    def reply(message: dict[str, Any]) -> None:
        if worker.place.rank and "part" in message:
            return
        with sending:
            connection.send_bytes(json.dumps(message).encode())

    worker = worker_type(inputs_fd, outputs_fd, reply)
    with torch.inference_mode():  # entered once, not in each call
        while True:
            try:
                command, options, named = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the rank
            except (EOFError, OSError):
                return
            try:
                value = getattr(worker, command)(*options, **named)
                if isinstance(value, Iterator):
                    for part in value:
                        reply({"part": part})
                    value = None
                if command != "start":
                    reply({"value": value})
            except Exception as error:  # noqa: BLE001 - an engine may raise anything
                traceback.print_exc()
                reply(described(error))


if __name__ == "__main__":
    from accelmark.infer import worker  # by its own name: an engine sees another module as __main__

    worker.main(sys.argv[1:])
