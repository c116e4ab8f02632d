"""Fine-tuning of Llama 2 7B on summaries of dialogues in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from transformers import LlamaConfig

from accelmark.cases.llama2_7b_finetune._samsum import packed_rows
from accelmark.frameworks.pytorch.tasks.fine_tuning import LowRankTuning


class Case(LowRankTuning):
    """Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288) with changes of the projections of queries and values."""

    config_class = LlamaConfig
    config_values: ClassVar = {"max_position_embeddings": 4096}
    adapted = (("q_proj",), ("v_proj",))
    weights = "llama2_7b_weights"

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return rows of packed dialogues and summaries."""
        file = self.data_dirs["samsum"] / "corpus" / ("train.json" if train else "val.json")
        tokenizer = self.data_dirs["llama2_7b_weights"] / "hf" / "tokenizer.json"
        return {"tokens": packed_rows(file, tokenizer, self.number("seq_length") + 1)}
