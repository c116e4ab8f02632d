"""Mask2Former on ADE20K in PyTorch."""

from __future__ import annotations

from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, PreTrainedModel, SwinConfig

from accelmark.frameworks.pytorch.model.pretrained import backbone_config
from accelmark.tasks.segmentation.pytorch import MaskClassification


class Case(MaskClassification):
    """A Swin-T, a decoder of pixels by deformable attention, and a Transformer that predicts a set of masks."""

    samples = "ade20k"
    weights = "swin_t_weights"
    block_class = "Mask2FormerMaskedAttentionDecoderLayer"

    def network(self) -> PreTrainedModel:
        """Build Mask2Former (Cheng et al. 2021, arXiv:2112.01527) for semantic segmentation."""
        width = self.number("hidden_size")
        config = Mask2FormerConfig(
            backbone_config=backbone_config(
                SwinConfig,
                embed_dim=self.number("backbone_width"),
                depths=[self.number(f"stage{stage}_blocks") for stage in (1, 2, 3, 4)],
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
        net = Mask2FormerForUniversalSegmentation(config)
        backbone = self.with_weights(net, new=("hidden_states_norms",))
        backbone.swin.layernorm.requires_grad_(False)  # whose output is not used
        return net
