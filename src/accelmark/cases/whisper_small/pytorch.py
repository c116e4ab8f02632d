"""Whisper small fine-tuned on LibriSpeech in PyTorch."""

from __future__ import annotations

from transformers import PreTrainedModel, WhisperConfig, WhisperForConditionalGeneration

from accelmark.frameworks.pytorch.model.padded_attention import with_padding
from accelmark.frameworks.pytorch.model.pretrained import initial_net
from accelmark.frameworks.pytorch.tasks.spectra import END, START, SpeechToText


class Case(SpeechToText):
    """100 hours of read books, from the published checkpoint; greedy transcripts are scored."""

    samples = "librispeech"
    weights = "whisper_weights"
    subsets = ("train-clean-100",)
    eval_subsets = ("test-clean",)

    def network(self) -> PreTrainedModel:
        """Build Whisper small (Radford et al. 2022, arXiv:2212.04356, table 1) with its weights."""
        width, layers, heads = self.number("hidden_size"), self.number("num_layers"), self.number("num_heads")
        config = WhisperConfig(
            vocab_size=self.number("vocab_size"),
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
        return initial_net(WhisperForConditionalGeneration, with_padding(config), self.data_dirs.get(self.weights))
