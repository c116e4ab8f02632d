"""Train a case at its reduced size step by step, and name the first gradient that is not finite.

Prints one line of JSON: the losses, the gradient norms by parameter of each step, and ``first_nonfinite``: the step and
the parameter, or null.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from accelmark.spec.layers import flatten
from accelmark.spec.plugins.catalog import load_case
from benchmarks.gpu.bare import attention, build
from benchmarks.gpu.decode import device_here


def measure(name: str, kernel: str, num_steps: int) -> dict[str, Any]:
    """Return what the docstring of this module says, for ``num_steps`` steps in bf16."""
    train = load_case(name).train
    assert train is not None
    device = device_here()
    torch.manual_seed(1)
    case = build(name, {**flatten(train.reduced), "precision": "bf16", "batch_size": 4}, device)
    model = case.build_model().to(device)
    batch = {key: tensor.to(device) for key, tensor in case.synthetic_batch(4).items()}
    optimizer = case.build_optimizer(model)
    losses: list[float] = []
    norms: list[dict[str, float]] = []
    first: dict[str, Any] | None = None
    for step in range(1, num_steps + 1):
        with attention(kernel), torch.autocast(device.type, torch.bfloat16):
            loss = case.loss(model, batch)
        with attention(kernel):
            torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        grads = {key: each.grad for key, each in model.named_parameters() if each.grad is not None}
        norms.append({key: float(grad.norm()) for key, grad in grads.items()})
        bad = [key for key, grad in grads.items() if not bool(grad.isfinite().all())]
        if bad and first is None:
            first = {"step": step, "parameter": bad[-1], "all": bad}  # backward goes from the last layer to the first
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"attention": kernel, "losses": losses, "first_nonfinite": first, "gradient_norms": norms}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    kernel = "math" if options.tiny and options.attention != "auto" else options.attention
    print(json.dumps(measure(options.case, kernel, 2 if options.tiny else 6)))
