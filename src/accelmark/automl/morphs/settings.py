"""Write searched hyperparameters into a network: what is executed and counted is what was searched."""

from __future__ import annotations

from accelmark.automl.graph import INPUT, Convolution, Dense, Dropout, Layer, Network, Node, infer_shapes
from accelmark.automl.graph.network import rebuilt
from accelmark.automl.morphs.weights import Array, Weights, resized_kernel


def with_kernel(network: Network, kernel: int) -> Network:
    """Return the network with every spatial convolution but those that read the picture set to ``kernel``.

    Spatial are those with a kernel above 1 that keep ``kernel // 2`` as padding; their padding moves along,
    so no shape changes. ``kernel`` is odd.
    """
    changes: dict[str, Layer] = {}
    for node in network.nodes:
        layer = node.layer
        if (
            isinstance(layer, Convolution)
            and layer.kernel > 1
            and layer.padding == layer.kernel // 2
            and INPUT not in node.inputs
        ):
            changes[node.name] = layer.model_copy(update={"kernel": kernel, "padding": kernel // 2})
    changed = network.replaced(changes)
    infer_shapes(changed)
    return changed


def with_dropout(network: Network, rate: float) -> Network:
    """Return the network with all dropout at ``rate``; one before the last dense layer if there is none."""
    changes: dict[str, Layer] = {
        node.name: Dropout(rate=rate) for node in network.nodes if isinstance(node.layer, Dropout)
    }
    if changes:
        return network.replaced(changes)
    last = next((node for node in reversed(network.nodes) if isinstance(node.layer, Dense)), None)
    if last is None:
        return network
    nodes: list[Node] = []
    for node in network.nodes:
        if node is last:
            nodes.append(Node(name="searched_dropout", layer=Dropout(rate=rate), inputs=node.inputs))
            node = node.model_copy(update={"inputs": ("searched_dropout",)})
        nodes.append(node)
    return rebuilt(network, tuple(nodes))


def fitted_weights(network: Network, weights: Weights) -> dict[str, Array]:
    """Return ``weights`` with kernels padded or cropped to those of ``network``.

    Growing preserves the function, cropping does not; a trial whose searched kernel is smaller than its
    parent's says so in its record.
    """
    fitted = dict(weights)
    for node in network.nodes:
        key = f"{node.name}.weight"
        if isinstance(node.layer, Convolution) and weights[key].shape[-1] != node.layer.kernel:
            fitted[key] = resized_kernel(weights[key], node.layer.kernel)
    return fitted
