"""Run the data through a forward function batch by batch, time it, and check its outputs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.failures import InferenceError
from accelmark.spec.events import Event, ForwardWindow, InferEvaluation, Phase, WarmUp
from accelmark.spec.model import Spec

Forward = Callable[[list[Tensor]], tuple[list[Tensor], float]]
"""(inputs) -> (outputs, seconds that are not inference); tensors are on the CPU."""
Emit = Callable[[Event, Spec], None]
_Call = tuple[InferBatch, list[Tensor], float, float]
"""(batch, outputs, duration of the call in s, part of it in s that was not inference)."""
_MAX_HELD_BYTES: Final = 32 * 2**20
"""Maximum size of outputs that are kept to be evaluated together."""


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one phase."""

    windows: tuple[ForwardWindow, ...]
    metrics: Mapping[str, float | None]

    @property
    def nonfinite_batches(self) -> int:
        """Batches whose outputs contain NaN or infinity."""
        return sum(window.nonfinite_batches for window in self.windows)


def warm_up(
    forward: Forward, batch: InferBatch, num_calls: int, phase: Phase, engine: str, emit: Emit, *, last_items: int = 0
) -> None:
    """Call ``forward`` once and then ``num_calls`` times on one batch; only the first call is timed.

    ``last_items`` is the size of a pass's last batch if that is smaller than ``batch``, else 0; an additional call
    prepares the engine for it.

    Raises:
        InferenceError: the engine violates its contract.
    """

    def call_ms(inputs: list[Tensor]) -> float:
        began = time.perf_counter()
        outputs, other_s = forward(inputs)
        took_s = time.perf_counter() - began
        check_outputs(outputs, engine)
        check_excluded_time(other_s, took_s, engine)
        return took_s * 1000

    first_call_ms = call_ms(list(batch.inputs))
    if last_items:
        call_ms([each[:last_items] for each in batch.inputs])
    calls_ms = tuple(call_ms(list(batch.inputs)) for _ in range(num_calls))
    emit(Event.WARMUP, WarmUp(phase=phase, first_call_ms=first_call_ms, calls_ms=calls_ms))


def measure(
    forward: Forward, batches: InferBatches, case: InferCase, *, phase: Phase, engine: str, evaluated: bool, emit: Emit
) -> Measured:
    """Run ``settings.repeat`` passes over ``batches``; emit each window when it is complete, and the evaluation.

    Outputs are compared with labels if ``evaluated``, which is false for synthetic data and untrained weights.

    Raises:
        InferenceError: the engine violates its contract.
    """
    settings = case.settings
    windows: list[ForwardWindow] = []
    sums: Counter[str] = Counter()

    def evaluate(outputs: list[Tensor], labels: Tensor | None) -> None:
        if evaluated and labels is not None:
            for name, value in _evaluate(case, outputs, labels).items():
                sums[name] += value  # type: ignore[assignment] # Counter adds floats as well

    clock = time.perf_counter
    max_held = 1
    for pass_number in range(1, settings.repeat + 1):
        window = _Window(phase, pass_number, settings.log_freq, max_held, engine)
        for batch in batches:
            inputs = list(batch.inputs)
            began = clock()
            outputs, other_s = forward(inputs)
            took_s = clock() - began
            # Nothing else happens between two calls: outputs are checked and evaluated in `settle`.
            window.held.append((batch, outputs, took_s, other_s))
            if len(window.held) == window.capacity:
                window.settle(evaluate)
                if len(window.items) == settings.log_freq:
                    windows.append(window.closed(emit))
                    window = _Window(phase, pass_number, settings.log_freq, window.max_held, engine)
        window.settle(evaluate)
        max_held = window.max_held
        if window.items:
            windows.append(window.closed(emit))
    num_items = sum(sum(window.items) for window in windows)
    found = case.metrics(dict(sums)) if sums else {}
    metrics = {name: value if math.isfinite(value) else None for name, value in found.items()}
    emit(Event.EVALUATE, InferEvaluation(phase=phase, num_items=num_items, metrics=metrics))
    return Measured(tuple(windows), metrics)


