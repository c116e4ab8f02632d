"""Measure a case: in the framework batch by batch, and in an engine's process with its answers and caches checked."""

from __future__ import annotations

import math
import random
import secrets
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, reduce
from itertools import chain, groupby, islice, permutations
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor

from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.engine import InferenceError, Slots, rows_of
from accelmark.infer.engine_process import EngineProcess, TimedWindow
from accelmark.spec.backports import pairwise, zip_strict
from accelmark.spec.log.events import Event
from accelmark.spec.log.inference import AnswerCheck, ForwardWindow, InferEvaluation, RepeatCheck, WarmUp
from accelmark.spec.model import Spec
from accelmark.tasks.metrics import IGNORED

Forward = Callable[[list[Tensor]], list[Tensor]]
"""Inputs to outputs; tensors are on the CPU."""
Emit = Callable[[Event, Spec], None]
_CHECKS: Final = 12
"""Largest number of batches that are computed again, at random places of the passes: a tenth of all, fewer where that
would take longer than ``_CHECKS_S``, and at least ``_FEWEST_CHECKS``."""
_FEWEST_CHECKS: Final = 6
_CHECKS_S: Final = 3.0
_SAMPLE: Final = 0.1
"""Largest share of the answers after the first pass that are compared."""
_MOST_SAMPLED: Final = 256
"""About the largest number of these, each of another call: as many miss wrong answers of 2 % of the calls in 0.6 % of
runs."""


class Measured(NamedTuple):
    """The measurements of one phase."""

    windows: tuple[ForwardWindow, ...]
    metrics: Mapping[str, float | None]


class Score:
    """The case's metrics over outputs, compared with labels unless the data is synthetic or the model untrained."""

    def __init__(self, case: InferCase) -> None:
        self.case = case
        self.evaluated = case.trained and not case.settings.synthetic
        self.sums: Counter[str] = Counter()
        self.rows: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.num_items = 0

    def add(self, outputs: Sequence[Tensor], labels: Tensor | None) -> None:
        """Evaluate the outputs of some items."""
        if not self.evaluated or labels is None:
            return
        plain = [output.float() if output.is_floating_point() else output for output in outputs]
        _check_rows(plain, len(labels))
        for name, value in self.case.evaluator(plain, labels).items():
            if isinstance(value, Tensor):
                items = value[:, :1].double() + self.num_items  # the same item in another pass is another one
                self.rows[name].append(torch.cat([items, value[:, 1:].double()], 1))
            else:
                self.sums[name] += value  # type: ignore[assignment] # Counter adds floats as well
        self.num_items += len(labels)

    def metrics(self) -> dict[str, float | None]:
        """Return the metrics; None for those that are not finite."""
        metrics = self.case.metrics(dict(self.sums)) if self.sums else {}
        if self.rows:
            metrics |= self.case.row_metrics({name: torch.cat(values).numpy() for name, values in self.rows.items()})
        return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def measure(forward: Forward, batches: InferBatches, case: InferCase, emit: Emit) -> Measured:
    """Warm the framework up, run ``settings.repeat`` passes over ``batches``, and emit windows and the evaluation."""
    settings = case.settings
    first = next(iter(batches))

    def call_ms() -> float:
        began = time.perf_counter()
        forward(list(first.inputs))
        return (time.perf_counter() - began) * 1000

    first_ms = call_ms()
    calls_ms = tuple(call_ms() for _ in range(settings.warmup_batches))
    emit(Event.WARMUP, WarmUp(phase="validation", first_call_ms=first_ms, calls_ms=calls_ms))
    score = Score(case)
    planned_items = settings.repeat * batches.num_items
    windows: list[ForwardWindow] = []
    for pass_number in range(1, settings.repeat + 1):
        batches_left = chain.from_iterable([batches])  # the pass starts within its first window
        while (
            window := _window(forward, islice(batches_left, settings.log_freq), pass_number, planned_items, score)
        ).items:
            emit(Event.FORWARD, window)
            windows.append(window)
    num_items = sum(sum(window.items) for window in windows)
    metrics = score.metrics()
    emit(Event.EVALUATE, InferEvaluation(phase="validation", num_items=num_items, metrics=metrics))
    return Measured(tuple(windows), metrics)


