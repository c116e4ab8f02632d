"""Compare analytic operation counts with those of PyTorch's FLOP counter on twenty morphed networks.

    python -m benchmarks.automl_counting

Writes ``benchmarks/results/automl_counting.json`` and ``.md``. Takes seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelmark.automl.model.counting import count
from accelmark.automl.model.graph import Network
from accelmark.automl.model.morphs import MorphChoices
from accelmark.automl.model.seeds import resolve_network
from accelmark.automl.trial.training import GraphModule
from benchmarks.automl_figures import stamp, write_figures

BATCH = 2
PER_SEED = {"resnet50": 10, "small28": 5, "small32": 5}
STEPS = 4


def measured(network: Network) -> tuple[int, int]:
    """Return matrix operations per image, forward and backward, as PyTorch executes them."""
    with torch.device("meta"):
        module = GraphModule(network)
        images = torch.empty(BATCH, *network.input_shape)
    with FlopCounterMode(display=False) as forward:
        loss = module(images).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops() // BATCH, backward.get_total_flops() // BATCH


def row(seed: str, number: int) -> dict[str, Any]:
    """Apply random morphs to a seed network, and count the result by every method."""
    generator = np.random.default_rng([number, len(seed)])
    network, morphs = resolve_network(seed), []
    for _ in range(STEPS):
        morph, network = MorphChoices(network).draw(generator)
        morphs.append(str(morph))
    forward, backward = measured(network)
    ours, theirs = count(network, "accelmark"), count(network, "aiperf-v1")
    return {
        "seed": seed,
        "morphs": morphs,
        "parameters": ours.parameters,
        "torch_forward": forward,
        "torch_backward": backward,
        "matrix_forward": ours.matrix_forward,
        "matrix_backward": ours.matrix_backward,
        "accelmark_forward": ours.forward,
        "accelmark_backward": ours.backward,
        "aiperf_forward": theirs.forward,
        "aiperf_backward": theirs.backward,
        "matrix_agrees": (forward, backward)
        == (ours.matrix_forward, ours.matrix_backward)
        == (theirs.matrix_forward, theirs.matrix_backward),
    }


def main() -> None:
    """Count twenty networks and write the figures."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    rows = [row(seed, number) for seed, amount in PER_SEED.items() for number in range(amount)]
    lines = [
        "| Seed | Morphs | torch forward | analytic matrix forward | torch backward | analytic matrix backward | all operations, forward (accelmark / aiperf-v1) | agrees |",  # noqa: E501
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {one['seed']} | {'; '.join(one['morphs'])} | {one['torch_forward']:,} | {one['matrix_forward']:,}"
        f" | {one['torch_backward']:,} | {one['matrix_backward']:,}"
        f" | {one['accelmark_forward']:,} / {one['aiperf_forward']:,} | {'yes' if one['matrix_agrees'] else 'NO'} |"
        for one in rows
    ]
    agreeing = sum(one["matrix_agrees"] for one in rows)
    heading = f"{agreeing} of {len(rows)} morphed networks: analytic matrix work equals what PyTorch executed."
    write_figures("automl_counting", {**stamp(), "networks": rows}, [heading, "", *lines])
    print(json.dumps({"agreeing": agreeing, "networks": len(rows)}))
    print(Path(__file__).parent / "results" / "automl_counting.md")


if __name__ == "__main__":
    main()
