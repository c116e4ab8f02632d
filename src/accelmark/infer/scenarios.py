"""Run the four MLPerf inference scenarios with an engine in its process, and check the answers."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final, TypeVar

import torch
from torch import Tensor

from accelmark.infer.case import InferBatch
from accelmark.infer.engine import Context, Slots, classify, rows_of
from accelmark.infer.engine_process import EngineProcess
from accelmark.infer.measure import REPEAT_CALLS, Answers, CheckedPass, repeat_check
from accelmark.serving.load import EXPECTED_STEPS, FIRST_SHARE, search_rate
from accelmark.serving.loadgen import MLPERF_MIN_DURATION_S, LoadGenLog, Query, library, read_log, start_test
from accelmark.serving.request import LoadGenSettings
from accelmark.serving.stages import LoadReporter
from accelmark.spec.backports import zip_strict
from accelmark.spec.log.inference import SCENARIO_PHASES, AnswerCheck, RepeatCheck, ScenarioResult
from accelmark.spec.settings.inference import ScenarioName

_MAX_ITEMS: Final = 1024
_MAX_BYTES: Final = 256 * 2**20
_LATENCIES: Final = dict.fromkeys(("offline", "server", "single_stream"), "result_{}_percentile_latency_ns") | {
    "multi_stream": "result_{}_percentile_per_query_latency_ns"
}
"""Keys of LoadGen's percentiles: of samples, in MultiStream of queries."""

