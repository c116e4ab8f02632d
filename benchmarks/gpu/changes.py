"""Changes that no setting takes back, each measured with and without: loss in chunks, LAMB, copies on a stream.

Prints one line of JSON: for each change the mean time with and without it, and the peak of device memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from accelmark.frameworks.pytorch.batches import CopyStream, fetched_ahead, mover, pinned
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.linear import chunked_cross_entropy
from accelmark.frameworks.pytorch.optimizers import Lamb
from accelmark.frameworks.pytorch.training.platform import forget_peak_memory, peak_memory_mib
from benchmarks.gpu.decode import device_here, seconds

_BERT_LARGE: Final = 24
"""Layers; their parameters are the larger part of BERT-large's."""


def compared(with_it: Callable[[], object], without: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return times in ms, peaks in MiB (null on a CPU), and the share of time that the change saves."""
    found: dict[str, Any] = {}
    for name, operation in (("with", with_it), ("without", without)):
        forget_peak_memory(device)
        found[f"{name}_ms"] = 1000 * seconds(operation, device, 10)
        found[f"{name}_peak_mib"] = peak_memory_mib(device)
    return {**found, "saved": 1 - found["with_ms"] / found["without_ms"]}


def chunked_loss(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Compare the cross entropy of Llama 3's vocabulary in chunks with that of all logits at once."""
    tokens, width, vocabulary = (64, 32, 1000) if tiny else (8192, 4096, 128256)
    hidden = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,), device=device)

    def step(loss: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None
        torch.autograd.backward(loss())

    return compared(
        lambda: step(lambda: chunked_cross_entropy(hidden, weight, labels)),
        lambda: step(lambda: F.cross_entropy((hidden @ weight.t()).float(), labels)),
        device,
    )


def lamb(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Compare a step of LAMB over all parameters of BERT-large's layers with one over each parameter by itself."""
    width, layers = (16, 2) if tiny else (1024, _BERT_LARGE)
    of_a_layer = [*[(width, width)] * 4, (4 * width, width), (width, 4 * width), *[(width,)] * 9, (4 * width,)]
    parameters = [torch.randn(shape, device=device).requires_grad_() for shape in of_a_layer * layers]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    together, apart = Lamb(parameters, lr=1e-4), [Lamb([each], lr=1e-4) for each in parameters]
    return compared(together.step, lambda: [each.step() for each in apart], device)


def copies(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Compare copies of image batches on a stream of their own with copies between the computations."""
    if device.type == "cpu":
        return {"reason": "a CPU copies nothing"}
    images, size, num_batches = (4, 512, 4) if tiny else (256, 8192, 20)
    batch: Batch = {"image": torch.randint(0, 256, (images, 3, 224, 224), dtype=torch.uint8)}
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    move = mover(device, channels_last=False)

    def batches() -> Iterator[Batch]:
        return map(pinned, itertools.repeat(batch, num_batches))

    def compute(moved: Iterator[Batch]) -> None:
        for one in moved:
            torch.mm(matrix, matrix)
            one["image"].float().mean()

    def ahead() -> None:
        stream = CopyStream(device)
        feed = fetched_ahead(stream.send(batches(), move), 2)
        compute(stream.receive(feed))
        feed.close()

    return compared(ahead, lambda: compute(map(move, batches())), device)


def measure(*, tiny: bool) -> dict[str, Any]:
    """Return the comparison of each change."""
    device = device_here()
    return {each.__name__: each(device, tiny=tiny) for each in (chunked_loss, lamb, copies)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    print(json.dumps(measure(tiny=parser.parse_args().tiny)))
