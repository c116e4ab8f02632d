"""DETR on COCO in PyTorch."""

from __future__ import annotations

from transformers import PreTrainedModel

from accelmark.cases.detr._network import detector
from accelmark.tasks.detection.data import Scene, multi_scale
from accelmark.tasks.detection.pytorch import Detection
from accelmark.tasks.images.data import Uniform


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