T = TypeVar("T")
Look = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Gets the indices and outputs of a call."""


@dataclass
class Scenarios:
    """Runs the scenarios of the settings with the engine of ``checked``."""

    checked: CheckedPass
    fixed_batch: bool
    node_dir: Path
    context: Context

    def __post_init__(self) -> None:
        self.settings = self.checked.settings
        self.library = Library(self.checked, max(self.settings.batch_size, self.settings.multi_stream_samples))
        self.minimum = LoadGenSettings(self.settings.scenario_duration_s, self.settings.scenario_queries)
        self.samples = AnswerSamples(self.library)
        self.round_trip_us = self.checked.process.round_trip_s() * 1e6
        self.progress = LoadReporter(self.checked.emit)
        self.later_s = 0.0

    def run(self) -> Iterator[ScenarioResult]:
        """Run them in the order of the settings; yield each result immediately."""
        kinds = {"offline": self._offline, "server": self._server}
        names = self.settings.scenarios
        for place, name in enumerate(names):
            num_later = sum(EXPECTED_STEPS if later == "server" else 1 for later in names[place + 1 :])
            self.later_s = num_later * self.minimum.min_duration_s
            self.samples = AnswerSamples(self.library)
            yield kinds[name]() if name in kinds else self._stream(name)

    def _offline(self) -> ScenarioResult:
        rate = self._rate()
        for _ in range(2):  # again where the estimate was too low for the minimum duration
            # LoadGen advises to expect more than the measured rate.
            expected = replace(self.minimum, queries_per_s=1.2 * rate)
            log = self._measured("offline", expected, self._log_dir("offline"))
            if log.long_enough:
                break
            rate = log.number("result_samples_per_second") or expected.queries_per_s
        return self._result("offline", log, "samples_per_second", log.number("result_samples_per_second"), expected)

    def _stream(self, name: ScenarioName) -> ScenarioResult:
        samples = self.settings.multi_stream_samples if name == "multi_stream" else 1
        expected = replace(self.minimum, latency_s=self._call_s(samples) / 2, samples_per_query=samples)
        percentile = "p90"
        if name == "multi_stream":
            least = max(self.settings.scenario_queries, self.settings.multi_stream_queries)
            expected, percentile = replace(expected, min_queries=least), "p99"
        log = self._measured(name, expected, self._log_dir(name))
        figure = log.percentiles_ms(_LATENCIES["multi_stream" if samples > 1 else "single_stream"]).get(percentile)
        return self._result(name, log, f"latency_{percentile}_ms", figure, expected)

    def _server(self) -> ScenarioResult:
        bound_ms = self.settings.server_latency_bound_ms
        least = max(self.settings.scenario_queries, self.settings.server_queries)
        minimum = replace(self.minimum, min_queries=least, latency_bound_ms=bound_ms)
        logs: dict[float, LoadGenLog] = {}

        def meets_bound(rate: float, steps_left: int) -> bool:
            log_dir = self._log_dir("server") / f"try{len(logs) + 1:02}_qps_{rate:.3f}"
            logs[rate] = self._measured("server", replace(minimum, queries_per_s=rate), log_dir, steps_left)
            return logs[rate].bound_met

        best = search_rate(meets_bound, FIRST_SHARE * self._rate(), max_steps=10)
        shown = min(logs) if best is None else best
        result = self._result("server", logs[shown], "queries_per_second", best, replace(minimum, queries_per_s=shown))
        reason = "no tried rate met the latency bound" if best is None else result.reason
        tried = tuple((rate, log.bound_met) for rate, log in logs.items())
        return result.model_copy(update={"latency_bound_ms": bound_ms, "tried": tried, "reason": reason})

    def _log_dir(self, name: ScenarioName) -> Path:
        return self.node_dir / "loadgen" / name

    def _measured(
        self, name: ScenarioName, expected: LoadGenSettings, log_dir: Path, steps_left: int = 0
    ) -> LoadGenLog:
        """Run LoadGen in performance mode; ``steps_left`` further runs of this scenario are likely."""
        query_s = 1 / expected.queries_per_s if name in ("offline", "server") else self.checked.call_s
        run_s = max(expected.min_duration_s, expected.min_queries * query_s)
        self.progress.begin(SCENARIO_PHASES[name], run_s, steps_left * run_s + self.later_s)
        self._run_loadgen(name, expected, self.samples.take, log_dir)
        return read_log(log_dir)

    def _run_loadgen(
        self, name: ScenarioName, expected: LoadGenSettings, look: Look, log_dir: Path, *, accuracy: bool = False
    ) -> None:
        """Run LoadGen in performance mode, or let it ask for each item once; it logs to ``log_dir``."""
        lg = library()
        batched, process = name in ("offline", "server"), self.checked.process

        def take(indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
            look(indices, outputs)
            self.progress.add(len(indices))

        def complete(queries: Sequence[Query]) -> None:
            lg.QuerySamplesComplete([lg.QuerySampleResponse(query.id, 0, 0) for query in queries])

        queue = RequestQueue(
            process,
            take,
            complete,
            batch_size=self.settings.batch_size if batched else expected.samples_per_query,
            padded=self.fixed_batch or not batched,
            overlapped=batched and process.concurrency > 1,
            context=self.context._replace(activity=f"scenario {name}"),
        )
        with queue:
            start_test(lg, name, expected, queue.issue, len(self.library), log_dir, accuracy=accuracy)
        queue.raise_failure()

    def _rate(self) -> float:
        size = self.settings.batch_size
        return self.checked.process.concurrency * size / self._call_s(size)

    def _call_s(self, size: int) -> float:
        """Return the median duration of a call of ``size`` items in s, after a warm-up call."""
        indices = [index % len(self.library) for index in range(size)]
        return statistics.median([self.library.timed_ms(indices) for _ in range(6)][1:]) / 1000

    def _result(
        self, name: ScenarioName, log: LoadGenLog, figure_name: str, figure: float | None, expected: LoadGenSettings
    ) -> ScenarioResult:
        samples = self.samples.compared()
        accuracy = None
        if self.checked.reference is not None:  # every item in LoadGen's accuracy mode
            every = AnswerSamples(self.library, share=1.0)
            self._run_loadgen(name, expected, every.take, self._log_dir(name) / "accuracy", accuracy=True)
            accuracy = every.compared()
        size = self.settings.batch_size if name in ("offline", "server") else expected.samples_per_query
        return ScenarioResult.model_validate(
            {
                "scenario": name,
                "valid": log.valid,
                "functional": self.settings.scenario_duration_s < MLPERF_MIN_DURATION_S,
                "figure": figure,
                "figure_name": figure_name,
                "latencies_ms": log.percentiles_ms(_LATENCIES[name]),
                "log_dir": str(self._log_dir(name).relative_to(self.node_dir)),
                "reason": log.reason,
                "crossing_us": self.round_trip_us,
                "accuracy_answers": accuracy,
                "performance_answers": samples,
                "repeat_check": self.library.repeat_check(size) if self.settings.repeat_check else None,
            }
        )


class Library:
    """Up to 1,024 perturbed items in the first slot, followed by room for items that are new to the engine."""

    def __init__(self, checked: CheckedPass, largest_call: int) -> None:
        self.checked = checked
        self.process = checked.process
        unchanged: list[tuple[Tensor, ...]] = []
        inputs: list[tuple[Tensor, ...]] = []
        count = size = 0
        for batch in checked.batches:
            unchanged.append(batch.inputs)
            inputs.append(checked.case.perturbed(batch, checked.generator))
            count += batch.num_items
            size += sum(each.nbytes for each in batch.inputs)
            if count >= _MAX_ITEMS or size >= _MAX_BYTES:
                break
        self.unchanged = [torch.cat(parts)[:_MAX_ITEMS] for parts in zip_strict(*unchanged)]
        self.inputs = [torch.cat(parts)[:_MAX_ITEMS] for parts in zip_strict(*inputs)]
        self.largest_call = largest_call
        room = [torch.zeros(largest_call, *tensor.shape[1:], dtype=tensor.dtype) for tensor in self.inputs]
        whole = [torch.cat([each, more]) for each, more in zip_strict(self.inputs, room)]
        warm = min(len(self), checked.settings.batch_size)
        self.process.allocate_inputs(Slots(rows_of(whole), len(whole[0]), 1), (0, warm), whole)
        self.process.allocate_outputs(self.process.answers.rows, largest_call, self.process.concurrency)
        self.expected: list[Tensor] = []
        if checked.reference is not None and not checked.iterative:
            parts = [
                checked.reference([each[first : first + 64] for each in self.inputs])
                for first in range(0, len(self), 64)
            ]
            self.expected = [torch.cat(outputs) for outputs in zip_strict(*parts)]

    def __len__(self) -> int:
        return len(self.inputs[0])

    def answers(self, indices: Sequence[int], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the framework's answers to items, which ``outputs`` of the engine are compared with."""
        if self.expected:
            return [each[indices] for each in self.expected]
        assert self.checked.reference is not None  # noqa: S101 - nothing is kept without it
        return self.checked.reference([*(tensor[indices] for tensor in self.inputs), *outputs])

    def repeat_check(self, size: int) -> RepeatCheck:
        """Compare the time of items that are new to the engine with the library's items, which it computed often."""
        size = min(size, len(self))
        new = range(len(self), len(self) + size)
        calls_ms: list[list[float]] = []
        for _ in range(12):
            first = self.checked.chance.randrange(len(self) - size + 1)
            known = range(first, first + size)
            batch = InferBatch(tuple(tensor[first : first + size] for tensor in self.unchanged), None)
            fresh = self.checked.case.perturbed(batch, self.checked.generator)
            kinds = [new, *(known if call % 2 else new for call in range(1, REPEAT_CALLS))]
            calls_ms.append([self._new_ms(rows, known, fresh) for rows in kinds])
        return repeat_check(calls_ms)

    def _new_ms(self, rows: range, known: range, fresh: Sequence[Tensor]) -> float:
        """Return the duration of a call, after a call of other items and with all inputs copied anew."""
        views = self.process.slots.views(self.process.shared, 0, len(self) + self.largest_call)
        self.process.pick([len(self) - 1] * len(rows))
        for view, tensor, other in zip_strict(views, self.inputs, fresh):
            view[known.start : known.stop] = tensor[known.start : known.stop]
            view[len(self) : len(self) + len(rows)] = other
        return self.timed_ms(list(rows))

    def timed_ms(self, indices: Sequence[int]) -> float:
        """Return the duration of a call of items."""
        began = time.perf_counter()
        self.process.pick(indices)
        return (time.perf_counter() - began) * 1000