def _window(
    forward: Forward, batches: Iterable[InferBatch], pass_number: int, planned_items: int, score: Score
) -> ForwardWindow:
    """Compute batches in the framework; their outputs are evaluated together."""
    opened = time.perf_counter()
    held: list[tuple[InferBatch, list[Tensor]]] = []
    items, latency_ms = list[int](), list[float]()
    held_bytes = nonfinite = 0

    def evaluate() -> None:
        nonlocal held_bytes, nonfinite
        for batch, outputs in held:
            _check_rows(outputs, batch.num_items)
            items.append(batch.num_items)
            nonfinite += not is_finite(outputs)
            score.add(outputs, batch.labels)
        held.clear()
        held_bytes = 0

    for batch in batches:
        inputs = list(batch.inputs)
        began = time.perf_counter()
        outputs = forward(inputs)
        latency_ms.append((time.perf_counter() - began) * 1000)
        held.append((batch, outputs))
        held_bytes += sum(output.nbytes for output in outputs)
        if held_bytes > 32 * 2**20:
            evaluate()
    evaluate()
    return ForwardWindow(
        phase="validation",
        pass_number=pass_number,
        items=tuple(items),
        latency_ms=tuple(latency_ms),
        not_inference_ms=(0.0,) * len(items),
        wall_ms=(time.perf_counter() - opened) * 1000,
        nonfinite_batches=nonfinite,
        planned_items=planned_items,
    )


def _check_rows(outputs: Sequence[Tensor], num_items: int) -> None:
    if outputs[0].shape[0] != num_items:
        problem = f"the model returned {outputs[0].shape[0]} rows for {num_items} items"
        raise InferenceError(f"{problem}; export it with a dynamic batch", "wrong_shape")


def is_finite(outputs: Sequence[Tensor]) -> bool:
    """Return whether all values are finite; a finite sum suffices."""
    floating = (output for output in outputs if output.is_floating_point())
    return all(
        math.isfinite(output.sum(dtype=torch.float32).item()) or bool(torch.isfinite(output).all())
        for output in floating
    )


class _Chunk(NamedTuple):
    """Items of one window, which are staged in the slots of their calls."""

    order: Tensor
    """For each item of the calls its place among those that were read."""
    labels: Tensor | None
    """In the order of the calls."""
    sizes: list[int]

    def calls(self) -> Iterator[slice]:
        """Yield the rows of each call."""
        begin = 0
        for size in self.sizes:
            yield slice(begin, begin + size)
            begin += size


