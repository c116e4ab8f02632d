"""Losses of a device, read without waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from accelmark.train.loop.contract import StepClock


@final
class DeviceLosses:
    """Losses of a device, copied together into pinned memory, without waiting, when the window closes.

    ``overwritten``: each step writes its loss to the memory of the one before, as CUDA graphs do where the compiled
    model returns the loss; it is then copied on the device in its own step.
    """

    def __init__(self, clock: StepClock, *, pinned: bool = True, overwritten: bool = False) -> None:
        self._clock = clock
        self._pinned = pinned
        self._overwritten = overwritten

    def keep(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which is copied to the host later."""
        return loss.clone() if self._overwritten else loss

    def fetch(self, kept: list[Any]) -> Callable[[], list[float]]:
        """Start one asynchronous copy of all losses."""
        stacked = torch.stack([loss.float().reshape(()) for loss in kept])
        host = torch.empty(len(kept), dtype=torch.float32, pin_memory=self._pinned)
        host.copy_(stacked, non_blocking=True)
        copied = self._clock.mark()

        def read() -> list[float]:
            copied.synchronize()
            self._clock.release([copied])
            return [float(value) for value in host.tolist()]

        return read