class AnswerSamples:
    """Answers of a random share of the calls and of the first call of each size, for comparison after the test."""

    def __init__(self, library: Library, share: float = 0.05) -> None:
        self.library = library
        self.share = share
        self.held: list[tuple[list[int], list[Tensor]]] = []
        self.held_bytes = 0
        self.sizes: set[int] = set()
        self.num_not_compared = 0

    def take(self, indices: Sequence[int], outputs: Sequence[Tensor]) -> None:
        """Keep the answers of a call, if it is in the sample; padding is left out."""
        size = len(indices)
        chosen = size not in self.sizes or self.library.checked.chance.random() < self.share
        if self.library.checked.reference is None or not chosen or self.held_bytes > _MAX_BYTES:
            self.num_not_compared += size
            return
        self.sizes.add(size)
        copies = [output[:size].clone() for output in outputs]
        self.held_bytes += sum(copy.nbytes for copy in copies)
        self.held.append((list(indices), copies))

    def compared(self) -> AnswerCheck | None:
        """Compare the kept outputs with the framework's answers; None without answers."""
        if self.library.checked.reference is None:
            return None
        answers = Answers(iterative=self.library.checked.iterative)
        for indices, outputs in self.held:
            answers.add(outputs, self.library.answers(indices, outputs))
        return answers.result(num_not_compared=self.num_not_compared)


