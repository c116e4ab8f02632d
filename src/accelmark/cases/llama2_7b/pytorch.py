"""Pretraining of Llama 2 7B in PyTorch."""

from __future__ import annotations

from torch import nn
from transformers import LlamaConfig

from accelmark.frameworks.pytorch.data.batches import FromArrays
from accelmark.frameworks.pytorch.tasks.decoder import CAUSAL, CausalLm, ChunkedNextToken
from accelmark.train.tasks.token_shards import TokenShards


class Case(ChunkedNextToken):
    """Next-token prediction on samples of ``seq_length + 1`` tokens, the last of which is only a label."""

    block_class = "LlamaDecoderLayer"

    def build_model(self) -> nn.Module:
        """Build Llama 2 7B (Touvron et al. 2023, arXiv:2307.09288); open runs may reduce its size by ``model``."""
        config = LlamaConfig(
            vocab_size=self.number("vocab_size"),
            hidden_size=self.number("hidden_size"),
            intermediate_size=self.number("intermediate_size"),
            num_hidden_layers=self.number("num_layers"),
            num_attention_heads=self.number("num_heads"),
            num_key_value_heads=self.number("num_kv_heads"),
            max_position_embeddings=self.number("seq_length"),
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation=CAUSAL,  # type: ignore[call-arg]  # an argument of every configuration
        )
        return CausalLm.initialized(config, self.place.shared_seed)

    def dataset(self, *, train: bool) -> FromArrays:
        """Return windows of ``train`` or of ``val``."""
        length, split = self.number("seq_length"), "train" if train else "val"
        return FromArrays(TokenShards(self.data_dirs["llama_tokens"], split, length + 1, length, self.vocab_size))
