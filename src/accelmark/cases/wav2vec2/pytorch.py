"""wav2vec 2.0 base fine-tuned on LibriSpeech in PyTorch."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from accelmark.frameworks.pytorch.model.pretrained import initial_net
from accelmark.tasks.speech.pytorch import LETTERS, Letters, SpeechToLetters


class Case(SpeechToLetters):
    """960 hours of read books, from the published checkpoint; the convolutions stay frozen."""

    samples = "librispeech"
    weights = "wav2vec2_base"
    subsets = ("train-clean-100", "train-clean-360", "train-other-500")
    eval_subsets = ("test-clean",)
    block_class = "Wav2Vec2EncoderLayer"

    def build_model(self) -> nn.Module:
        """Build wav2vec 2.0 base (Baevski et al. 2020, arXiv:2006.11477) with its weights and a new output layer."""
        width = self.number("conv_width")
        config = Wav2Vec2Config(
            vocab_size=len(LETTERS),
            **self.dimensions(),
            conv_dim=[width] * 7,
            layerdrop=0.0,
            activation_dropout=0.1,
            apply_spec_augment=False,
        )
        new = ("lm_head", "wav2vec2.masked_spec_embed")
        net: Any = initial_net(Wav2Vec2ForCTC, config, self.data_dirs.get(self.weights), new=new)
        net.freeze_feature_encoder()
        return Letters(net, self.real("masked_time"), self.real("masked_channels"))
