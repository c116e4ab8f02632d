"""Transfer weights through a morph so that the network computes the same function as before.

Weights are float32 arrays keyed ``<node>.weight``, ``<node>.bias``, ``<node>.running_mean``, ``<node>.running_var``.

In evaluation mode every morph preserves the function up to rounding. In training mode, where batch norm uses the
statistics of the batch, widen, kernel-grow and the skips preserve it exactly (copied channels have the statistics of
their originals; an added branch is multiplied by 0); deepen preserves it for batches with the given statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from accelmark.automl.model import layers
from accelmark.automl.model.morphs import Morph, channel_group
from accelmark.automl.model.network import INPUT, Network, infer_shapes

_BATCH_NORM_PARTS: Final = ("weight", "bias", "running_mean", "running_var")

Array = NDArray[np.float32]
Weights = Mapping[str, Array]
Statistics = Mapping[str, tuple[Array, Array]]
"""Mean and biased variance per channel of a node's output."""


def carry_weights(
    parent: Network, child: Network, morph: Morph, weights: Weights, statistics: Statistics | None = None
) -> dict[str, Array]:
    """Return the weights with which ``child`` computes what ``parent`` computes with ``weights``.

    ``statistics`` of the node that is deepened after preserve the function in training mode too; without them the
    inserted batch norm starts with mean 0 and variance 1.
    """
    generator = np.random.default_rng(morph.seed)
    match morph.kind:
        case "widen":
            return _widened(parent, child, morph, weights, generator)
        case "kernel-grow":
            key = f"{morph.at}.weight"
            return {**weights, key: resized_kernel(weights[key], morph.size)}
        case "deepen":
            return {**weights, **_identity_block(child, morph, (statistics or {}).get(morph.at))}
        case "add-skip":
            return {**weights, **_zero_branch(child, morph, generator)}
        case "concat-skip":
            return {**weights, **_identity_fusion(child, morph, generator)}


def fitted_weights(network: Network, weights: Weights) -> dict[str, Array]:
    """Return ``weights`` with kernels zero-padded or cropped to those of ``network``; cropping changes the function."""
    fitted = dict(weights)
    for node in network.nodes:
        key = f"{node.name}.weight"
        if isinstance(node.layer, layers.Convolution) and weights[key].shape[-1] != node.layer.kernel:
            fitted[key] = resized_kernel(weights[key], node.layer.kernel)
    return fitted


def resized_kernel(array: Array, kernel: int) -> Array:
    """Zero-pad a convolution's weights (out, in, k, k) to ``kernel``, or crop them to their middle."""
    step = (kernel - array.shape[-1]) // 2
    if step >= 0:
        return np.pad(array, ((0, 0), (0, 0), (step, step), (step, step)))
    return np.ascontiguousarray(array[:, :, -step:step, -step:step])


@dataclass(frozen=True, slots=True)
class _Channels:
    """For every channel of a tensor in the wider network: its original channel and its share of that one's weight.

    The shares of all copies of a channel sum to 1, so that a reader whose weights are multiplied by them computes the
    same as before. The shares differ, so that the copies diverge in training.
    """

    original: NDArray[np.intp]
    share: NDArray[np.float64]


def _unchanged(channels: int) -> _Channels:
    return _Channels(np.arange(channels), np.ones(channels))


def _copied(channels: int, size: int, generator: np.random.Generator) -> _Channels:
    """Extend ``channels`` channels to ``size`` by copies: of each once when doubling, else of randomly chosen ones."""
    copies = (
        generator.integers(0, channels, size=size - channels) if size - channels != channels else np.arange(channels)
    )
    original = np.concatenate([np.arange(channels), copies])
    weight = generator.uniform(0.5, 1.5, size=size)
    return _Channels(original, weight / np.bincount(original, weights=weight, minlength=channels)[original])


def _widened(
    parent: Network, child: Network, morph: Morph, weights: Weights, generator: np.random.Generator
) -> dict[str, Array]:
    shapes = infer_shapes(parent)
    widened = _copied(shapes[morph.at][0], morph.size, generator)
    channels = _channels_of_all(parent, shapes, channel_group(parent, morph.at), widened)
    carried: dict[str, Array] = {}
    for key, array in weights.items():
        name, _, part = key.partition(".")
        node, out = child.by_name[name], channels[name].original
        if part == "weight" and isinstance(node.layer, layers.Convolution | layers.Dense):
            source = channels[node.inputs[0]]
            share = source.share.reshape(-1, *[1] * (array.ndim - 2))
            carried[key] = (array[out][:, source.original] * share).astype(np.float32)
        else:
            carried[key] = array[out].copy()
    return carried


