"""Stable Diffusion 2 on captioned latents in PyTorch."""

from __future__ import annotations

from torch import nn
from transformers import CLIPTextModel, PreTrainedModel

from accelmark.cases.stable_diffusion import _network
from accelmark.frameworks.pytorch.model.pretrained import initial_net
from accelmark.tasks.generation.pytorch import Diffusion


class Case(Diffusion):
    """The UNet of Stable Diffusion 2 from random weights, with the text encoder of OpenCLIP ViT-H/14."""

    samples = "laion_moments"
    weights = "openclip_text_weights"
    block_class = "BasicTransformerBlock"

    def network(self) -> nn.Module:
        """Build the UNet."""
        return _network.unet(self.number)

    def text_encoder(self) -> PreTrainedModel:
        """Build the text encoder with its weights."""
        return initial_net(CLIPTextModel, _network.text_encoder(self.number), self.data_dirs.get(self.weights))
