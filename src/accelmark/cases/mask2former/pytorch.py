"""Mask2Former on ADE20K in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, PreTrainedModel, SwinConfig

from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.pretrained import load_backbone
from accelmark.frameworks.pytorch.tasks.vision.precision import FullPrecision, sum_of_outputs
from accelmark.frameworks.pytorch.tasks.vision.segmentation import Segmentation


class Case(Segmentation):
    """A Swin-T, a decoder of pixels by deformable attention, and a Transformer that predicts a set of masks."""

    samples = "ade20k"
    weights = "swin_t_weights"
    own_rate = ("encoder", 0.1)
    block_class = "Mask2FormerMaskedAttentionDecoderLayer"

    def network(self) -> PreTrainedModel:
        """Build Mask2Former (Cheng et al. 2021, arXiv:2112.01527) for semantic segmentation."""
        width = self.number("hidden_size")
        backbone: Any = SwinConfig  # its types do not mention out_features
        config = Mask2FormerConfig(
            backbone_config=backbone(
                embed_dim=self.number("backbone_width"),
                depths=[self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)],
                num_heads=[3, 6, 12, 24],
                drop_path_rate=0.3,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            feature_size=width,
            mask_feature_size=width,
            hidden_dim=width,
            encoder_layers=self.number("encoder_layers"),
            decoder_layers=self.number("decoder_layers") + 1,  # transformers counts the prediction before the first
            num_queries=self.number("num_queries"),
            train_num_points=self.number("num_points"),
            output_auxiliary_logits=True,
        )
        config.num_labels = self.number("num_classes")
        net: Any = Mask2FormerForUniversalSegmentation(config)
        load_backbone(self.backbone(net), self.data_dirs.get(self.weights), new=("hidden_states_norms",))
        net.model.pixel_level_module.encoder.swin.layernorm.requires_grad_(False)  # whose output is not used
        net.criterion = FullPrecision(net.criterion)
        moved: PreTrainedModel = net.to(torch.get_default_device())  # one of its weights ignores the meta device
        return moved

    def backbone(self, net: Any) -> PreTrainedModel:
        """Return the part that starts from published weights."""
        part: PreTrainedModel = net.model.pixel_level_module.encoder
        return part

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the model's own loss for a mask of each class in an image, normalised by those of the rank's batch.

        On the meta device it is ``sum_of_outputs``.
        """
        if batch["image"].is_meta:
            return sum_of_outputs(model, batch["image"])
        present = [segments[segments > 0].unique() for segments in batch["segments"]]
        pairs = zip(batch["segments"], present, strict=True)
        masks = [(segments == classes[:, None, None]).float() for segments, classes in pairs]
        found = model(batch["image"], mask_labels=masks, class_labels=[classes.long() - 1 for classes in present])
        loss: Tensor = found.loss.sum()
        return loss

    def scores(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return the sum over queries of class probability times mask."""
        found = model(image)
        classes = found.class_queries_logits.softmax(2)[..., :-1]
        return torch.einsum("bqc,bqhw->bchw", classes, found.masks_queries_logits.sigmoid())
