"""Mask windows of tokens as in BERT's pretraining (Devlin et al. 2018, arXiv:1810.04805, section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

import torch
from torch import Tensor
from torch.nn import functional

from accelmark.frameworks.pytorch.tasks.language_modelling import IGNORED
from accelmark.frameworks.pytorch.tasks.token_shards import TokenShards

CLS: Final = 101
SEP: Final = 102
MASK: Final = 103
"""Token ids of ``bert-large-uncased``'s vocabulary; 0 is padding."""
MASKED_SHARE: Final = 0.15
_SPECIAL: Final = torch.tensor([0, CLS, SEP, MASK])


@final
class MaskedWindows:
    """``[CLS] window [SEP]`` with 15 % of the window's tokens to predict, at most ``max_predictions`` of them.

    Of those, 80 % are replaced by ``[MASK]``, 10 % by a random token, and 10 % are unchanged.
    """

    def __init__(self, shards: TokenShards, max_predictions: int, vocab_size: int) -> None:
        self._shards, self._max_predictions, self._vocab_size = shards, max_predictions, vocab_size

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``tokens`` (length,), and ``positions`` and ``labels`` (predictions,), padded with ignored entries."""
        tokens = functional.pad(self._shards.window(index), (1, 1))
        tokens[0], tokens[-1] = CLS, SEP
        candidates = torch.isin(tokens, _SPECIAL, invert=True).nonzero().flatten()
        wanted = min(self._max_predictions, max(1, round(len(tokens) * MASKED_SHARE)), len(candidates))
        chosen = candidates[torch.randperm(len(candidates), generator=random)[:wanted]].sort().values
        truth = tokens[chosen].clone()
        fate = torch.rand(wanted, generator=random)
        guess = torch.randint(len(_SPECIAL), self._vocab_size, (wanted,), generator=random)
        tokens[chosen] = torch.where(fate < 0.8, MASK, torch.where(fate < 0.9, guess, truth))
        spare = self._max_predictions - wanted
        return {
            "tokens": tokens,
            "positions": functional.pad(chosen, (0, spare)),
            "labels": functional.pad(truth, (0, spare), value=IGNORED),
        }
