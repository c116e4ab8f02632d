"""Probe a few steps: how many samples pass through the model, and in which types its matrix work is done.

The model has forward hooks during those steps only, so that other steps have no overhead. The steps are chosen at
random in each process, so that vendor code cannot predict them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accelmark.frameworks.pytorch.case import Batch, TrainCase
from accelmark.frameworks.pytorch.data.feed import on_meta
from accelmark.frameworks.pytorch.integrity.equivalence import tensors_in
from accelmark.frameworks.pytorch.model.fp8 import FP8, Fp8Linear
from accelmark.frameworks.pytorch.model.identity import meta_copy

_SIZES: Final = (2, 3)
_DECADES: Final = 6
_PER_DECADE: Final = 2
_MATRIX_WORK: Final = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)


@final
class ForwardCounter:
    """Counts samples and output types of a model while it trains."""

    def __init__(self, *, training: bool) -> None:
        self.num_samples = 0
        self.types: set[str] = set()
        self._training = training
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module, *, types: bool) -> None:
        """Add the hooks to ``model``."""
        self._handles = [model.register_forward_pre_hook(self._enter, with_kwargs=True)]
        if types:
            for module in model.modules():
                if isinstance(module, _MATRIX_WORK):
                    self._handles.append(module.register_forward_hook(self._leave))

    def leave(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._training or (model.training and torch.is_grad_enabled()):
            self.num_samples += max((len(tensor) for tensor in tensors_in((given, named)) if tensor.ndim), default=0)

    def _leave(self, module: nn.Module, _given: tuple[Any, ...], output: Any) -> None:
        if module.training and isinstance(output, Tensor):
            dtype = FP8 if isinstance(module, Fp8Linear) else output.dtype
            self.types.add(str(dtype).removeprefix("torch."))


def rows_per_sample(case: TrainCase, model: nn.Module) -> float | None:
    """Return how many rows the case passes to its model per sample, measured with synthetic batches of two sizes.

    They are counted on a copy without data, or on the model itself where that fails. None where the number of rows
    is not proportional to that of samples (another dimension leads), or nothing can be computed.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for empty in (True, False):
            try:
                first, second = _rows(case, meta_copy(model) if empty else model, empty=empty)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue
            return first if first and first == second else None
    return None


def _rows(case: TrainCase, model: nn.Module, *, empty: bool) -> list[float]:
    was_training, counts = model.training, []
    model.eval()
    for size in _SIZES:
        counter = ForwardCounter(training=False)
        counter.watch(model, types=False)
        try:
            batch = case.synthetic_batch(size)
            case.loss(model, on_meta(batch) if empty else batch)
        finally:
            counter.leave()
        counts.append(counter.num_samples / size)
    model.train(was_training)
    return counts


@final
class Probes:
    """Probes a few steps of a rank."""

    def __init__(self, num_credited: int = 0, rows: float | None = None, reason: str | None = None) -> None:
        """Set the samples of a step on this rank, and rows per sample or the ``reason`` why they are unknown."""
        self._num_credited = num_credited
        self._rows = rows
        self._reason = reason
        self._steps = frozenset() if reason is not None else _chosen_steps()
        self._step = 0
        self._model: nn.Module | None = None
        self._counter: ForwardCounter | None = None
        self._probed: list[int] = []
        self._counted: list[float] = []
        self._types: set[str] = set()

    @classmethod
    def of(cls, case: TrainCase, model: nn.Module) -> Self:
        """Prepare the probes of ``case``, with ``model`` as the case built it."""
        settings = case.settings
        credited = settings.batch_size * settings.gradient_accumulation_steps
        if settings.compile != "off":
            return cls(credited, reason="the model is compiled, and forward hooks would make it compile again")
        return cls(credited, rows_per_sample(case, model))

    def open(self, model: nn.Module) -> None:
        """Set the model that is trained, without its wrappers."""
        self._model = model

    def over(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield the steps of an epoch, and probe the chosen ones."""
        return self._watched(steps) if self._steps else steps

    def _watched(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        for batches in steps:
            self.close_step()
            self._step += 1
            if self._step in self._steps and self._model is not None:
                self._counter = ForwardCounter(training=True)
                self._counter.watch(self._model, types=True)
            yield batches

    def close_step(self) -> None:
        """Record the current step if it is probed."""
        counter, self._counter = self._counter, None
        if counter is None:
            return
        counter.leave()
        self._probed.append(self._step)
        self._types |= counter.types
        if self._rows is not None:
            self._counted.append(counter.num_samples / self._rows)

    def result(self) -> Mapping[str, Any]:
        """Return the fields of :class:`~accelmark.spec.events.Inspected` that come from the steps."""
        self.close_step()
        samples, reason = self._samples()
        no_types = self._reason or "no layer of matrix work ran in the probed steps"
        return {
            "probed_steps": tuple(self._probed),
            "samples_credited": self._num_credited,
            "samples_seen": samples,
            "samples_reason": reason,
            "compute_types": tuple(sorted(self._types)) or None,
            "compute_reason": None if self._types else no_types,
        }

    def _samples(self) -> tuple[int | None, str | None]:
        if self._reason is not None:
            return None, self._reason
        if self._rows is None:
            return None, "the leading dimension of the model's inputs is not the batch dimension"
        if not self._counted:
            return None, "no step was probed"
        fewest = min(self._counted)
        if fewest == 0 and self._counted[0] > 0:
            seen = [count for count in self._counted if count]
            if min(seen) >= self._num_credited:
                # A replayed CUDA graph calls no module.
                return None, "in some steps no forward pass was called, as in the replay of a recorded graph"
            fewest = min(seen)
        return round(fewest), None


def _chosen_steps() -> frozenset[int]:
    """Choose the steps: the first, and some of each decade after it."""
    chance = random.SystemRandom()
    decades = ((10**power + 1, 10 ** (power + 1)) for power in range(_DECADES))
    return frozenset([1, *(chance.randint(*decade) for decade in decades for _ in range(_PER_DECADE))])
