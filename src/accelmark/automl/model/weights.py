"""Transfer weights through a morph so that the network computes the same function as before.

In training mode, where batch norm uses the statistics of the batch, deepen preserves the function for batches with the
given statistics only; the other morphs preserve it for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from accelmark.automl.model import graph
from accelmark.automl.model.graph import INPUT, Network, infer_shapes
from accelmark.automl.model.morphs import Morph, channel_groups

Array = NDArray[np.float32]
Weights = Mapping[str, Array]


def weight_shapes(network: Network) -> dict[str, graph.Shape]:
    """Return the shapes of a network's parameters and running statistics."""
    shapes = infer_shapes(network)
    return {
        f"{node.name}.{part}": shape
        for node in network.nodes
        for part, shape in graph.parameter_shapes(node.layer, shapes[node.inputs[0]][0]).items()
    }


def carry_weights(
    parent: Network, child: Network, morph: Morph, weights: Weights, statistics: tuple[Array, Array] | None = None
) -> dict[str, Array]:
    """Return the weights with which ``child`` computes what ``parent`` computes with ``weights``.

    ``statistics``: mean and biased variance per channel of the output of ``morph.at``, for a morph that deepens.
    """
    generator = np.random.default_rng(morph.seed)
    if morph.kind == "widen":
        return _widened(parent, child, morph, weights, generator)
    if morph.kind == "kernel-grow":
        key = f"{morph.at}.weight"
        return {**weights, key: _resized_kernel(weights[key], morph.size)}
    shapes, label, added = infer_shapes(child), morph.label, dict[str, Array]()
    if morph.kind == "deepen":
        channels = shapes[f"{label}_conv"][0]
        added[f"{label}_conv.weight"] = _identity_kernel(channels, channels, morph.size)
        mean, variance = statistics or (np.zeros(channels, np.float32), np.ones(channels, np.float32))
        # Scale and shift undo the batch norm's own normalization.
        scale = np.sqrt(variance.astype(np.float64) + graph.BatchNorm().epsilon)
        return {**weights, **added, **_batch_norm(f"{label}_bn", scale, mean, mean, variance)}
    if f"{label}_conv" in child.by_name:  # He initialization (fan-out)
        shape = (shapes[f"{label}_conv"][0], shapes[morph.at][0], 1, 1)
        added[f"{label}_conv.weight"] = (generator.standard_normal(shape) * np.sqrt(2 / shape[0])).astype(np.float32)
    if morph.kind == "add-skip":  # a batch norm that multiplies the skip by 0
        zero = np.zeros(shapes[f"{label}_bn"][0])
        return {**weights, **added, **_batch_norm(f"{label}_bn", zero, zero, zero, zero + 1)}
    # The fusing convolution passes on the main chain and ignores the skip.
    kept = shapes[f"{label}_fuse"][0]
    added[f"{label}_fuse.weight"] = _identity_kernel(kept, shapes[f"{label}_concat"][0], 1)
    return {**weights, **added, f"{label}_fuse.bias": np.zeros(kept, np.float32)}


def fitted_weights(network: Network, weights: Weights) -> dict[str, Array]:
    """Return ``weights`` with kernels zero-padded or cropped to those of ``network``; cropping changes the function."""
    fitted = dict(weights)
    for name, layer in network.convolutions.items():
        fitted[f"{name}.weight"] = _resized_kernel(weights[f"{name}.weight"], layer.kernel)
    return fitted


def _resized_kernel(array: Array, kernel: int) -> Array:
    """Zero-pad a convolution's weights (out, in, k, k) to ``kernel``, or crop them to their middle."""
    step = (kernel - array.shape[-1]) // 2
    if step == 0:
        return array
    if step > 0:
        return np.pad(array, ((0, 0), (0, 0), (step, step), (step, step)))
    return np.ascontiguousarray(array[:, :, -step:step, -step:step])


def _identity_kernel(out: int, channels: int, size: int) -> Array:
    """Return convolution weights that copy the first ``out`` input channels."""
    weight = np.zeros((out, channels, size, size), np.float32)
    weight[np.arange(out), np.arange(out), size // 2, size // 2] = 1
    return weight


def _batch_norm(name: str, *values: NDArray[np.floating]) -> dict[str, Array]:
    parts = zip(graph.BATCH_NORM_ARRAYS, values, strict=True)
    return {f"{name}.{part}": value.astype(np.float32) for part, value in parts}


class _Channels(NamedTuple):
    """For every channel of a tensor in the wider network: its original channel and its share of that one's weight.

    The shares of all copies of a channel sum to 1. They differ, so that the copies diverge in training.
    """

    original: NDArray[np.intp]
    share: NDArray[np.float64]


def _unchanged(channels: int) -> _Channels:
    return _Channels(np.arange(channels), np.ones(channels))


def _widened(
    parent: Network, child: Network, morph: Morph, weights: Weights, generator: np.random.Generator
) -> dict[str, Array]:
    shapes = infer_shapes(parent)
    original = np.tile(np.arange(shapes[morph.at][0]), 2)  # every channel is copied once
    weight = generator.uniform(0.5, 1.5, size=original.size)
    widened = _Channels(original, weight / np.bincount(original, weights=weight)[original])
    group = channel_groups(parent)[morph.at]
    # Where the output channels of every node come from when the convolutions of the group are widened.
    channels: dict[str, _Channels] = {INPUT: _unchanged(parent.input_shape[0])}
    for node in parent.nodes:
        sources = [channels[source] for source in node.inputs]
        match node.layer:
            case graph.Convolution() | graph.Dense():
                channels[node.name] = widened if node.name in group else _unchanged(shapes[node.name][0])
            case graph.Concat():
                starts = np.cumsum([0, *(shapes[source][0] for source in node.inputs[:-1])])
                originals = [source.original + start for source, start in zip(sources, starts, strict=True)]
                shares = np.concatenate([source.share for source in sources])
                channels[node.name] = _Channels(np.concatenate(originals), shares)
            case graph.Flatten():
                pixels = int(np.prod(shapes[node.inputs[0]][1:], dtype=np.int64))
                numbers = sources[0].original[:, None] * pixels + np.arange(pixels)[None, :]
                channels[node.name] = _Channels(numbers.reshape(-1), np.repeat(sources[0].share, pixels))
            case _:
                channels[node.name] = sources[0]
    carried: dict[str, Array] = {}
    for key, array in weights.items():
        name, _, part = key.partition(".")
        node, out = child.by_name[name], channels[name].original
        carried[key] = array[out]
        if part == "weight" and isinstance(node.layer, graph.Convolution | graph.Dense):
            source = channels[node.inputs[0]]
            share = source.share.reshape(-1, *[1] * (array.ndim - 2))
            carried[key] = (array[out][:, source.original] * share).astype(np.float32)
    return carried
