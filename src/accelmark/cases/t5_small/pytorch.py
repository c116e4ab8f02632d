"""T5-small fine-tuned on CNN/DailyMail in PyTorch."""

from __future__ import annotations

from tokenizers import Tokenizer
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from accelmark.frameworks.pytorch.model.causal_attention import with_padding
from accelmark.frameworks.pytorch.model.pretrained import initial_net
from accelmark.tasks.metrics import Rouge1
from accelmark.tasks.text.pytorch import JsonLines, TextToText, read_tokenizer


class Case(TextToText):
    """Articles to highlights, from the published checkpoint; greedy summaries are scored."""

    samples = "cnn_dailymail"
    weights = "t5_small"
    score = Rouge1()
    prefix = "summarize: "

    def network(self) -> PreTrainedModel:
        """Build T5-small (Raffel et al. 2019, arXiv:1910.10683) with its weights."""
        config = T5Config(
            **self.dimensions(
                hidden_size="d_model", intermediate_size="d_ff", num_layers="num_layers", num_heads="num_heads"
            ),
            d_kv=self.number("hidden_size") // self.number("num_heads"),
        )
        config.decoder_start_token_id = self.pad
        return initial_net(T5ForConditionalGeneration, with_padding(config), self.data_dirs.get(self.weights))

    def pairs(self, *, train: bool) -> JsonLines:
        """Return the articles and highlights of a split."""
        path = self.data_dirs[self.samples] / ("train/train.jsonl" if train else "val/val.jsonl")
        return JsonLines(path, ["article", "highlights"])

    def tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer."""
        return read_tokenizer(self.data_dirs[self.weights] / "hf" / "tokenizer.json", self.number("vocab_size"))
