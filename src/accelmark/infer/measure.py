"""Running the data through a forward, batch by batch, and timing it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, final

import torch
from torch import Tensor

from accelmark.infer.answers import check_apart, check_declared, check_outputs
from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.failures import Situation, WrongShapeError, explained
from accelmark.spec.events import Event
from accelmark.spec.inference.events import ForwardWindow, InferEvaluation, Phase, WarmUp
from accelmark.spec.model import Spec

Forward = Callable[[list[Tensor]], tuple[list[Tensor], float]]
"""CPU tensors in; CPU tensors and the seconds that are not inference out."""
Emit = Callable[[Event, Spec], None]
_Call = tuple[InferBatch, list[Tensor], float, float]
"""A batch that has gone through, its outputs, the seconds it took and those of them that were not inference."""
_MOST_HELD: Final = 32 * 2**20
"""Bytes of outputs that wait for their evaluation."""


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """One phase: what went through, how fast, how well."""

    phase: Phase
    warm_up: WarmUp
    windows: tuple[ForwardWindow, ...]
    metrics: Mapping[str, float | None]
    nonfinite_batches: int


def warm_up(
    forward: Forward,
    batch: InferBatch,
    num_calls: int,
    phase: Phase,
    situation: Situation,
    emit: Emit,
    *,
    last_items: int = 0,
) -> WarmUp:
    """Call ``forward`` once and then ``num_calls`` times on one batch; nothing of it counts but the first call's time.

    Args:
        forward: the framework's or the engine's.
        batch: a full batch.
        num_calls: calls after the first.
        phase: whose warm-up it is.
        situation: for the message of a failure.
        emit: takes the warm-up.
        last_items: items of the last batch of a pass where it is smaller, else 0; one call more prepares the engine for
            that many, which no time is told of.

    Raises:
        AccelmarkError: the forward fails, as one of the ends in :mod:`accelmark.infer.failures`.
    """

    def call_s(inputs: list[Tensor]) -> float:
        began = time.perf_counter()
        try:
            outputs, other_s = forward(inputs)
        except Exception as error:  # noqa: BLE001 - told as one of the ends that a person can act on
            _end(error, situation)
        took_s = time.perf_counter() - began
        check_outputs(outputs, situation.engine)
        check_declared(other_s, took_s, situation.engine)
        return took_s

    first_call_ms = call_s(list(batch.inputs)) * 1000
    if last_items:
        call_s([each[:last_items] for each in batch.inputs])
    calls_ms = tuple(call_s(list(batch.inputs)) * 1000 for _ in range(num_calls))
    warmed = WarmUp(phase=phase, first_call_ms=first_call_ms, calls_ms=calls_ms)
    emit(Event.WARMUP, warmed)
    return warmed


def measure(
    forward: Forward,
    batches: InferBatches,
    case: InferCase,
    *,
    warmed: WarmUp,
    situation: Situation,
    evaluated: bool,
    emit: Emit,
) -> Measured:
    """Run ``settings.repeat`` passes over ``batches``.

    Args:
        forward: the framework's or the engine's.
        batches: the data.
        case: evaluates the outputs, on the CPU.
        warmed: the warm-up that went before.
        situation: for the message of a failure.
        evaluated: whether outputs are compared with labels; False for made-up data and untrained weights.
        emit: takes each window as it closes, and the evaluation.

    Raises:
        AccelmarkError: the forward fails, as one of the ends in :mod:`accelmark.infer.failures`.
    """
    settings = case.settings
    windows: list[ForwardWindow] = []
    sums: Counter[str] = Counter()

    def judge(outputs: list[Tensor], labels: Tensor | None) -> None:
        if evaluated and labels is not None:
            for name, value in _evaluate(case, outputs, labels).items():
                sums[name] += value  # type: ignore[assignment] # Counter adds floats as well

    clock = time.perf_counter
    most = 1
    for pass_number in range(1, settings.repeat + 1):
        window = _Window(warmed.phase, pass_number, settings.log_freq, most, situation)
        for batch in batches:
            inputs = list(batch.inputs)
            try:
                began = clock()
                outputs, other_s = forward(inputs)
                took_s = clock() - began
            except Exception as error:  # noqa: BLE001 - told as one of the ends that a person can act on
                _end(error, situation)
            # Between two calls no more than this: what else there is to do waits for the window's closing.
            window.held.append((batch, outputs, took_s, other_s))
            if len(window.held) == window.room:
                window.settle(judge)
                if len(window.items) == settings.log_freq:
                    windows.append(window.closed(emit))
                    window = _Window(warmed.phase, pass_number, settings.log_freq, window.most, situation)
        window.settle(judge)
        most = window.most
        if window.items:
            windows.append(window.closed(emit))
    num_items = sum(sum(window.items) for window in windows)
    metrics = _finite(case.metrics(dict(sums))) if sums else {}
    emit(Event.EVALUATE, InferEvaluation(phase=warmed.phase, num_items=num_items, metrics=metrics))
    nonfinite = sum(window.nonfinite_batches for window in windows)
    return Measured(warmed.phase, warmed, tuple(windows), metrics, nonfinite)


@final
class _Window:
    """Up to ``log_freq`` batches that have not been written yet.

    Outputs are held and looked at together, so that a call finds the caches, and a runtime its threads, as the call
    before left them.
    """

    def __init__(self, phase: Phase, pass_number: int, log_freq: int, most: int, situation: Situation) -> None:
        self.phase: Phase = phase
        self.pass_number = pass_number
        self.log_freq = log_freq
        self.situation = situation
        self.most = most
        """Calls that there is memory to hold, as the last outputs tell."""
        self.room = min(most, log_freq)
        """Calls to hold before they are looked at."""
        self.held: list[_Call] = []
        self.items: list[int] = []
        self.latency_ms: list[float] = []
        self.not_inference_ms: list[float] = []
        self.nonfinite = 0
        self.opened = time.perf_counter()

    def settle(self, judge: Callable[[list[Tensor], Tensor | None], None]) -> None:
        """Look at the outputs that are held, and let them go.

        Raises:
            InferenceError: they are not what an engine has to return.
        """
        engine = self.situation.engine
        for _, outputs, took_s, other_s in self.held:
            check_outputs(outputs, engine)
            check_declared(other_s, took_s, engine)
        check_apart([outputs for _, outputs, _, _ in self.held], engine)
        size = 0
        for batch, outputs, took_s, other_s in self.held:
            self.items.append(batch.num_items)
            self.latency_ms.append((took_s - other_s) * 1000)
            self.not_inference_ms.append(other_s * 1000)
            self.nonfinite += not all(_is_finite(output) for output in outputs if output.is_floating_point())
            judge(outputs, batch.labels)
            size = sum(output.nbytes for output in outputs)
        self.held.clear()
        if size:
            self.most = max(1, _MOST_HELD // size)
        self.room = min(self.most, self.log_freq - len(self.items))

    def closed(self, emit: Emit) -> ForwardWindow:
        """Write the window."""
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
    """Tell whether all values are finite; the sum alone tells it, unless that overflows."""
    return math.isfinite(output.sum(dtype=torch.float32).item()) or bool(torch.isfinite(output).all())


def _end(error: Exception, situation: Situation) -> NoReturn:
    typed = explained(error, situation)
    if typed is error:
        raise error
    raise typed from error


def _evaluate(case: InferCase, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
    plain = [output.float() if output.is_floating_point() else output for output in outputs]
    if plain[0].shape[0] != labels.shape[0]:
        raise WrongShapeError(
            f"the model returned {plain[0].shape[0]} rows for {labels.shape[0]} items; is its batch fixed?"
        )
    return case.evaluator(plain, labels)


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
