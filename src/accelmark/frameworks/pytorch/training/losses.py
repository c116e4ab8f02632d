"""Losses of a device, read without waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from accelmark.train.loop.contract import StepClock


@final
class DeviceLosses:
    """Losses of a device, copied together into pinned memory, without waiting, when the window closes."""

    def __init__(self, clock: StepClock, *, pinned: bool = True) -> None:
        self._clock = clock
        self._pinned = pinned

    def keep(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the tensor, which is copied later."""
        return loss

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
