"""Whisper small fine-tuned on LibriSpeech in PyTorch."""

from __future__ import annotations

from transformers import PreTrainedModel, WhisperForConditionalGeneration

from accelmark.cases.whisper_small._network import whisper
from accelmark.frameworks.pytorch.model.pretrained import initial_net
from accelmark.tasks.speech.pytorch import SpeechToText


class Case(SpeechToText):
    """100 hours of read books, from the published checkpoint; greedy transcripts are scored."""

    samples = "librispeech"
    weights = "whisper_weights"
    subsets = ("train-clean-100",)
    eval_subsets = ("test-clean",)

    def network(self) -> PreTrainedModel:
        """Build Whisper small with its weights."""
        return initial_net(WhisperForConditionalGeneration, whisper(self.number), self.data_dirs.get(self.weights))