@dataclass
class RequestQueue:
    """A thread that runs the waiting queries through the engine, up to a batch at a time.

    Entering the context starts the thread, which warms the engine up; leaving it drains the queue.
    """

    engine: EngineProcess
    look: Look
    complete: Callable[[Sequence[Query]], None]
    """Called with completed queries."""
    batch_size: int
    padded: bool
    """Whether calls repeat their last item up to ``batch_size``."""
    overlapped: bool
    """Whether calls are computed at the same time, and a second thread completes them."""
    context: Context
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._waiting: deque[Query] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._warmed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)

    def __enter__(self) -> RequestQueue:
        self._thread.start()
        self._warmed.wait()
        if self.failure is not None:
            self.__exit__()
            self.raise_failure()
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    def issue(self, queries: Sequence[Query]) -> None:
        """Add queries; returns at once."""
        with self._change:
            self._waiting.extend(queries)
            self._change.notify()

    def raise_failure(self) -> None:
        """Raise the engine's error, if it failed."""
        if self.failure is not None:
            raise classify(self.failure, self.context) from self.failure

    def _full(self, indices: list[int]) -> list[int]:
        return indices + indices[-1:] * (self.batch_size - len(indices)) if self.padded else indices

    def _run(self) -> None:
        # Before LoadGen measures; __enter__ raises a failure.
        self._attempt(lambda: [self.engine.pick(self._full([0] * size)) for size in {self.batch_size, 1}])
        self._warmed.set()
        if self.overlapped:
            self._process_overlapped()
            return
        while taken := self._next_queries():
            indices = [query.index for query in taken]
            outputs = self._attempt(partial(self.engine.pick, self._full(indices)))
            self.complete(taken)
            if outputs:
                self.look(indices, outputs)

    def _next_queries(self) -> list[Query]:
        """Wait for queries; return up to a batch of them, none after the end."""
        with self._change:
            while not self._waiting and not self._closed:
                self._change.wait()
            return [self._waiting.popleft() for _ in range(min(self.batch_size, len(self._waiting)))]

    def _process_overlapped(self) -> None:
        engine = self.engine
        free: SimpleQueue[int] = SimpleQueue()
        for slot in range(engine.concurrency):
            free.put(slot)
        running: dict[int, list[Query]] = {}
        started: SimpleQueue[bool] = SimpleQueue()

        def collect() -> None:
            while started.get():
                ended = self._attempt(engine.ended)
                slot = next(iter(running)) if ended is None else ended  # after a failure every query is completed
                taken = running.pop(slot)
                self.complete(taken)
                if ended is not None:
                    indices = [query.index for query in taken]
                    self.look(indices, engine.outputs_of(slot, len(self._full(indices))))
                free.put(slot)

        collector = threading.Thread(target=collect, name="answers", daemon=True)
        collector.start()
        while taken := self._next_queries():
            slot = free.get()
            running[slot] = taken
            self._attempt(partial(engine.start, slot, self._full([query.index for query in taken])))
            started.put(True)
        started.put(False)
        collector.join()

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Return the result of ``action``, None if it or an earlier action failed: LoadGen waits for every response."""
        if self.failure is None:
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - raised after the test
                self.failure = error
        return None
