"""Layers of a network as frozen data without input channels, and the shape that each computes from its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Final, Literal

from pydantic import Field

from accelmark.spec.model import Spec

PositiveInt = Annotated[int, Field(ge=1, le=1_000_000)]
Padding = Annotated[int, Field(ge=0, le=1_000)]
Shape = tuple[int, ...]
"""(channels, height, width) of a feature map, (features,) of a vector; without the batch axis."""


class StrictSpec(Spec, strict=True):
    """Base of layers, nodes and networks; values of another type are errors instead of being converted."""


class Convolution(StrictSpec):
    """Square 2-d convolution; ``padding`` is in pixels per side."""

    kind: Literal["convolution"] = "convolution"
    filters: PositiveInt
    kernel: PositiveInt
    stride: PositiveInt = 1
    padding: Padding = 0
    bias: bool = False


class BatchNorm(StrictSpec):
    """Batch normalization over channels, with learned scale and shift."""

    kind: Literal["batch_norm"] = "batch_norm"
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class ReLU(StrictSpec):
    """max(x, 0)."""

    kind: Literal["relu"] = "relu"


class Add(StrictSpec):
    """Element-wise sum of two or more tensors of the same shape."""

    kind: Literal["add"] = "add"


class Concat(StrictSpec):
    """Concatenation of two or more tensors along the channels."""

    kind: Literal["concat"] = "concat"


class MaxPool(StrictSpec):
    """Maximum of each window; padding is never the maximum."""

    kind: Literal["max_pool"] = "max_pool"
    kernel: PositiveInt
    stride: PositiveInt
    padding: Padding = 0


class AveragePool(StrictSpec):
    """Mean of each window; padding counts as zero."""

    kind: Literal["average_pool"] = "average_pool"
    kernel: PositiveInt
    stride: PositiveInt
    padding: Padding = 0


class GlobalPool(StrictSpec):
    """Mean of each channel: (channels, height, width) -> (channels,)."""

    kind: Literal["global_pool"] = "global_pool"


class Dense(StrictSpec):
    """Fully connected layer over a flat input."""

    kind: Literal["dense"] = "dense"
    units: PositiveInt
    bias: bool = True


class Dropout(StrictSpec):
    """Zeroes a fraction ``rate`` of its input during training."""

    kind: Literal["dropout"] = "dropout"
    rate: Annotated[float, Field(ge=0, lt=1)]


class Softmax(StrictSpec):
    """Class scores -> probabilities; the last layer of every network."""

    kind: Literal["softmax"] = "softmax"


class Flatten(StrictSpec):
    """(channels, height, width) -> (channels x height x width,), channel by channel."""

    kind: Literal["flatten"] = "flatten"


Layer = Annotated[
    Convolution | BatchNorm | ReLU | Add | Concat | MaxPool | AveragePool | GlobalPool | Dense | Dropout | Softmax
    | Flatten,
    Field(discriminator="kind"),
]  # fmt: skip


BATCH_NORM_ARRAYS: Final = ("weight", "bias", "running_mean", "running_var")


def parameter_shapes(layer: Layer, channels: int) -> dict[str, Shape]:
    """Return the shapes of a layer's weight, bias and running statistics by name, for this number of input channels."""
    match layer:
        case BatchNorm():
            return dict.fromkeys(BATCH_NORM_ARRAYS, (channels,))
        case Convolution(filters=out, kernel=kernel):
            weight: Shape = (out, channels, kernel, kernel)
        case Dense(units=out):
            weight = (out, channels)
        case _:
            return {}
    return {"weight": weight} | ({"bias": (out,)} if layer.bias else {})


def output_shape(layer: Layer, sources: Sequence[Shape]) -> Shape:
    """Return the output shape of ``layer`` for inputs of these shapes; raises ValueError with the reason."""
    found = ", ".join(map(str, sources))
    if isinstance(layer, Add | Concat):
        if len(sources) < 2:
            raise ValueError(f"a {layer.kind} reads two or more inputs, not {len(sources)}")
        if isinstance(layer, Add) and len(set(sources)) > 1:
            raise ValueError(f"an add needs equal shapes, not {found}")
        if len({source[1:] for source in sources}) > 1:
            raise ValueError(f"a concat needs equal height and width, not {found}")
        return sources[0] if isinstance(layer, Add) else (sum(source[0] for source in sources), *sources[0][1:])
    if len(sources) != 1:
        raise ValueError(f"a {layer.kind} reads one input, not {len(sources)}")
    source = sources[0]
    match layer:
        case BatchNorm() | ReLU() | Dropout():
            return source
        case Flatten():
            return (prod(source),)
        case Dense() | Softmax():
            if len(source) != 1:
                raise ValueError(f"a {layer.kind} reads a flat input, not shape {found}; flatten or pool it first")
            return (layer.units,) if isinstance(layer, Dense) else source
    if len(source) != 3:
        raise ValueError(f"a {layer.kind} reads (channels, height, width), not shape {found}")
    if isinstance(layer, GlobalPool):
        return source[:1]
    kernel, padding = layer.kernel, layer.padding
    if not isinstance(layer, Convolution) and 2 * padding > kernel:
        raise ValueError(f"padding {padding} is more than half of the {kernel}-pixel window")
    sides = [(side + 2 * padding - kernel) // layer.stride + 1 for side in source[1:]]
    if min(sides) < 1:
        window, image = f"{kernel}x{kernel}", f"{source[1]}x{source[2]}"
        raise ValueError(f"a window of {window} does not fit into {image} with padding {padding}")
    return (layer.filters if isinstance(layer, Convolution) else source[0], *sides)
