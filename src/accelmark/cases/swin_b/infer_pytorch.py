"""Inference of Swin-B on ImageNet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import SwinConfig, SwinForImageClassification

from accelmark.infer.imagenet import ImageNetCase
from accelmark.infer.weights import pretrained


class Case(ImageNetCase):
    """ImageNet classification with weights of microsoft/swin-base-patch4-window7-224 in transformers' format."""

    def create_model(self) -> nn.Module:
        """Build the network (Liu et al. 2021, arXiv:2103.14030, section 3.3), with weights from the data directory."""
        config = SwinConfig(
            image_size=self.number("image_size"),
            embed_dim=self.number("hidden_size"),
            depths=[self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)],
            num_heads=[4, 8, 16, 32],
        )
        config.num_labels = self.number("num_classes")
        return pretrained(self, SwinForImageClassification(config))

    def export_model(self, model: nn.Module, example: Sequence[Tensor], path: Path) -> None:
        """Write the model as ONNX, with attention as products: PyTorch's exporter fails on the fused one of windows."""
        net: Any = model.net
        fused = net.config._attn_implementation
        net.set_attn_implementation("eager")
        try:
            super().export_model(model, example, path)
        finally:
            net.set_attn_implementation(fused)
