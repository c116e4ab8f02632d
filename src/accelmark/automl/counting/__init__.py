"""Analytic operation counts of networks, in AIPerf's way and in ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol, get_args

from accelmark.automl.counting import accelmark, aiperf_v1
from accelmark.automl.counting.tally import LayerCount, Mode, NetworkCount
from accelmark.automl.graph import INPUT, Network, Node, Shape, infer_shapes

MODES: Final[tuple[Mode, ...]] = get_args(Mode)


class CountLayer(Protocol):
    """A formula book: the operations of one layer."""

    def __call__(
        self, node: Node, source: Shape, result: Shape, *, input_gradient: bool, readers: int
    ) -> LayerCount: ...


_BOOKS: Final[Mapping[Mode, CountLayer]] = {
    "aiperf-v1": aiperf_v1.count_layer,
    "accelmark": accelmark.count_layer,
}


def count(network: Network, mode: Mode) -> NetworkCount:
    """Count every layer of a network; raises NetworkError when it cannot be built."""
    shapes = infer_shapes(network)
    readers: dict[str, int] = {}
    for node in network.nodes:
        for source in node.inputs:
            readers[source] = readers.get(source, 0) + 1
    trained: dict[str, bool] = {INPUT: False}
    layers: list[LayerCount] = []
    for node in network.nodes:
        behind = any(trained[source] for source in node.inputs)
        counted = _BOOKS[mode](
            node,
            shapes[node.inputs[0]],
            shapes[node.name],
            input_gradient=behind,
            readers=readers.get(node.name, 0),
        )
        trained[node.name] = behind or counted.parameters > 0
        layers.append(counted)
    return NetworkCount(mode=mode, network=network.name, layers=tuple(layers))


__all__ = ["MODES", "LayerCount", "Mode", "NetworkCount", "count"]
