"""Transformer (big) for translation from English to German in PyTorch."""

from __future__ import annotations

from typing import ClassVar

from tokenizers import Tokenizer
from transformers import MarianConfig, MarianMTModel, PreTrainedModel

from accelmark.frameworks.pytorch.model.padded_attention import with_padding
from accelmark.frameworks.pytorch.tasks.sequence_to_sequence import TextToText
from accelmark.frameworks.pytorch.tasks.text import read_tokenizer
from accelmark.train.tasks.text_files import Parallel
from accelmark.train.tasks.text_scores import Bleu


class Case(TextToText):
    """English to German from random weights; beam search with the paper's numbers is scored."""

    samples = "wmt14"
    score = Bleu(lowercase=True)
    label_smoothing = 0.1
    generation: ClassVar = {"num_beams": 4, "length_penalty": 0.6}

    def network(self) -> PreTrainedModel:
        """Build the Transformer (Vaswani et al. 2017, arXiv:1706.03762) with one embedding for both languages."""
        layers, heads, inner = self.number("num_layers"), self.number("num_heads"), self.number("intermediate_size")
        config = MarianConfig(
            vocab_size=self.number("vocab_size"),
            d_model=self.number("hidden_size"),
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=inner,
            decoder_ffn_dim=inner,
            activation_function="relu",
            dropout=0.3,
            scale_embedding=True,
            max_position_embeddings=max(self.number("source_length"), self.number("target_length")) + 1,
            init_std=self.number("hidden_size") ** -0.5,
            pad_token_id=self.pad,
            decoder_start_token_id=self.pad,
            eos_token_id=self.end,
            forced_eos_token_id=None,
        )
        with_padding(config)
        return MarianMTModel(config)

    def pairs(self, *, train: bool) -> Parallel:
        """Return the sentences of a split."""
        split = self.data_dirs[self.samples] / ("train" if train else "test")
        return Parallel([split / "text.en", split / "text.de"])

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of both languages."""
        return read_tokenizer(self.data_dirs[self.samples] / "tokenizer" / "tokenizer.json", self.number("vocab_size"))