def _channels_of_all(
    network: Network, shapes: Mapping[str, layers.Shape], group: tuple[str, ...], widened: _Channels
) -> Mapping[str, _Channels]:
    """Return where the output channels of every node come from when the convolutions of ``group`` are widened."""
    found: dict[str, _Channels] = {INPUT: _unchanged(network.input_shape[0])}
    for node in network.nodes:
        sources = [found[source] for source in node.inputs]
        match node.layer:
            case layers.Convolution() | layers.Dense():
                found[node.name] = widened if node.name in group else _unchanged(shapes[node.name][0])
            case layers.Concat():
                starts = np.cumsum([0, *(shapes[source][0] for source in node.inputs[:-1])])
                originals = [source.original + start for source, start in zip(sources, starts, strict=True)]
                shares = np.concatenate([source.share for source in sources])
                found[node.name] = _Channels(np.concatenate(originals), shares)
            case layers.Flatten():
                pixels = int(np.prod(shapes[node.inputs[0]][1:], dtype=np.int64))
                original = sources[0].original[:, None] * pixels + np.arange(pixels)[None, :]
                found[node.name] = _Channels(original.reshape(-1), np.repeat(sources[0].share, pixels))
            case _:
                found[node.name] = sources[0]
    return found


def _identity_block(child: Network, morph: Morph, statistics: tuple[Array, Array] | None) -> dict[str, Array]:
    """Return an identity convolution, and a batch norm whose scale and shift undo its own normalization."""
    name = morph.label
    filters = infer_shapes(child)[f"{name}_conv"][0]
    weight = np.zeros((filters, filters, morph.size, morph.size), np.float32)
    weight[np.arange(filters), np.arange(filters), morph.size // 2, morph.size // 2] = 1
    mean, variance = statistics or (np.zeros(filters, np.float32), np.ones(filters, np.float32))
    norm = child.by_name[f"{name}_bn"].layer
    epsilon = norm.epsilon if isinstance(norm, layers.BatchNorm) else 0.0
    scale = np.sqrt(variance.astype(np.float64) + epsilon)
    return {f"{name}_conv.weight": weight} | _batch_norm(f"{name}_bn", scale, mean, mean, variance)


def _batch_norm(name: str, *values: NDArray[np.floating]) -> dict[str, Array]:
    return {f"{name}.{part}": value.astype(np.float32) for part, value in zip(_BATCH_NORM_PARTS, values, strict=True)}


def _branch_convolution(child: Network, morph: Morph, generator: np.random.Generator) -> dict[str, Array]:
    """He initialization (fan-out) of the 1x1 convolution of a skip; empty where it has none."""
    name = f"{morph.label}_conv"
    if name not in child.by_name:
        return {}
    shapes = infer_shapes(child)
    shape = (shapes[name][0], shapes[morph.at][0], 1, 1)
    return {f"{name}.weight": (generator.standard_normal(shape) * np.sqrt(2 / shape[0])).astype(np.float32)}


def _zero_branch(child: Network, morph: Morph, generator: np.random.Generator) -> dict[str, Array]:
    """Return weights of a skip whose batch norm multiplies it by 0."""
    name = f"{morph.label}_bn"
    zero = np.zeros(infer_shapes(child)[name][0], np.float32)
    return _branch_convolution(child, morph, generator) | _batch_norm(name, zero, zero, zero, zero + 1)


def _identity_fusion(child: Network, morph: Morph, generator: np.random.Generator) -> dict[str, Array]:
    """Return weights of a fusing 1x1 convolution that passes on the main chain and ignores the skip."""
    shapes, name = infer_shapes(child), f"{morph.label}_fuse"
    kept = shapes[name][0]
    weight = np.zeros((kept, shapes[f"{morph.label}_concat"][0], 1, 1), np.float32)
    weight[np.arange(kept), np.arange(kept), 0, 0] = 1
    fusion = {f"{name}.weight": weight, f"{name}.bias": np.zeros(kept, np.float32)}
    return _branch_convolution(child, morph, generator) | fusion


def weight_shapes(network: Network) -> dict[str, layers.Shape]:
    """Return the shapes of a network's parameters and running statistics."""
    shapes, found = infer_shapes(network), dict[str, layers.Shape]()
    for node in network.nodes:
        channels, name = shapes[node.inputs[0]][0], node.name
        match node.layer:
            case layers.BatchNorm():
                found |= dict.fromkeys((f"{name}.{part}" for part in _BATCH_NORM_PARTS), (channels,))
            case layers.Convolution(filters=out, kernel=kernel, bias=bias):
                found |= {f"{name}.weight": (out, channels, kernel, kernel)} | (
                    {f"{name}.bias": (out,)} if bias else {}
                )
            case layers.Dense(units=out, bias=bias):
                found |= {f"{name}.weight": (out, channels)} | ({f"{name}.bias": (out,)} if bias else {})
    return found
