"""Operations of layers and networks, kept apart by what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

Mode = Literal["aiperf-v1", "accelmark"]


@final
@dataclass(frozen=True, slots=True)
class LayerCount:
    """Operations of one layer for one image, except ``update``, which is for one optimiser step.

    forward              while training, per image
    evaluation           forward while evaluating, per image
    backward             per image; in mode aiperf-v1 with that mode's per-image update inside
    update               per optimiser step, whatever the batch (0 in aiperf-v1: inside ``backward``)
    matrix_forward       the part of ``forward`` that is multiply-accumulates of convolutions and dense layers
    matrix_backward      the same of ``backward``
    update_in_backward   the part of ``backward`` that is really the weight update (0 in accelmark)
    """

    name: str
    kind: str
    forward: int = 0
    evaluation: int = 0
    backward: int = 0
    update: int = 0
    matrix_forward: int = 0
    matrix_backward: int = 0
    update_in_backward: int = 0
    parameters: int = 0


@final
@dataclass(frozen=True, slots=True)
class NetworkCount:
    """The count of a whole network in one mode, with every layer's."""

    mode: Mode
    network: str
    layers: tuple[LayerCount, ...]

    @property
    def forward(self) -> int:
        """Operations of one training forward pass of one image."""
        return sum(layer.forward for layer in self.layers)

    @property
    def evaluation(self) -> int:
        """Operations of one evaluation pass of one image."""
        return sum(layer.evaluation for layer in self.layers)

    @property
    def backward(self) -> int:
        """Operations of one backward pass of one image."""
        return sum(layer.backward for layer in self.layers)

    @property
    def update(self) -> int:
        """Operations of one optimiser step."""
        return sum(layer.update for layer in self.layers)

    @property
    def matrix_forward(self) -> int:
        """Multiply-accumulate work of the forward pass, two operations each."""
        return sum(layer.matrix_forward for layer in self.layers)

    @property
    def matrix_backward(self) -> int:
        """Multiply-accumulate work of the backward pass, two operations each."""
        return sum(layer.matrix_backward for layer in self.layers)

    @property
    def matrix(self) -> int:
        """Multiply-accumulate work of training one image: what ``torch.utils.flop_counter`` counts of it."""
        return self.matrix_forward + self.matrix_backward

    @property
    def update_in_backward(self) -> int:
        """The part of ``backward`` that is weight update."""
        return sum(layer.update_in_backward for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Trainable parameters."""
        return sum(layer.parameters for layer in self.layers)

    def forward_by_kind(self) -> dict[str, int]:
        """Forward operations summed over the layers of each kind."""
        parts: dict[str, int] = {}
        for layer in self.layers:
            parts[layer.kind] = parts.get(layer.kind, 0) + layer.forward
        return parts

    def operations(self, *, trained_images: int, evaluated_images: int, steps: int) -> int:
        """Return the operations of training and evaluating so many images in so many optimiser steps."""
        return (
            (self.forward + self.backward) * trained_images + self.evaluation * evaluated_images + self.update * steps
        )
