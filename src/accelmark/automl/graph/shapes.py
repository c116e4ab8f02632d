"""Shape inference and validation: every reason why a network cannot be built, in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from accelmark.automl.graph.layers import (
    Add,
    AveragePool,
    BatchNorm,
    Concat,
    Convolution,
    Dense,
    Dropout,
    Flatten,
    GlobalPool,
    Layer,
    MaxPool,
    ReLU,
    Softmax,
)
from accelmark.automl.graph.network import INPUT, Network, NetworkError
from accelmark.spec.errors import Problem, nearest

Shape = tuple[int, ...]


class _ImpossibleLayerError(ValueError):
    """A layer that cannot take its input; the message is what a person reads."""


def window_side(side: int, kernel: int, stride: int, padding: int) -> int:
    """Return how many windows fit along a side of ``side`` pixels (floor division; 0 or less: none)."""
    return (side + 2 * padding - kernel) // stride + 1


def infer_shapes(network: Network) -> Mapping[str, Shape]:
    """Return the output shape of every node and of the picture, without the batch axis.

    Raises NetworkError with all problems when the network cannot be built.
    """
    shapes, problems = _walk(network, where=network.name)
    if problems:
        raise NetworkError(problems)
    return shapes


def find_problems(network: Network, *, where: str = "network") -> tuple[Problem, ...]:
    """Return every problem of the network; empty when it can be built."""
    return tuple(_walk(network, where=where)[1])


def _walk(network: Network, *, where: str) -> tuple[dict[str, Shape], list[Problem]]:
    shapes: dict[str, Shape] = {INPUT: network.input_shape}
    problems: list[Problem] = []
    all_names = {node.name for node in network.nodes} | {INPUT}
    seen = {INPUT}
    for index, node in enumerate(network.nodes):
        key = f"nodes.{index}.{node.name}"
        if node.name in seen:
            problems.append(Problem(where, key, f"a node named {node.name!r} is already there"))
        seen.add(node.name)
        sources: list[Shape] = []
        for source in node.inputs:
            if source not in all_names:
                problems.append(Problem(where, key, f"reads {source!r}, which is no node", nearest(source, all_names)))
            elif source not in seen or source == node.name:
                problems.append(Problem(where, key, f"reads {source!r}, which comes later or is itself"))
            elif source in shapes:
                sources.append(shapes[source])
        if len(sources) != len(node.inputs):
            continue  # the cause is already told
        try:
            shapes[node.name] = output_shape(node.layer, sources)
        except _ImpossibleLayerError as error:
            problems.append(Problem(where, key, str(error)))
    problems.extend(_ending_problems(network, shapes, where))
    return shapes, problems


def _ending_problems(network: Network, shapes: Mapping[str, Shape], where: str) -> list[Problem]:
    problems = [
        Problem(where, f"nodes.{index}.{node.name}", "nobody reads this node", "connect it or take it out")
        for index, node in enumerate(network.nodes[:-1])
        if not network.consumers[node.name]
    ]
    if not network.consumers[INPUT]:
        problems.append(Problem(where, "nodes", "nobody reads the picture", f"one node must read {INPUT!r}"))
    last = network.nodes[-1]
    if not isinstance(last.layer, Softmax):
        problems.append(Problem(where, "nodes", f"the last node is a {last.layer.kind}, not a softmax"))
    problems.extend(
        Problem(where, f"nodes.{index}.{node.name}", "a softmax before the last node")
        for index, node in enumerate(network.nodes[:-1])
        if isinstance(node.layer, Softmax)
    )
    ending = shapes.get(last.name)
    if ending is not None and ending != (network.classes,):
        problems.append(
            Problem(
                where,
                "classes",
                f"the network ends in shape {ending}, {network.classes} classes are asked for",
            )
        )
    return problems


def output_shape(layer: Layer, sources: Sequence[Shape]) -> Shape:
    """Return the shape that ``layer`` makes of ``sources``; ValueError says why it cannot."""
    if isinstance(layer, Add | Concat):
        return _merged_shape(layer, sources)
    if len(sources) != 1:
        raise _ImpossibleLayerError(f"a {layer.kind} reads one input, not {len(sources)}")
    source = sources[0]
    if isinstance(layer, BatchNorm | ReLU | Dropout):
        return source
    if isinstance(layer, Flatten):
        return (prod(source),)
    if isinstance(layer, Dense | Softmax):
        if len(source) != 1:
            raise _ImpossibleLayerError(
                f"a {layer.kind} reads a flat input, not shape {source}; flatten or pool it first"
            )
        return (layer.units,) if isinstance(layer, Dense) else source
    if len(source) != 3:
        raise _ImpossibleLayerError(f"a {layer.kind} reads (channels, height, width), not shape {source}")
    channels, height, width = source
    if isinstance(layer, GlobalPool):
        return (channels,)
    return _windowed_shape(layer, channels, height, width)


def _windowed_shape(layer: Convolution | MaxPool | AveragePool, channels: int, height: int, width: int) -> Shape:
    if isinstance(layer, MaxPool | AveragePool) and 2 * layer.padding > layer.kernel:
        raise _ImpossibleLayerError(f"padding {layer.padding} is more than half of the {layer.kernel}-pixel window")
    rows = window_side(height, layer.kernel, layer.stride, layer.padding)
    columns = window_side(width, layer.kernel, layer.stride, layer.padding)
    if rows < 1 or columns < 1:
        raise _ImpossibleLayerError(
            f"a window of {layer.kernel}x{layer.kernel} does not fit into {height}x{width} with padding {layer.padding}"
        )
    return (layer.filters if isinstance(layer, Convolution) else channels, rows, columns)


def _merged_shape(layer: Add | Concat, sources: Sequence[Shape]) -> Shape:
    if len(sources) < 2:
        raise _ImpossibleLayerError(f"a {layer.kind} reads two or more inputs, not {len(sources)}")
    first = sources[0]
    if isinstance(layer, Add):
        if any(source != first for source in sources):
            raise _ImpossibleLayerError(f"an add needs equal shapes, not {', '.join(map(str, sources))}")
        return first
    if any(source[1:] != first[1:] for source in sources):
        raise _ImpossibleLayerError(f"a concat needs equal height and width, not {', '.join(map(str, sources))}")
    return (sum(source[0] for source in sources), *first[1:])
