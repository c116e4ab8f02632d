"""The networks of Stable Diffusion 2 (Rombach et al. 2021, arXiv:2112.10752), from named numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig

from accelmark.frameworks.pytorch.model.causal_attention import with_padding


def unet(number: Callable[[str], int]) -> nn.Module:
    """Build the UNet, with 64 channels a head."""
    widths = [number("width") * factor for factor in (1, 2, 4, 4)]
    network: Any = UNet2DConditionModel  # which is untyped
    net: nn.Module = network(
        sample_size=number("latent_size"),
        block_out_channels=widths,
        cross_attention_dim=number("text_width"),
        attention_head_dim=[width // 64 for width in widths],  # which is diffusers' name for the number of heads
        use_linear_projection=True,
    )
    return net


def text_encoder(number: Callable[[str], int]) -> CLIPTextConfig:
    """Return the configuration of the text encoder (Radford et al. 2021, arXiv:2103.00020) without its last layer."""
    width = number("text_width")
    config = CLIPTextConfig(
        vocab_size=number("vocab_size"),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=number("text_layers"),
        num_attention_heads=number("text_heads"),
        max_position_embeddings=number("text_length"),
        hidden_act="gelu",
    )
    return with_padding(config)


def autoencoder(number: Callable[[str], int]) -> nn.Module:
    """Build the autoencoder, which reduces the sides of an image to an eighth."""
    network: Any = AutoencoderKL
    net: nn.Module = network(
        sample_size=8 * number("latent_size"),
        block_out_channels=[number("autoencoder_width") * factor for factor in (1, 2, 4, 4)],
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )
    return net
