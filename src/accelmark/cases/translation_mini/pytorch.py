"""A small Transformer that translates the names of languages in PyTorch."""

from __future__ import annotations

from tokenizers import Tokenizer
from transformers import MarianConfig, MarianMTModel, PreTrainedModel

from accelmark.cases.translation_mini._names import Names, characters, read_names, split_names
from accelmark.frameworks.pytorch.model.padded_attention import with_padding
from accelmark.frameworks.pytorch.tasks.sequence_to_sequence import TextToText
from accelmark.train.tasks.text_scores import CharacterErrors


class Case(TextToText):
    """English to Ukrainian, character by character, from random weights; greedy translations are scored."""

    samples = "iso_codes"
    score = CharacterErrors()
    label_smoothing = 0.1

    def network(self) -> PreTrainedModel:
        """Build the architecture of the case ``transformer`` with fewer and narrower layers."""
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
            dropout=0.1,
            scale_embedding=True,
            max_position_embeddings=self.number("target_length") + 1,
            init_std=self.number("hidden_size") ** -0.5,
            pad_token_id=self.pad,
            decoder_start_token_id=self.pad,
            eos_token_id=self.end,
            forced_eos_token_id=None,
        )
        with_padding(config)
        return MarianMTModel(config)

    def pairs(self, *, train: bool) -> Names:
        """Return the names of a split."""
        return split_names(self._names(), held_out=not train)

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer with a token for each character."""
        return characters(self._names())

    def _names(self) -> list[tuple[str, str]]:
        return read_names(self.data_dirs[self.samples], self.number("target_length") - 1)
