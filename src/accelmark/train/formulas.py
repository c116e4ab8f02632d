"""Training FLOPs by formula, with which the counted ones are checked.

A multiply-add is two operations; backward is twice forward, because a matrix product has two gradients. Only matrix
products and convolutions count, as in FLOP counters and in the PaLM paper (Chowdhery et al. 2022,
arXiv:2204.02311, appendix B: 6 N + 12 L H Q T a token). Recomputation by activation checkpointing never counts.
"""

from __future__ import annotations


def dense_flops(num_weights: int, num_vectors: int) -> float:
    """Return the FLOPs of multiplying ``num_vectors`` (tokens of a sample) by ``num_weights`` matrix weights."""
    return 6.0 * num_weights * num_vectors


def attention_flops(num_layers: int, hidden_size: int, length: int) -> float:
    """Return the FLOPs of the score and value products of a sequence.

    Two products of ``length`` x ``length`` x ``hidden_size`` a layer. A causal mask does not reduce them, by the
    convention of the PaLM paper, the FLOP counter and published MFU figures.
    """
    return 12.0 * num_layers * hidden_size * length * length


def conv_flops(size: int, kernel: int, channels_in: int, channels_out: int, *, is_first: bool = False) -> float:
    """Return the FLOPs of a square convolution for one image.

    Args:
        size: side of the output.
        kernel: side of the kernel.
        channels_in: channels of the input.
        channels_out: channels of the output.
        is_first: the input is the image, which needs no gradient, so the backward pass has only one product.
    """
    return 2.0 * size**2 * kernel**2 * channels_in * channels_out * (2 if is_first else 3)
