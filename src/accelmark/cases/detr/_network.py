"""DETR's network."""

from __future__ import annotations

from collections.abc import Callable

from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

from accelmark.frameworks.pytorch.model.causal_attention import with_padding
from accelmark.frameworks.pytorch.model.pretrained import backbone_config


def detector(number: Callable[[str], int], *, auxiliary_loss: bool = False) -> DetrForObjectDetection:
    """Build DETR (Carion et al. 2020, arXiv:2005.12872) from named numbers."""
    blocks = [number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)]
    config = DetrConfig(
        backbone_config=backbone_config(ResNetConfig, depths=blocks, out_features=["stage4"]),
        d_model=number("hidden_size"),
        encoder_layers=number("encoder_layers"),
        decoder_layers=number("decoder_layers"),
        num_queries=number("num_queries"),
        auxiliary_loss=auxiliary_loss,
    )
    config.num_labels = number("num_classes")
    with_padding(config)
    return DetrForObjectDetection(config)
