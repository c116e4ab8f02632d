"""Training FLOPs by formula, with which the counted ones are checked.

A multiply-add is two operations; backward is twice forward, because a matrix product has two gradients. Only matrix
products and convolutions count, as in FLOP counters and in the PaLM paper (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B: 6 N + 12 L H Q T a token). Recomputation by activation checkpointing never counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final


def dense_flops(num_weights: int, num_vectors: int) -> float:
    """Return the FLOPs of multiplying ``num_vectors`` (tokens of a sample) by ``num_weights`` matrix weights."""
    return 6.0 * num_weights * num_vectors


def attention_flops(num_layers: int, hidden_size: int, length: int) -> float:
    """Return the FLOPs of the score and value products of a sequence.

    Two products of ``length`` x ``length`` x ``hidden_size`` a layer. A causal mask does not reduce them, by the
    convention of the PaLM paper, the FLOP counter and published MFU figures.
    """
    return 12.0 * num_layers * hidden_size * length * length


@final
@dataclass(frozen=True, slots=True)
class Conv:
    """A square convolution: output side of ``size``, ``kernel`` x ``kernel`` weights, channels in and out."""

    size: int
    kernel: int
    channels_in: int
    channels_out: int
    is_first: bool = False
    """The image needs no gradient, so the backward pass of the first convolution has only one product."""

    @property
    def flops(self) -> float:
        """Forward and backward FLOPs."""
        forward = 2.0 * self.size**2 * self.kernel**2 * self.channels_in * self.channels_out
        return forward * (2 if self.is_first else 3)


def conv_flops(convs: Iterable[Conv]) -> float:
    """Return the FLOPs of convolutions, forward and backward, for one image."""
    return sum(conv.flops for conv in convs)
