"""DETR's network, and its detections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

from accelmark.frameworks.pytorch.model.padded_attention import with_padding


def detector(number: Callable[[str], int], *, auxiliary_loss: bool = False) -> DetrForObjectDetection:
    """Build DETR (Carion et al. 2020, arXiv:2005.12872) from named numbers."""
    blocks = [number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)]
    resnet: Any = ResNetConfig  # its types do not mention out_features
    config = DetrConfig(
        backbone_config=resnet(depths=blocks, out_features=["stage4"]),
        d_model=number("hidden_size"),
        encoder_layers=number("encoder_layers"),
        decoder_layers=number("decoder_layers"),
        num_queries=number("num_queries"),
        auxiliary_loss=auxiliary_loss,
    )
    config.num_labels = number("num_classes")
    with_padding(config)
    return DetrForObjectDetection(config)


def best_classes(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return score, class and number of each query; the last logit is for none."""
    score, label = logits.softmax(2)[..., :-1].max(2)
    return score, label, label.new_ones(label.shape).cumsum(1) - 1
