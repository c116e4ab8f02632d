"""Samples of masked-token prediction for BERT's vocabulary."""

from __future__ import annotations

from typing import Final, final

import numpy as np

from accelmark.train.tasks.arrays import Arrays
from accelmark.train.tasks.metrics import IGNORED
from accelmark.train.tasks.token_shards import TokenShards

CLS: Final = 101
SEP: Final = 102
MASK: Final = 103
"""Token ids of ``bert-large-uncased``'s vocabulary; 0 is padding."""
_SPECIAL: Final = (0, CLS, SEP, MASK)
_MASKED_SHARE: Final = 0.15


@final
class MaskedWindows:
    """``[CLS] window [SEP]`` with 15 % of the window's tokens to predict, at most ``max_predictions`` of them.

    Of those, 80 % are replaced by ``[MASK]``, 10 % by a random token, and 10 % are unchanged (Devlin et al. 2018,
    arXiv:1810.04805, section 3.1).
    """

    def __init__(self, shards: TokenShards, max_predictions: int, vocab_size: int) -> None:
        self._shards, self._max_predictions, self._vocab_size = shards, max_predictions, vocab_size

    def __len__(self) -> int:
        return len(self._shards)

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return ``tokens`` (length,), and ``positions`` and ``labels`` (predictions,), padded with ignored entries."""
        tokens = np.concatenate(([CLS], self._shards.window(index), [SEP]))
        candidates = np.flatnonzero(np.isin(tokens, _SPECIAL, invert=True))
        wanted = min(self._max_predictions, max(1, round(len(tokens) * _MASKED_SHARE)), len(candidates))
        chosen = np.sort(random.choice(candidates, wanted, replace=False))
        truth = tokens[chosen]
        fate = random.random(wanted)
        guess = random.integers(len(_SPECIAL), self._vocab_size, wanted)
        tokens[chosen] = np.where(fate < 0.8, MASK, np.where(fate < 0.9, guess, truth))
        spare = (0, self._max_predictions - wanted)
        labels = np.pad(truth, spare, constant_values=IGNORED)
        return {"tokens": tokens, "positions": np.pad(chosen, spare), "labels": labels}