@final
class _Window:
    """Up to ``log_freq`` batches that are not yet written.

    Outputs are kept and evaluated together, so that evaluation does not disturb caches and threads between calls.
    """

    def __init__(self, phase: Phase, pass_number: int, log_freq: int, max_held: int, engine: str) -> None:
        self.phase: Phase = phase
        self.pass_number = pass_number
        self.log_freq = log_freq
        self.engine = engine
        self.max_held = max_held
        """Number of calls whose outputs can be kept, by the size of the last outputs."""
        self.capacity = min(max_held, log_freq)
        """Calls to keep before ``settle``."""
        self.held: list[_Call] = []
        self.items: list[int] = []
        self.latency_ms: list[float] = []
        self.not_inference_ms: list[float] = []
        self.nonfinite = 0
        self.opened = time.perf_counter()

    def settle(self, evaluate: Callable[[list[Tensor], Tensor | None], None]) -> None:
        """Check, evaluate and release the outputs that are kept.

        Raises:
            InferenceError: they violate the contract of an engine.
        """
        for _, outputs, took_s, other_s in self.held:
            check_outputs(outputs, self.engine)
            check_excluded_time(other_s, took_s, self.engine)
        check_separate_memory([outputs for _, outputs, _, _ in self.held], self.engine)
        size = 0
        for batch, outputs, took_s, other_s in self.held:
            self.items.append(batch.num_items)
            self.latency_ms.append((took_s - other_s) * 1000)
            self.not_inference_ms.append(other_s * 1000)
            self.nonfinite += not all(_is_finite(output) for output in outputs if output.is_floating_point())
            evaluate(outputs, batch.labels)
            size = sum(output.nbytes for output in outputs)
        self.held.clear()
        if size:
            self.max_held = max(1, _MAX_HELD_BYTES // size)
        self.capacity = min(self.max_held, self.log_freq - len(self.items))

    def closed(self, emit: Emit) -> ForwardWindow:
        """Write the window as an event."""
        window = ForwardWindow(
            phase=self.phase,
            pass_number=self.pass_number,
            items=tuple(self.items),
            latency_ms=tuple(self.latency_ms),
            not_inference_ms=tuple(self.not_inference_ms),
            wall_ms=(time.perf_counter() - self.opened) * 1000,
            nonfinite_batches=self.nonfinite,
        )
        emit(Event.FORWARD, window)
        return window


def _is_finite(output: Tensor) -> bool:
    """Return whether all values are finite; a finite sum suffices."""
    return math.isfinite(output.sum(dtype=torch.float32).item()) or bool(torch.isfinite(output).all())


def _evaluate(case: InferCase, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
    plain = [output.float() if output.is_floating_point() else output for output in outputs]
    if plain[0].shape[0] != labels.shape[0]:
        what = f"the model returned {plain[0].shape[0]} rows for {labels.shape[0]} items"
        raise InferenceError(f"{what}; export it with a dynamic batch", "wrong_shape")
    return case.evaluator(plain, labels)


def check_excluded_time(other_s: object, took_s: float, engine: str) -> None:
    """Check the seconds of a call of ``took_s`` that ``engine`` reports as not inference.

    Raises:
        InferenceError: the value is not a finite number from 0 to ``took_s``.
    """
    if not (isinstance(other_s, int | float) and math.isfinite(other_s) and 0 <= other_s <= took_s):
        raise InferenceError(
            f"engine {engine}: reports {other_s!r} s of a call as not inference; it has to return (outputs, seconds) "
            f"with seconds from 0 to the duration of the call, {took_s:.6f} s"
        )


def check_outputs(outputs: object, engine: str) -> None:
    """Check the outputs that an engine returns for a batch.

    Raises:
        InferenceError: they are not a list of one or more tensors on the CPU.
    """
    if isinstance(outputs, list | tuple) and outputs:
        wrong = [each for each in outputs if not (isinstance(each, Tensor) and each.device.type == "cpu")]
        if not wrong:
            return
        first = wrong[0]
        what = f"a tensor on {first.device}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        found = f"{what} among its outputs"
    else:
        found = "nothing" if outputs is None or isinstance(outputs, list | tuple) else f"a {type(outputs).__name__}"
    raise InferenceError(f"engine {engine}: returns {found}; it has to return a list of tensors on the CPU")


def check_separate_memory(calls: Sequence[Sequence[Tensor]], engine: str) -> None:
    """Check that the outputs of several calls, all still referenced, do not share memory.

    Raises:
        InferenceError: two calls share memory, so that the later one has overwritten the outputs of the earlier one.
    """
    spans = sorted(
        (output.data_ptr(), output.data_ptr() + output.nbytes, number)
        for number, outputs in enumerate(calls)
        for output in outputs
        if output.nbytes
    )
    reached, owner = 0, -1
    for begin, end, number in spans:
        if begin < reached and number != owner:
            raise InferenceError(
                f"engine {engine}: outputs of two calls share memory; outputs belong to the caller, "
                "so copy a buffer that the next call overwrites"
            )
        if end > reached:
            reached, owner = end, number
