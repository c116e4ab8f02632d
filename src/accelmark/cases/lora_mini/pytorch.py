"""Low-rank adaptation of the trained small Llama to plays in capital letters, in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from accelmark.cases import llama_mini
from accelmark.cases.llama_mini.pytorch import Case as Pretraining
from accelmark.frameworks.pytorch.model.linear import adapt
from accelmark.infer.weights import load_weights

_WEIGHTS: Final = Path(llama_mini.__path__[0]) / "weights.safetensors"
_ADAPTED: Final = (("qkv",), ("out",), ("gate_up",), ("down",))
_A, _Z, _TO_CAPITAL = ord("a"), ord("z"), ord("A") - ord("a")


def in_capitals(text: Tensor) -> Tensor:
    """Return bytes with the letters a to z replaced by capitals."""
    return torch.where((text >= _A) & (text <= _Z), text + _TO_CAPITAL, text)


class Case(Pretraining):
    """The small Llama, frozen, with low-rank changes of all linear layers of its blocks."""

    def build_model(self) -> nn.Module:
        """Build the decoder with the packaged weights and unchanged outputs."""
        model = super().build_model()
        if self.settings.model["pretrained"] and torch.get_default_device().type != "meta":
            load_weights(model, _WEIGHTS)
        alpha = float(self.settings.model["lora_alpha"] or 0)
        adapt(model, _ADAPTED, self.number("lora_rank"), alpha, dropout=0.0)
        return model

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the windows of ``llama_mini`` in capital letters."""
        return {name: in_capitals(text) for name, text in super().dataset(train=train).items()}
