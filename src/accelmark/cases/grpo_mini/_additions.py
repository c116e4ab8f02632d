"""Additions of two numbers of two digits, as tokens."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

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
