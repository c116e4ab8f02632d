"""Group relative policy optimization of a small Llama on additions, in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from accelmark.cases.grpo_mini._additions import ANSWER_LENGTH, END, SIGNS, additions
from accelmark.cases.llama_mini._model import LlamaMini
from accelmark.infer.weights import load_weights
from accelmark.tasks.reinforcement.pytorch import Grpo

WEIGHTS: Final = Path(__file__).with_name("weights.safetensors")
"""The initial policy, written by ``_pretrain.py``."""


def policy(hidden: int = 64, intermediate: int = 128, layers: int = 2, heads: int = 4) -> LlamaMini:
    """Return the policy with random weights."""
    length = len("37+48=") + ANSWER_LENGTH
    return LlamaMini(
        vocab=len(SIGNS), hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, length=length
    )


class Case(Grpo):
    """Additions of two numbers of two digits; the answer is right or wrong."""

    end_token = END
    block_class = "Layer"

    def build_policy(self) -> nn.Module:
        """Build the policy with the packaged weights; open runs that change its size start from random ones."""
        names = ("hidden_size", "intermediate_size", "num_layers", "num_heads")
        model = policy(*(self.number(name) for name in names))
        if self.settings.model["pretrained"] and torch.get_default_device().type != "meta":
            load_weights(model, WEIGHTS)
        return model

    def problems(self, *, train: bool) -> Mapping[str, Tensor]:
        """Return all pairs, or the held-out tenth of them."""
        return additions(held_out=not train)
