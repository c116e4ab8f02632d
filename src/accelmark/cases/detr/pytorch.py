"""DETR on COCO in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

from transformers import DetrConfig, DetrForObjectDetection, PreTrainedModel, ResNetConfig

from accelmark.frameworks.pytorch.model.causal_attention import with_padding
from accelmark.frameworks.pytorch.model.pretrained import backbone_config
from accelmark.tasks.detection.pytorch import Detection, Scene, multi_scale
from accelmark.tasks.images.data import Uniform


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


class Case(Detection):
    """A ResNet-50 with frozen normalization, and a Transformer that predicts a set of boxes."""

    samples = "coco"
    weights = "resnet50_weights"
    backbone_name = "model.backbone.model"
    block_class = "GradientCheckpointingLayer"

    def network(self) -> PreTrainedModel:
        """Build DETR (Carion et al. 2020, arXiv:2005.12872); the first convolution and stage are not trained."""
        net = detector(self.number, auxiliary_loss=True)
        backbone = self.with_weights(net)
        for name, parameter in backbone.named_parameters():  # transformers freezes all stages of its own ResNet
            parameter.requires_grad_("embedder" not in name and "stages.0." not in name)
        return net

    @property
    def synthetic_size(self) -> tuple[int, int]:
        """Height and width between those of photographs with ratios of 4:3 and 3:2."""
        side = self.number("shorter_side")
        return side, round(1.42 * side)

    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return one of 11 sizes, cropped or not and flipped or not; in evaluation the largest."""
        side, longest = self.number("shorter_side"), self.number("longer_side")
        return multi_scale(scene, side, longest, uniform) if train else scene.shorter(side, longest)