@dataclass
class CheckedPass:
    """The measured passes of an engine over changed and reordered inputs."""

    case: InferCase
    batches: InferBatches
    process: EngineProcess
    reference: Forward | None
    """Computes inputs in the framework, in fp32; None without it."""
    emit: Emit
    iterative: bool = False
    """Whether the model is an ``IterativeModel``, whose steps ``reference`` computes again from the engine's."""

    def __post_init__(self) -> None:
        self.settings = self.case.settings
        self.seed = secrets.randbits(63)  # after the compilation, so that nothing was compiled for it
        self.generator = Generator().manual_seed(self.seed)
        self.chance = random.Random(self.seed)
        self.answers = Answers(iterative=self.iterative)
        self.num_not_compared = 0
        self.score = Score(self.case)
        self.compared_score, self.expected_score = Score(self.case), Score(self.case)
        """Of engine and framework, over the inputs of the first pass."""
        self.num_scored = 0
        self.call_s = 0.0
        self.read: list[Tensor] = []
        """The items of a window before their perturbation, as they were read."""
        self.window_calls = 1
        self.window_passes = 1
        """Passes that are computed in one window, where a pass is shorter than a window should be."""
        self.check_calls = 1
        self.measured_s = 0.0
        self.planned_items = 0
        self.repeated_ms: list[list[float]] = []

    def run(self) -> tuple[Measured, RepeatCheck | None, AnswerCheck | None]:
        """Warm up and measure; return the measurement and both checks. Raises AccelmarkError: the engine failed."""
        self._warm_up(next(iter(self.batches)))
        windows: list[ForwardWindow] = []
        num_passes = 0
        while number := self._num_passes(num_passes):
            self.planned_items = (num_passes + number) * self.batches.num_items
            # The first pass has windows of its own, since all of it is compared.
            alone = int(num_passes == 0)
            spans = list(pairwise([*range(alone), *range(alone, number, self.window_passes), number]))
            places = iter(self._places([end - first for first, end in spans]))
            for first, end in spans:
                for chunk, load_s in self._chunks(end - first):
                    windows.append(self._window(chunk, num_passes + first + 1, load_s))
                    for _ in range(next(places, 0)):
                        self._compute_again(chunk)
            num_passes += number
        num_items = sum(sum(window.items) for window in windows)
        metrics = self.score.metrics()
        self.emit(Event.EVALUATE, InferEvaluation(phase="inference", num_items=num_items, metrics=metrics))
        check = repeat_check(self.repeated_ms) if self.settings.repeat_check else None
        if check is not None:
            self.emit(Event.REPEAT_CHECK, check)
        answers = None
        if self.reference is not None:
            answers = self.answers.result(
                seed=self.seed,
                num_not_compared=self.num_not_compared,
                framework_metrics=self.expected_score.metrics(),
                engine_metrics=self.compared_score.metrics(),
                num_scored=self.num_scored,
            )
            self.emit(Event.ANSWER_CHECK, answers)
        return Measured(tuple(windows), metrics), check, answers

    def _warm_up(self, batch: InferBatch) -> None:
        """Compute a batch, and the size of a pass's last one; then lay memory out for windows of the right length."""
        process, size = self.process, batch.num_items
        process.allocate_inputs(Slots(rows_of(batch.inputs), size, 1), (0, size), batch.inputs)
        rest = self.batches.num_items % size
        rows, first_s = process.warm_up([(0, size)])
        process.warm_up([(0, rest)] * bool(rest) + [(0, size)] * 2)
        calls_ms = tuple(process.warm_up([(0, size)])[1] * 1000 for _ in range(self.settings.warmup_batches))
        self.emit(Event.WARMUP, WarmUp(phase="inference", first_call_ms=first_s * 1000, calls_ms=calls_ms))
        process.allocate_outputs(rows, size)
        call_s = self.call_s = min(process.run([(0, size)]).took_s for _ in range(3))
        largest = max(sum(process.slots.item_bytes()), sum(process.answers.item_bytes()), 1) * size
        least_s = 0.5  # a window crosses to the engine's process once
        if process.concurrency > 1:
            # At its end some streams are idle while others finish theirs: 1 % of 50 calls of each, if the passes allow.
            least_s = max(2.0, min(50 * call_s, self.settings.inference_duration_s))
        # About how many calls a window should have, where memory allows it.
        wanted = max(self.settings.log_freq, math.ceil(least_s * process.concurrency / call_s))
        most = max(1, min(256 * 2**20 // largest, 10_000))
        num_batches, num_passes = -(-self.batches.num_items // size), self._num_passes(0)
        per_pass = _num_windows(num_batches, wanted, most)
        if per_pass == 1:
            num_windows = _num_windows(num_passes, wanted / num_batches, max(1, most // num_batches))
            self.window_passes = math.ceil(num_passes / num_windows)
        self.window_calls = math.ceil(num_batches * self.window_passes / per_pass)
        self.check_calls = min(self.window_calls, math.ceil(0.0005 / call_s))
        process.allocate_inputs(Slots(rows_of(batch.inputs), size, self.window_calls), (0, size), batch.inputs)
        num_items = size * self.window_calls
        process.allocate_outputs(rows, num_items)
        self.read = [torch.empty(num_items, *tensor.shape[1:], dtype=tensor.dtype) for tensor in batch.inputs]

    def _num_passes(self, made: int) -> int:
        """Return the number of further passes after ``made``; none where the engine has computed for long enough."""
        num_calls = -(-self.batches.num_items // self.settings.batch_size)
        pass_s = self.measured_s / made if made else num_calls * self.call_s / self.process.concurrency
        left_s = self.settings.inference_duration_s - self.measured_s
        if made and left_s <= 0.1 * self.settings.inference_duration_s:
            return 0
        return max(0 if made else self.settings.repeat, math.ceil(left_s / max(pass_s, 1e-9)))

    def _places(self, passes: Sequence[int]) -> list[int]:
        """Return how often a batch is computed again after each window; ``passes`` have windows of their own."""
        per_pass = -(-self.batches.num_items // self.settings.batch_size)
        totals = [per_pass * num_passes for num_passes in passes]
        calls = [min(self.window_calls, total - at) for total in totals for at in range(0, total, self.window_calls)]
        most = min(_CHECKS, sum(calls) // 10, int(_CHECKS_S / ((REPEAT_CALLS + 1) * self.check_calls * self.call_s)))
        number = max(_FEWEST_CHECKS, most) if self.settings.repeat_check else 0
        chosen = Counter(self.chance.choices(range(len(calls)), calls, k=number))
        return [chosen[window] for window in range(len(calls))]

    def _chunks(self, num_passes: int) -> Iterator[tuple[_Chunk, float]]:
        """Yield the items of each window of passes, and the seconds that reading them took."""
        iterator = chain.from_iterable(iter(self.batches) for _ in range(num_passes))
        while True:
            load_s, sizes, labels = 0.0, list[int](), list[Tensor]()
            while len(sizes) < self.window_calls:
                began = time.perf_counter()
                batch = next(iterator, None)
                load_s += time.perf_counter() - began
                if batch is None:
                    break
                rows = slice(sum(sizes), sum(sizes) + batch.num_items)
                for memory, tensor in zip_strict(self.read, batch.inputs):
                    memory[rows] = tensor
                sizes.append(batch.num_items)
                labels += [] if batch.labels is None else [batch.labels]
            if not sizes:
                return
            yield self._mixed(sizes, torch.cat(labels) if labels else None), load_s

    def _mixed(self, sizes: list[int], labels: Tensor | None) -> _Chunk:
        """Stage the items read, perturbed and in random order; the place of a smaller batch is random, too."""
        order = torch.randperm(sum(sizes), generator=self.generator)
        self.chance.shuffle(sizes)
        chunk = _Chunk(order, None if labels is None else labels[order], sizes)
        # About 1 MiB is perturbed together, which stays in the processor's caches.
        most = max(1, 2**20 // (sum(self.process.slots.item_bytes()) * max(sizes)))
        calls = list(chunk.calls())
        for _, slots in groupby(range(len(sizes)), sizes.__getitem__):  # calls of equal size that follow each other
            while block := list(islice(slots, most)):
                rows = slice(calls[block[0]].start, calls[block[-1]].stop)
                self.process.stage(block[0], self._perturbed(order[rows]), len(block))
        return chunk

    def _perturbed(self, places: Tensor) -> tuple[Tensor, ...]:
        chosen = tuple(tensor.index_select(0, places) for tensor in self.read)
        return self.case.perturbed(InferBatch(chosen, None), self.generator)

    def _window(self, chunk: _Chunk, pass_number: int, load_s: float) -> ForwardWindow:
        timed = self._timed(chunk.sizes)
        self.measured_s += timed.took_s - sum(timed.excluded_s)
        began = time.perf_counter()
        self.score.add(timed.outputs, chunk.labels)
        nonfinite = 0
        if not is_finite(timed.outputs):
            nonfinite = sum(not is_finite([output[rows] for output in timed.outputs]) for rows in chunk.calls())
        scored_s = time.perf_counter() - began
        # The clock of the engine's process counts only as far as its calls fill the window by this clock.
        scale = timed.took_s * 1000 / max(timed.computed_s, 1e-9)
        window = ForwardWindow(
            phase="inference",
            pass_number=pass_number,
            items=tuple(chunk.sizes),
            latency_ms=tuple((call - other) * scale for call, other in zip_strict(timed.calls_s, timed.excluded_s)),
            not_inference_ms=tuple(other * scale for other in timed.excluded_s),
            wall_ms=(load_s + timed.took_s + scored_s) * 1000,
            nonfinite_batches=nonfinite,
            crossing_ms=(timed.took_s - timed.computed_s) * 1000,
            computed_ms=timed.took_s * 1000 if self.process.concurrency > 1 else None,
            planned_items=self.planned_items,
        )
        self.emit(Event.FORWARD, window)
        self._compare(chunk, timed.outputs, whole=pass_number == 1)
        return window

    def _timed(self, sizes: Sequence[int]) -> TimedWindow:
        # In longer calls cold caches and waking threads do not show.
        timed = self.process.run(list(enumerate(sizes)), warm=self.call_s < 0.02)
        for other_s, took_s in zip_strict(timed.excluded_s, timed.calls_s):
            if not (math.isfinite(other_s) and 0 <= other_s <= took_s):
                raise InferenceError(
                    f"engine {self.process.engine}: reports {other_s!r} s of a call as not inference; it must return "
                    f"(outputs, seconds) with seconds from 0 to the duration of the call, {took_s:.6f} s"
                )
        return timed

    def _compare(self, chunk: _Chunk, outputs: Sequence[Tensor], *, whole: bool) -> None:
        """Compare the answers of ``whole`` windows, or one of each of a sample of their calls, with the framework's."""
        reference = self.reference
        if reference is None:
            return
        places, slices, size = torch.arange(sum(chunk.sizes)), list(chunk.calls()), self.settings.batch_size
        if not whole:  # a random item of each of a random sample of the calls: an engine gains by whole calls
            share = min(1.0, _SAMPLE * size, _MOST_SAMPLED * size / self.planned_items)
            chosen = self.chance.sample(slices, max(1, round(share * len(slices))))
            places = torch.tensor([self.chance.randrange(call.start, call.stop) for call in chosen])
        self.num_not_compared += sum(chunk.sizes) - len(places)
        calls = torch.arange(len(chunk.sizes)).repeat_interleave(torch.tensor(chunk.sizes))
        begins = torch.tensor([call.start for call in slices])
        slots = self.process.slots
        staged = slots.blocks(self.process.staged, 0, slots.num_slots, slots.slot_items)
        for rows in torch.split(places, size if self.iterative else max(size, 32)):
            inputs = [block[calls[rows], rows - begins[calls[rows]]] for block in staged]
            answers = [output[rows] for output in outputs]
            followed = answers if self.iterative else []
            expected = reference([*inputs, *followed])
            unchanged: list[Tensor] = []
            if self.answers.needs_unchanged:
                unchanged = reference([*(tensor.index_select(0, chunk.order[rows]) for tensor in self.read), *followed])
            self.answers.add(answers, expected, unchanged)
            if whole and chunk.labels is not None:
                self.expected_score.add(reference(inputs) if self.iterative else expected, chunk.labels[rows])
                self.compared_score.add(answers, chunk.labels[rows])
                self.num_scored += len(rows)

    def _compute_again(self, chunk: _Chunk) -> None:
        """Compute items that are new to the engine, and then the same items again, each time in a window of its own."""
        size, num_items = max(chunk.sizes), sum(chunk.sizes)
        number = min(self.check_calls, num_items // size)
        places = torch.randperm(num_items, generator=self.generator)[: number * size]
        # Left out: threads of an earlier computation, such as the framework's, may still spin.
        self.process.stage(0, self._perturbed(places), number)
        self._timed([size] * number)
        inputs = self._perturbed(places)
        taken: list[list[float]] = []
        compared: list[list[Tensor]] = []
        for repetition in range(REPEAT_CALLS):
            self.process.stage(0, inputs, number)
            timed = self._timed([size] * number)
            taken.append([timed.took_s, sum(timed.excluded_s)])
            if repetition in (0, REPEAT_CALLS - 1):
                compared.append(timed.outputs)
        if self.reference is not None:
            expected = [] if self.iterative else self.reference([*inputs])
            for outputs in compared:
                self.answers.add(outputs, expected or self.reference([*inputs, *outputs]))
        # Time that the engine excludes from the first call only may be work that a cache saves later.
        least_s = min(other_s for _, other_s in taken)
        self.repeated_ms.append([(took_s - least_s) * 1000 for took_s, _ in taken])


def _num_windows(total: int, preferred: float, most: int) -> int:
    """Return the number of windows of equal length, since the end of a short last one would weigh more."""
    return max(1, round(total / preferred), math.ceil(total / most))


REPEAT_LIMIT: Final = 1.1
"""Ratio of first to repeated calls above which outputs seem to be cached."""
REPEAT_CALLS: Final = 5
_RESOLUTION_MS: Final = 0.05
"""Time of a call that repetition may save without a cache of outputs: an honest model of 0.04 ms a call was reported to
repeat 1.9 times as fast, by the processor's own caches. Not measured on further models."""
_MIN_BATCHES: Final = 4
_FALSE_ALARMS: Final = Fraction(2, 1000)
"""Maximum probability of a false alarm, independent of other load."""
_LEVELS: Final = {1: Fraction(16, 10000), 2: Fraction(4, 10000)}
"""Significance level of each test: the first call against the others, the first two against the others."""


class Answers:
    """The comparison of all answers so far.

    ``iterative``: integers are the choices of an answer's steps, which count as ranked values; the answers of the
    framework follow from the choices before each step (``IterativeModel``).
    """

    def __init__(self, *, iterative: bool = False) -> None:
        self.iterative = iterative
        self.errors: list[Tensor] = []
        self.agreeing = 0
        self.ranked = 0
        self.followed = 0
        self._moves: list[Tensor] = []
        """Rows of two numbers: how far answers moved with their inputs, and how far the framework's did."""

    @property
    def needs_unchanged(self) -> bool:
        """Whether more answers for unchanged inputs are needed: of 1,024 items, fewer where the error is small."""
        return self.followed < 128 or (self.followed < 1024 and not self._sensitivity()[1] <= 0.05)

    def add(self, outputs: Sequence[Tensor], expected: Sequence[Tensor], unchanged: Sequence[Tensor] = ()) -> None:
        """Compare the outputs of some items; ``unchanged`` are the framework's for inputs before their perturbation."""
        items = expected[0].shape[0]
        worst = torch.zeros(items)
        for index, (actual, reference) in enumerate(zip_strict(outputs, expected)):
            if self.iterative and not reference.is_floating_point():
                counted = reference != IGNORED
                self.agreeing += int((counted & (actual == reference)).sum())
                self.ranked += int(counted.sum())
                continue
            if not reference.is_floating_point():
                worst = worst.maximum((actual != reference).reshape(items, -1).any(1).float())
                continue
            one, two = actual.float().reshape(items, -1), reference.float().reshape(items, -1)
            worst = worst.maximum((one - two).norm(dim=1) / two.norm(dim=1).clamp_min(1e-12))
            if index == 0 and reference.ndim > 1 and reference.shape[-1] > 1:
                self.agreeing += int((actual.argmax(-1) == reference.argmax(-1)).sum())
                self.ranked += reference[..., 0].numel()
            if unchanged:
                before = unchanged[index].float().reshape(items, -1)
                moved, expected_move = (one - before) * (two - before), (two - before).square()
                self._moves.append(torch.stack([moved.sum(1), expected_move.sum(1)], 1).double())
        self.followed += items if unchanged else 0
        self.errors.append(worst.nan_to_num(math.inf, math.inf))

    def _sensitivity(self) -> tuple[float, float]:
        """Return the ratio of the sums of both columns of moves, and its standard error; NaN where nothing moved."""
        moved, expected = torch.cat(self._moves).unbind(1) if self._moves else (torch.zeros(1), torch.zeros(1))
        total = float(expected.sum())
        if not total > 0:
            return math.nan, math.nan
        ratio = float(moved.sum()) / total
        return ratio, float((moved - ratio * expected).norm()) / total

    def result(self, **others: Any) -> AnswerCheck:
        """Return the comparison as an event."""
        errors = torch.cat(self.errors) if self.errors else torch.zeros(0)
        return AnswerCheck(
            num_items=len(errors),
            median_error=_finite(errors.median().item()) if len(errors) else None,
            worst_error=_finite(errors.max().item()) if len(errors) else None,
            top1_agreement=self.agreeing / self.ranked if self.ranked else None,
            sensitivity=_finite(self._sensitivity()[0]),
            **others,
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def repeat_check(calls_ms: Sequence[Sequence[float]]) -> RepeatCheck:
    """Compare the time of each batch's first computation with its repetitions, to detect a cache.

    Modelled on MLPerf's compliance test TEST04, including its limit of 10 %. ``calls_ms`` has ``REPEAT_CALLS``
    durations of each batch, in their order and by the rank's clock.

    In each batch every early call is compared with every later one and counts as slower when it took over
    ``REPEAT_LIMIT`` times as long; the counts are added over all batches. Without a cache each order of a batch's calls
    is equally likely, which gives the exact distribution of the sum (a one-sided Mann-Whitney test, stratified by
    batch). Two tests are made:

    * the first call against the other four, at 0.0016: detects a cache that answers from the second call on;
    * the first two calls against the other three, at 0.0004: detects a cache that stores items at their second call.

    An engine is suspicious when one of them is significant and the median over batches of the first call over the
    median of the last three is above ``REPEAT_LIMIT``, and that saves more than the processor's own caches do: a false
    alarm in at most 2 of 1,000 runs.
    """
    number = len(calls_ms)
    if number < _MIN_BATCHES:
        return RepeatCheck(
            fresh_ms=None, same_ms=None, speedup=None, limit=REPEAT_LIMIT, suspicious=False, num_batches=number,
            reason=f"needs at least {_MIN_BATCHES} batches, {number} were computed again",
        )  # fmt: skip
    late_ms = [statistics.median(calls[2:]) for calls in calls_ms]
    speedup = statistics.median(calls[0] / late for calls, late in zip_strict(calls_ms, late_ms))
    # An upper bound of the probability that either test is as extreme as this without a cache.
    chance = Fraction(1)
    for early, level in _LEVELS.items():
        slower = sum(_count_slower(calls, early, REPEAT_LIMIT) for calls in calls_ms)
        orders = _orders_by_sum(early, number)
        chance = min(chance, Fraction(orders[slower:].sum(), orders.sum()) * _FALSE_ALARMS / level)
    fresh_ms, same_ms = statistics.median(calls[0] for calls in calls_ms), statistics.median(late_ms)
    return RepeatCheck(
        fresh_ms=fresh_ms,
        same_ms=same_ms,
        speedup=speedup,
        chance=float(chance),
        limit=REPEAT_LIMIT,
        suspicious=speedup > REPEAT_LIMIT and chance <= _FALSE_ALARMS and fresh_ms - same_ms > _RESOLUTION_MS,
        reason=f"a call takes {fresh_ms:.3f} ms, which is too short" if fresh_ms <= _RESOLUTION_MS else None,
        num_batches=number,
    )


def _count_slower(calls: Sequence[float], early: int, limit: float) -> int:
    """Count the pairs of an early and a later call in which the early one took over ``limit`` times as long."""
    return sum(one > limit * other for one in calls[:early] for other in calls[early:])


@cache
def _orders_by_sum(early: int, number: int) -> npt.NDArray[np.object_]:
    """Return the number of orders of the calls of ``number`` batches for each sum of slower pairs, from 0 on."""
    sums = [_count_slower(order, early, 1.0) for order in permutations(range(REPEAT_CALLS))]
    ways: npt.NDArray[np.object_] = np.bincount(sums).astype(object)  # Python's integers, which are exact
    return reduce(np.convolve, [ways] * number)
