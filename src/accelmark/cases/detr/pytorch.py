"""DETR on COCO in PyTorch."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection, PreTrainedModel, ResNetConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from accelmark.frameworks.pytorch.model.padded_attention import with_padding
from accelmark.frameworks.pytorch.model.pretrained import load_backbone
from accelmark.frameworks.pytorch.tasks.vision.detection import Detection
from accelmark.train.tasks.image_folder import MEAN, STD, Uniform
from accelmark.train.tasks.vision.scenes import Scene, multi_scale


class Case(Detection):
    """A ResNet-50 with frozen normalization, and a Transformer that predicts a set of boxes."""

    samples = "coco"
    weights = "resnet50_weights"
    mean, std = MEAN, STD

    def network(self) -> PreTrainedModel:
        """Build DETR (Carion et al. 2020, arXiv:2005.12872); the first convolution and stage are not trained."""
        blocks = [self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)]
        resnet: Any = ResNetConfig  # its types do not mention out_features
        config = DetrConfig(
            backbone_config=resnet(depths=blocks, out_features=["stage4"]),
            d_model=self.number("hidden_size"),
            encoder_layers=self.number("encoder_layers"),
            decoder_layers=self.number("decoder_layers"),
            num_queries=self.number("num_queries"),
            auxiliary_loss=True,
        )
        config.num_labels = self.number("num_classes")
        with_padding(config)
        net = DetrForObjectDetection(config)
        backbone = self.backbone(net)
        load_backbone(backbone, self.data_dirs.get(self.weights))
        for name, parameter in backbone.named_parameters():  # transformers freezes all stages of its own ResNet
            parameter.requires_grad_("embedder" not in name and "stages.0." not in name)
        return net

    def backbone(self, net: Any) -> PreTrainedModel:
        """Return the part that starts from published weights."""
        part: PreTrainedModel = net.model.backbone.model
        return part

    def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers of encoder and decoder."""
        return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    @property
    def synthetic_size(self) -> tuple[int, int]:
        """Height and width between those of photographs with ratios of 4:3 and 3:2."""
        side = self.number("shorter_side")
        return side, round(1.42 * side)

    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return one of 11 sizes, cropped or not and flipped or not; in evaluation the largest."""
        side, longest = self.number("shorter_side"), self.number("longer_side")
        return multi_scale(scene, side, longest, uniform) if train else scene.shorter(side, longest)

    def scored(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best class of each query; the last logit is for none."""
        score, label = logits.softmax(2)[..., :-1].max(2)
        return score, label, label.new_ones(label.shape).cumsum(1) - 1
