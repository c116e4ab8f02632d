"""Run the data through the framework batch by batch; time it, and score it as engines are scored."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from accelmark.infer.case import InferBatch, InferBatches, InferCase
from accelmark.infer.failures import InferenceError
from accelmark.spec.log.events import Event
from accelmark.spec.log.inference import ForwardWindow, InferEvaluation, Phase, WarmUp
from accelmark.spec.model import Spec

Forward = Callable[[list[Tensor]], list[Tensor]]
"""Inputs to outputs; tensors are on the CPU."""
Emit = Callable[[Event, Spec], None]
_MAX_HELD_BYTES: Final = 32 * 2**20
"""Maximum size of outputs that are kept to be evaluated together."""


@final
@dataclass(frozen=True)
class Measured:
    """The measurements of one phase."""

    windows: tuple[ForwardWindow, ...]
    metrics: Mapping[str, float | None]

    @property
    def nonfinite_batches(self) -> int:
        """Batches whose outputs contain NaN or infinity."""
        return sum(window.nonfinite_batches for window in self.windows)


@final
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
    _warm_up(forward, next(iter(batches)), settings.warmup_batches, emit)
    score = Score(case)
    planned_items = settings.repeat * batches.num_items
    windows: list[ForwardWindow] = []
    for pass_number in range(1, settings.repeat + 1):
        window = _Window(pass_number, planned_items, score)
        for batch in batches:
            window.compute(forward, batch)
            if len(window.items) + len(window.held) == settings.log_freq:
                windows.append(window.closed(emit))
                window = _Window(pass_number, planned_items, score)
        if window.items or window.held:
            windows.append(window.closed(emit))
    num_items = sum(sum(window.items) for window in windows)
    metrics = score.metrics()
    emit(Event.EVALUATE, InferEvaluation(phase="validation", num_items=num_items, metrics=metrics))
    return Measured(tuple(windows), metrics)


def _warm_up(forward: Forward, batch: InferBatch, num_calls: int, emit: Emit) -> None:
    def call_ms() -> float:
        began = time.perf_counter()
        forward(list(batch.inputs))
        return (time.perf_counter() - began) * 1000

    first_ms = call_ms()
    calls_ms = tuple(call_ms() for _ in range(num_calls))
    emit(Event.WARMUP, WarmUp(phase="validation", first_call_ms=first_ms, calls_ms=calls_ms))


@final
class _Window:
    """Up to ``log_freq`` batches of the framework, whose outputs are evaluated together."""

    phase: Phase = "validation"

    def __init__(self, pass_number: int, planned_items: int, score: Score) -> None:
        self.pass_number = pass_number
        self.planned_items = planned_items
        self.score = score
        self.held: list[tuple[InferBatch, list[Tensor]]] = []
        self.held_bytes = 0
        self.items: list[int] = []
        self.latency_ms: list[float] = []
        self.nonfinite = 0
        self.opened = time.perf_counter()

    def compute(self, forward: Forward, batch: InferBatch) -> None:
        """Compute one batch, and keep its outputs."""
        inputs = list(batch.inputs)
        began = time.perf_counter()
        outputs = forward(inputs)
        self.latency_ms.append((time.perf_counter() - began) * 1000)
        self.held.append((batch, outputs))
        self.held_bytes += sum(output.nbytes for output in outputs)
        if self.held_bytes > _MAX_HELD_BYTES:
            self._settle()

    def _settle(self) -> None:
        for batch, outputs in self.held:
            _check_rows(outputs, batch.num_items)
            self.items.append(batch.num_items)
            self.nonfinite += not is_finite(outputs)
            self.score.add(outputs, batch.labels)
        self.held.clear()
        self.held_bytes = 0

    def closed(self, emit: Emit) -> ForwardWindow:
        """Evaluate the kept outputs, and write the window as an event."""
        self._settle()
        window = ForwardWindow(
            phase=self.phase,
            pass_number=self.pass_number,
            items=tuple(self.items),
            latency_ms=tuple(self.latency_ms),
            not_inference_ms=(0.0,) * len(self.items),
            wall_ms=(time.perf_counter() - self.opened) * 1000,
            nonfinite_batches=self.nonfinite,
            planned_items=self.planned_items,
        )
        emit(Event.FORWARD, window)
        return window


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
