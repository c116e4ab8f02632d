"""What a few steps really do: how many samples go through the model, and in which type its matrix work is done.

Hooks stand on the model for those steps only; every other step costs nothing more. Which steps they are is drawn anew
in each process, so that a vendor's code cannot know them beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accelmark.frameworks.pytorch.case import Batch, TrainCase
from accelmark.frameworks.pytorch.identity import meta_copy
from accelmark.frameworks.pytorch.integrity.equivalence import tensors_in
from accelmark.frameworks.pytorch.synthetic import on_meta

_SIZES: Final = (2, 3)
_DECADES: Final = 6
_A_DECADE: Final = 2
_MATRIX_WORK: Final = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)


@final
class Passing:
    """Counts what comes through a model while it is in training and gradients are wanted."""

    def __init__(self, *, training: bool) -> None:
        self.num_samples = 0
        self.types: set[str] = set()
        self._training = training
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module, *, types: bool) -> None:
        """Put the hooks on ``model``."""
        self._handles = [model.register_forward_pre_hook(self._enter, with_kwargs=True)]
        if types:
            for module in model.modules():
                if isinstance(module, _MATRIX_WORK):
                    self._handles.append(module.register_forward_hook(self._leave))

    def leave(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, model: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._training or (model.training and torch.is_grad_enabled()):
            self.num_samples += max((len(tensor) for tensor in tensors_in((given, named)) if tensor.ndim), default=0)

    def _leave(self, module: nn.Module, _given: tuple[Any, ...], output: Any) -> None:
        if module.training and isinstance(output, Tensor):
            self.types.add(str(output.dtype).removeprefix("torch."))


def rows_per_sample(case: TrainCase, model: nn.Module) -> float | None:
    """Return how many rows the case sends through its model for a sample, by made-up batches of two sizes.

    They are counted on a copy without data, where nothing is computed, and on the model itself where that fails. None
    where their number does not follow that of the samples (another dimension leads), or nothing can be computed.
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
        passing = Passing(training=False)
        passing.watch(model, types=False)
        try:
            batch = case.synthetic_batch(size)
            case.loss(model, on_meta(batch) if empty else batch)
        finally:
            passing.leave()
        counts.append(passing.num_samples / size)
    model.train(was_training)
    return counts


@final
class Probes:
    """Looks at a few of a rank's steps."""

    def __init__(self, num_credited: int = 0, rows: float | None = None, reason: str | None = None) -> None:
        """``num_credited``: samples of a step of this rank; ``rows``: each one's in the model; ``reason``: why not."""
        self._num_credited = num_credited
        self._rows = rows
        self._reason = reason
        self._steps = frozenset() if reason is not None else _drawn()
        self._step = 0
        self._model: nn.Module | None = None
        self._passing: Passing | None = None
        self._probed: list[int] = []
        self._seen: list[float] = []
        self._types: set[str] = set()

    @classmethod
    def of(cls, case: TrainCase, model: nn.Module) -> Self:
        """Prepare to look at the steps of ``case``, by ``model`` as it built it."""
        settings = case.settings
        credited = settings.batch_size * settings.gradient_accumulation_steps
        if settings.compile != "off":
            return cls(credited, reason="the model is compiled, and a look inside would have it compiled anew")
        return cls(credited, rows_per_sample(case, model))

    def open(self, model: nn.Module) -> None:
        """Say which model is trained: the one inside all wrappers."""
        self._model = model

    def over(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """Pass an epoch's steps on, and look at those that were drawn."""
        return self._watched(steps) if self._steps else steps

    def _watched(self, steps: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        for batches in steps:
            self.close_step()
            self._step += 1
            if self._step in self._steps and self._model is not None:
                self._passing = Passing(training=True)
                self._passing.watch(self._model, types=True)
            yield batches

    def close_step(self) -> None:
        """Read what the step in hand has done, where it was looked at."""
        passing, self._passing = self._passing, None
        if passing is None:
            return
        passing.leave()
        self._probed.append(self._step)
        self._types |= passing.types
        if self._rows is not None:
            self._seen.append(passing.num_samples / self._rows)

    def told(self) -> Mapping[str, Any]:
        """Return the fields of :class:`~accelmark.spec.events.Inspected` that come from the steps."""
        self.close_step()
        samples, reason = self._samples()
        no_types = self._reason or "no layer of matrix work was passed in the steps that were looked at"
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
            return None, "the leading dimension of what the case gives its model is not that of the samples"
        if not self._seen:
            return None, "no step was looked at"
        fewest = min(self._seen)
        if fewest == 0 and self._seen[0] > 0:
            seen = [count for count in self._seen if count]
            if min(seen) >= self._num_credited:
                # A recorded graph that is played again passes no module.
                return None, "in some steps nothing passed the model, as when a recorded graph is played again"
            fewest = min(seen)
        return round(fewest), None


def _drawn() -> frozenset[int]:
    """Draw the steps: the first, and some of each decade after it."""
    chance = random.SystemRandom()
    decades = ((10**power + 1, 10 ** (power + 1)) for power in range(_DECADES))
    return frozenset([1, *(chance.randint(*decade) for decade in decades for _ in range(_A_DECADE))])
