"""Whisper's configuration."""

from __future__ import annotations

from collections.abc import Callable

from transformers import WhisperConfig

from accelmark.frameworks.pytorch.model.causal_attention import with_padding
from accelmark.tasks.speech.pytorch import END, START


def whisper(number: Callable[[str], int]) -> WhisperConfig:
    """Return the configuration of Whisper (Radford et al. 2022, arXiv:2212.04356, table 1) from named numbers."""
    width, layers, heads = number("hidden_size"), number("num_layers"), number("num_heads")
    config = WhisperConfig(
        vocab_size=number("vocab_size"),
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        decoder_start_token_id=START,
        pad_token_id=END,
        bos_token_id=END,
        eos_token_id=END,
    )
    return with_padding(config)
