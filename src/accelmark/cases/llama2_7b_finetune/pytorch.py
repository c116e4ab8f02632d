"""Fine-tuning of Llama 2 7B on summaries of dialogues in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Final

from torch import Tensor
from transformers import LlamaConfig

from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.tasks.language.pytorch_decoder import LowRankTuning, packed_rows
from accelmark.tasks.text.pytorch import read_tokenizer

_PROMPT: Final = "Summarize this dialog:\n{dialogue}\n---\nSummary:\n{summary}</s>"


def dialogues(file: Path) -> Sequence[str]:
    """Return the dialogues of SAMSum (Gliwa et al. 2019, arXiv:1911.12237) with their summaries.

    Raises DataError: the file is missing or has another layout.
    """
    with raising(DataError, f"{file}: is not a part of SAMSum, a list of dialogues with summaries", *UNREADABLE):
        entries = json.loads(file.read_text(encoding="utf-8"))
        return [_PROMPT.format(dialogue=entry["dialogue"], summary=entry["summary"]) for entry in entries]


class Case(LowRankTuning):
    """Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288) with changes of the projections of queries and values."""

    config_class = LlamaConfig
    config_values: ClassVar = {"max_position_embeddings": 4096}
    adapted = (("q_proj",), ("v_proj",))
    weights = "llama2_7b_weights"

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return rows of packed dialogues and summaries."""
        file = self.data_dirs["samsum"] / "corpus" / ("train.json" if train else "val.json")
        tokenizer = read_tokenizer(self.data_dirs["llama2_7b_weights"] / "hf" / "tokenizer.json", self.vocab_size)
        return {"tokens": packed_rows(dialogues(file), tokenizer, self.number("seq_length") + 1, file)}
