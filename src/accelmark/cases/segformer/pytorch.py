"""SegFormer-B0 on ADE20K in PyTorch."""

from __future__ import annotations

from transformers import PreTrainedModel, SegformerConfig, SegformerForSemanticSegmentation

from accelmark.frameworks.pytorch.model.pretrained import initial_net
from accelmark.tasks.segmentation.pytorch import Segmentation


class Case(Segmentation):
    """A hierarchical Transformer from published weights, and a head of linear layers."""

    samples = "ade20k"
    weights = "mit_b0"
    own_rate = ("decode_head", 10.0)
    block_class = "SegformerLayer"

    def network(self) -> PreTrainedModel:
        """Build SegFormer-B0 (Xie et al. 2021, arXiv:2105.15203) with the weights of its encoder."""
        width = self.number("hidden_size")
        config = SegformerConfig(
            depths=[self.number("stage_blocks")] * 4,
            hidden_sizes=[width, 2 * width, 5 * width, 8 * width],
            decoder_hidden_size=8 * width,
        )
        config.num_labels = self.number("num_classes")
        new = ("decode_head",)
        return initial_net(SegformerForSemanticSegmentation, config, self.data_dirs.get(self.weights), new=new)
