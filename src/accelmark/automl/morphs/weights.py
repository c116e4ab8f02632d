"""Carry weights over a morph so that the network computes what it did before.

Weights are arrays keyed ``<node>.weight``, ``<node>.bias``, ``<node>.running_mean``, ``<node>.running_var``.

In evaluation mode every morph preserves the function to float tolerance. In training mode, where a batch
norm uses the batch's own statistics: widen, kernel-grow, add-skip and concat-skip preserve it exactly
(copies have their originals' statistics; an added branch is scaled by 0). Deepen preserves it for a batch
with the statistics that it is given, and without any it starts from mean 0 and variance 1, which holds in
evaluation mode alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from accelmark.automl.graph import BatchNorm, Convolution, Dense, Network, Shape, infer_shapes
from accelmark.automl.morphs.channels import channel_group, doubled, origins
from accelmark.automl.morphs.morph import Morph

Array = NDArray[np.float32]
Weights = Mapping[str, Array]
Statistics = Mapping[str, tuple[Array, Array]]


def carry_weights(
    parent: Network, child: Network, morph: Morph, weights: Weights, statistics: Statistics | None = None
) -> dict[str, Array]:
    """Return the weights with which ``child`` computes what ``parent`` does with ``weights``.

    ``statistics`` may hold mean and biased variance per channel of the node that is deepened after
    (``graph.module.channel_statistics``), so that training mode is preserved too.
    """
    generator = np.random.default_rng(morph.seed)
    match morph.kind:
        case "widen":
            return _carry_widening(parent, child, morph, weights, generator)
        case "kernel-grow":
            return _carry_growth(parent, child, morph, weights)
        case "deepen":
            return {**weights, **_identity_block(child, morph, (statistics or {}).get(morph.at))}
        case "add-skip":
            return {**weights, **_silent_branch(child, morph, generator)}
        case "concat-skip":
            return {**weights, **_deaf_fusion(child, morph, generator)}


def _carry_widening(
    parent: Network, child: Network, morph: Morph, weights: Weights, generator: np.random.Generator
) -> dict[str, Array]:
    group = channel_group(parent, morph.at)
    before = infer_shapes(parent)[morph.at][0]
    found = origins(parent, group, doubled(before, morph.size, generator))
    carried: dict[str, Array] = {}
    for key, array in weights.items():
        name, _, part = key.partition(".")
        node = child.by_name[name]
        out = found[name].channel
        if part == "weight" and isinstance(node.layer, Convolution | Dense):
            source = found[node.inputs[0]]
            share = source.share.reshape(-1, *[1] * (array.ndim - 2))
            carried[key] = (array[out][:, source.channel] * share).astype(np.float32)
        else:
            carried[key] = array[out].copy()
    return carried


def _carry_growth(parent: Network, child: Network, morph: Morph, weights: Weights) -> dict[str, Array]:
    key = f"{morph.at}.weight"
    before, after = parent.by_name[morph.at].layer, child.by_name[morph.at].layer
    if not isinstance(before, Convolution) or not isinstance(after, Convolution):
        raise TypeError(f"{morph.at} is no convolution")
    return {**weights, key: resized_kernel(weights[key], after.kernel)}


def resized_kernel(array: Array, kernel: int) -> Array:
    """Pad a convolution's weights (out, in, k, k) with zeros to ``kernel``, or crop them to their middle."""
    step = (kernel - array.shape[-1]) // 2
    if step >= 0:
        return np.pad(array, ((0, 0), (0, 0), (step, step), (step, step)))
    return np.ascontiguousarray(array[:, :, -step:step, -step:step])


def _identity_block(child: Network, morph: Morph, known: tuple[Array, Array] | None) -> dict[str, Array]:
    name = morph.label
    norm = child.by_name[f"{name}_bn"].layer
    if not isinstance(norm, BatchNorm):
        raise TypeError(f"{name}_bn is no batch norm")
    filters = infer_shapes(child)[f"{name}_conv"][0]
    weight = np.zeros((filters, filters, morph.size, morph.size), np.float32)
    weight[np.arange(filters), np.arange(filters), morph.size // 2, morph.size // 2] = 1
    mean, variance = known or (np.zeros(filters, np.float32), np.ones(filters, np.float32))
    return {
        f"{name}_conv.weight": weight,
        f"{name}_bn.weight": np.sqrt(variance.astype(np.float64) + norm.epsilon).astype(np.float32),
        f"{name}_bn.bias": mean.astype(np.float32),
        f"{name}_bn.running_mean": mean.astype(np.float32),
        f"{name}_bn.running_var": variance.astype(np.float32),
    }


def _he(shape: Shape, generator: np.random.Generator) -> Array:
    deviation = np.sqrt(2 / (shape[0] * shape[2] * shape[3]))
    drawn: Array = (generator.standard_normal(shape) * deviation).astype(np.float32)
    return drawn


def _branch_convolution(child: Network, morph: Morph, generator: np.random.Generator) -> dict[str, Array]:
    name = f"{morph.label}_conv"
    if name not in child.by_name:
        return {}
    shapes = infer_shapes(child)
    return {f"{name}.weight": _he((shapes[name][0], shapes[morph.at][0], 1, 1), generator)}


def _silent_branch(child: Network, morph: Morph, generator: np.random.Generator) -> dict[str, Array]:
    name = f"{morph.label}_bn"
    channels = infer_shapes(child)[name][0]
    return _branch_convolution(child, morph, generator) | {
        f"{name}.weight": np.zeros(channels, np.float32),
        f"{name}.bias": np.zeros(channels, np.float32),
        f"{name}.running_mean": np.zeros(channels, np.float32),
        f"{name}.running_var": np.ones(channels, np.float32),
    }


def _deaf_fusion(child: Network, morph: Morph, generator: np.random.Generator) -> dict[str, Array]:
    shapes, name = infer_shapes(child), f"{morph.label}_fuse"
    kept = shapes[name][0]
    weight = np.zeros((kept, shapes[f"{morph.label}_concat"][0], 1, 1), np.float32)
    weight[np.arange(kept), np.arange(kept), 0, 0] = 1
    return _branch_convolution(child, morph, generator) | {
        f"{name}.weight": weight,
        f"{name}.bias": np.zeros(kept, np.float32),
    }
