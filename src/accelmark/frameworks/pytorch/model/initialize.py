"""Random initial weights of large models."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from accelmark.frameworks.pytorch.batches import generator_for


def materialize(model: nn.Module, device: torch.device) -> None:
    """Move a model of the meta device to ``device`` without values; parameters that layers share stay shared."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            shared[name] = first[id(parameter)]
    model.to_empty(device=device)
    for name, source in shared.items():
        layer, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(layer), attribute, model.get_parameter(source))


def initialize_normal(model: nn.Module, std: float, seed: int) -> None:
    """Materialize a model of the meta device on the CPU: matrices normal with mean 0, biases zero, other vectors one.

    Every parameter has its own random generator, so that threads draw them in parallel and the values do not depend
    on the number of threads. Scores of attention sinks are drawn as matrices are. Buffers are materialized without
    values.
    """
    materialize(model, torch.device("cpu"))

    def fill(item: tuple[int, tuple[str, Tensor]]) -> None:
        number, (name, parameter) = item
        with torch.no_grad():  # a setting of each thread
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim > 1 or name.endswith("sinks"):
                parameter.normal_(0.0, std, generator=generator_for(seed, number))
            else:
                parameter.fill_(1.0)

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        list(pool.map(fill, enumerate(model.named_parameters())))


def compute_buffers(model: Any) -> None:
    """Give the buffers of a model of transformers their initial values, by building each layer that has some again."""
    for module in model.modules():
        if dict(module.named_buffers(recurse=False)):
            fresh = type(module)(model.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                setattr(module, name, buffer)
