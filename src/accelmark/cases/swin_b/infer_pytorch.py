"""Inference of Swin-B on ImageNet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from accelmark.infer.imagenet import ImageNetCase


class Case(ImageNetCase):
    """The network of Liu et al. 2021 (arXiv:2103.14030, section 3.3), with weights of transformers' format.

    They are those of microsoft/swin-base-patch4-window7-224.
    """

    network_class = "SwinForImageClassification"
    arguments: ClassVar = {
        "image_size": "image_size",
        "embed_dim": "hidden_size",
        "depths": [f"stage{stage}_blocks" for stage in (1, 2, 3, 4)],
    }
    config_values: ClassVar = {"num_heads": [4, 8, 16, 32]}

    def export_model(self, model: nn.Module, example: Sequence[Tensor], path: Path) -> None:
        """Write the model as ONNX, with attention as products: PyTorch's exporter fails on the fused one of windows."""
        net: Any = model.net
        fused = net.config._attn_implementation
        net.set_attn_implementation("eager")
        try:
            super().export_model(model, example, path)
        finally:
            net.set_attn_implementation(fused)
