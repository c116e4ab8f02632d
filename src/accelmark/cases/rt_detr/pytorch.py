"""RT-DETR on COCO in PyTorch."""

from __future__ import annotations

from transformers import PreTrainedModel, RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

from accelmark.frameworks.pytorch.model.pretrained import backbone_config
from accelmark.tasks.detection.pytorch import Detection, Scene, distorted
from accelmark.tasks.images.data import Uniform


class Case(Detection):
    """A ResNet-50-vd, a hybrid encoder, and a decoder whose queries are chosen among the encoder's outputs."""

    samples = "coco"
    weights = "resnet50_vd_weights"
    backbone_name = "model.backbone.model"
    mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    scales = range(15, 26)
    independent_classes = True

    def network(self) -> PreTrainedModel:
        """Build RT-DETR-R50 (Zhao et al. 2023, arXiv:2304.08069)."""
        width = self.number("hidden_size")
        config = RTDetrConfig(
            backbone_config=backbone_config(
                RTDetrResNetConfig,
                depths=[self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)],
                out_features=["stage2", "stage3", "stage4"],
            ),
            encoder_hidden_dim=width,
            encoder_ffn_dim=4 * width,
            d_model=width,
            decoder_in_channels=[width] * 3,
            decoder_ffn_dim=4 * width,
            decoder_layers=self.number("decoder_layers"),
            num_queries=self.number("num_queries"),
            anchor_image_size=None,
        )
        config.num_labels = self.number("num_classes")
        net = RTDetrForObjectDetection(config)
        self.with_weights(net)
        return net

    def changed(self, scene: Scene, uniform: Uniform, *, train: bool) -> Scene:
        """Return a square, in training with other colours, crops and flips."""
        size = self.number("image_size")
        return distorted(scene, size, uniform) if train else scene.resized(size, size)
