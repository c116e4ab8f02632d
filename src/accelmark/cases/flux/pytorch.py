"""FLUX.1 schnell on encoded CC12M in PyTorch."""

from __future__ import annotations

from typing import Any

from diffusers import FluxTransformer2DModel
from torch import nn

from accelmark.tasks.generation.pytorch import FLOW_CHANNELS, FlowMatching, initialize_flux

_BLOCKS = ("FluxTransformerBlock", "FluxSingleTransformerBlock")


class Case(FlowMatching):
    """The transformer of FLUX.1 schnell from random weights, as in MLPerf Training."""

    samples = "flux_encodings"

    def network(self) -> nn.Module:
        """Build the transformer; rotations of a head are for 1/8 the text's and for 7/16 each rows and columns."""
        head = self.number("head_dim")
        place = head * 7 // 32 * 2
        transformer: Any = FluxTransformer2DModel  # which is untyped
        net: nn.Module = transformer(
            in_channels=4 * FLOW_CHANNELS,
            num_layers=self.number("double_layers"),
            num_single_layers=self.number("single_layers"),
            attention_head_dim=head,
            num_attention_heads=self.number("num_heads"),
            joint_attention_dim=self.number("text_width"),
            pooled_projection_dim=self.number("pooled_width"),
            axes_dims_rope=(head - 2 * place, place, place),
        )
        initialize_flux(net)
        return net

    def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks of two streams and of one."""
        return [module for module in model.modules() if type(module).__name__ in _BLOCKS]
