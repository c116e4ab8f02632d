"""The layers that a searched network is made of: plain data, each kind one frozen model.

Channels that a layer reads are inferred from its input and therefore never written down twice.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1, le=1_000_000)]
Padding = Annotated[int, Field(ge=0, le=1_000)]


class LayerModel(BaseModel):
    """What all layers share: they are frozen and know no key but their own."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Convolution(LayerModel):
    """A square 2-d convolution; ``padding`` is per side, in pixels."""

    kind: Literal["convolution"] = "convolution"
    filters: PositiveInt
    kernel: PositiveInt
    stride: PositiveInt = 1
    padding: Padding = 0
    bias: bool = False


class BatchNorm(LayerModel):
    """Batch normalisation over channels, with learned scale and shift."""

    kind: Literal["batch_norm"] = "batch_norm"
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class ReLU(LayerModel):
    """max(x, 0)."""

    kind: Literal["relu"] = "relu"


class Add(LayerModel):
    """The sum of two or more tensors of one shape."""

    kind: Literal["add"] = "add"


class Concat(LayerModel):
    """Two or more tensors side by side along the channels."""

    kind: Literal["concat"] = "concat"


class MaxPool(LayerModel):
    """The largest value of each window; padding never wins."""

    kind: Literal["max_pool"] = "max_pool"
    kernel: PositiveInt
    stride: PositiveInt
    padding: Padding = 0


class AveragePool(LayerModel):
    """The mean of each window, padding counted as zero."""

    kind: Literal["average_pool"] = "average_pool"
    kernel: PositiveInt
    stride: PositiveInt
    padding: Padding = 0


class GlobalPool(LayerModel):
    """The mean of each channel over the whole picture: (channels, height, width) -> (channels,)."""

    kind: Literal["global_pool"] = "global_pool"


class Dense(LayerModel):
    """A fully connected layer over a flat input."""

    kind: Literal["dense"] = "dense"
    units: PositiveInt
    bias: bool = True


class Dropout(LayerModel):
    """Zeroes a share ``rate`` of its input while training."""

    kind: Literal["dropout"] = "dropout"
    rate: Annotated[float, Field(ge=0, lt=1)]


class Softmax(LayerModel):
    """Turns class scores into probabilities; the last layer of every network."""

    kind: Literal["softmax"] = "softmax"


class Flatten(LayerModel):
    """(channels, height, width) -> (channels x height x width,), channel by channel."""

    kind: Literal["flatten"] = "flatten"


Layer = Annotated[
    Convolution
    | BatchNorm
    | ReLU
    | Add
    | Concat
    | MaxPool
    | AveragePool
    | GlobalPool
    | Dense
    | Dropout
    | Softmax
    | Flatten,
    Field(discriminator="kind"),
]

PoolLayer = MaxPool | AveragePool
MergeLayer = Add | Concat
