"""Group relative policy optimization of a small Llama on additions, in PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.cases.llama_mini.pytorch import LlamaMini
from accelmark.infer.weights import load_weights
from accelmark.tasks.reinforcement.pytorch import Grpo

WEIGHTS: Final = Path(__file__).with_name("weights.safetensors")
"""The initial policy, written by ``main``."""


SIGNS: Final = "0123456789+=$"
"""Token -> sign; the last one ends an answer."""
END: Final = SIGNS.index("$")
ANSWER_LENGTH: Final = 4
"""Up to three digits, and the end."""
_HELD_OUT_EVERY: Final = 10


def additions(*, held_out: bool) -> dict[str, Tensor]:
    """Return ``prompt`` ("37+48=") and ``answer`` ("85$$") of the held-out tenth of all pairs, or of the others."""
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = [pairs[index] for place, index in enumerate(order) if (place % _HELD_OUT_EVERY == 0) == held_out]
    return {
        "prompt": _tokens([f"{left}+{right}=" for left, right in chosen]),
        "answer": _tokens([str(left + right).ljust(ANSWER_LENGTH, "$") for left, right in chosen]),
    }


def _tokens(texts: list[str]) -> Tensor:
    return torch.tensor([[SIGNS.index(sign) for sign in text] for text in texts], dtype=torch.uint8)


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


def main() -> None:
    """Train the initial policy on written-out additions, until it solves about half of the held-out ones.

    ``python -m accelmark.cases.grpo_mini.pytorch CASE_DIR`` writes ``weights.safetensors``.
    """
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data = policy(), additions(held_out=False)
    texts = torch.cat((data["prompt"], data["answer"]), 1).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    for step in range(450):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        tokens = texts[torch.randint(len(texts), (128,))]
        logits = model(tokens[:, :-1])[:, -ANSWER_LENGTH:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, -ANSWER_LENGTH:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    save_file(model.state_dict(), Path(sys.argv[1]) / WEIGHTS.name)


if __name__ == "__main__":
    main()
