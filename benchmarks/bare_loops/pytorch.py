"""A minimal loop in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelmark.frameworks.pytorch.backend import PyTorchBackend


def bare_loop(backend: PyTorchBackend, batches: Iterator[Any]) -> None:
    """Train without log, clock and hooks."""
    case, training = backend._case, backend._training
    model, optimizer, schedule = training.model, training.optimizer, training.schedule
    clip = case.settings.gradient_clip_norm
    autocast = case.settings.precision in ("bf16", "fp16")
    for batch in batches:
        if autocast:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = case.loss(model, batch)
        else:
            loss = case.loss(model, batch)
        torch.autograd.backward(loss)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
