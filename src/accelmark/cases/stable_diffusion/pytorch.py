"""Stable Diffusion 2 on captioned latents in PyTorch."""

from __future__ import annotations

from typing import Any

from diffusers import UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedModel

from accelmark.frameworks.pytorch.model.padded_attention import with_padding
from accelmark.frameworks.pytorch.model.pretrained import initial_net
from accelmark.frameworks.pytorch.tasks.generation.diffusion import Diffusion


class Case(Diffusion):
    """The UNet of Stable Diffusion 2 from random weights, with the text encoder of OpenCLIP ViT-H/14."""

    samples = "laion_moments"
    weights = "openclip_text_weights"
    block_class = "BasicTransformerBlock"

    def network(self) -> nn.Module:
        """Build the UNet (Rombach et al. 2021, arXiv:2112.10752), with 64 channels a head."""
        widths = [self.number("width") * factor for factor in (1, 2, 4, 4)]
        unet: Any = UNet2DConditionModel  # which is untyped
        net: nn.Module = unet(
            sample_size=self.number("latent_size"),
            block_out_channels=widths,
            cross_attention_dim=self.number("text_width"),
            attention_head_dim=[width // 64 for width in widths],  # which is diffusers' name for the number of heads
            use_linear_projection=True,
        )
        return net

    def text_encoder(self) -> PreTrainedModel:
        """Build the text encoder (Radford et al. 2021, arXiv:2103.00020) without its last layer, with its weights."""
        width = self.number("text_width")
        config = CLIPTextConfig(
            vocab_size=self.number("vocab_size"),
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=self.number("text_layers"),
            num_attention_heads=self.number("text_heads"),
            max_position_embeddings=self.number("text_length"),
            hidden_act="gelu",
        )
        return initial_net(CLIPTextModel, with_padding(config), self.data_dirs.get(self.weights))
