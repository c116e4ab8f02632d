"""Speech recognition from log-mel spectra, as Whisper does it (Radford et al. 2022, arXiv:2212.04356)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, final

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import WhisperFeatureExtractor

from accelmark.frameworks.pytorch.tasks.sequence_to_sequence import SequenceToSequence
from accelmark.frameworks.pytorch.tasks.text import read_tokenizer
from accelmark.train.tasks.metrics import IGNORED
from accelmark.train.tasks.recordings import RATE_HZ, Recordings
from accelmark.train.tasks.text.scores import WordErrors

END: Final = 50257
START: Final = 50258
"""Tokens of the multilingual models."""
BANDS: Final = 80
FRAMES: Final = 3000
"""Bands of a spectrum, and frames in 30 s."""


@final
class Spectra:
    """Log-mel spectra of 30 s; longer recordings are cut off."""

    def __init__(self, recordings: Recordings) -> None:
        self._recordings = recordings
        extractor: Any = WhisperFeatureExtractor
        self._spectrum = extractor(sampling_rate=RATE_HZ)

    def __len__(self) -> int:
        return len(self._recordings)

    def read(self, index: int) -> Tensor:
        """Return the spectrum of a recording, (80, 3000)."""
        audio = self._recordings.audio(index) / 32768
        found: Tensor = self._spectrum(audio, sampling_rate=RATE_HZ, return_tensors="pt")["input_features"][0]
        return found


@final
class LoggedSpeech:
    """Log-mel spectra with the tokens of their transcripts in lower case."""

    def __init__(self, recordings: Recordings, tokenizer: Tokenizer, prompt: Sequence[int], length: int) -> None:
        self._recordings, self._tokenizer, self._prompt, self._length = recordings, tokenizer, prompt, length
        self._spectra = Spectra(recordings)

    def __len__(self) -> int:
        return len(self._recordings)

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``source`` of shape (80, 3000), ``target`` and ``index``."""
        text = self._tokenizer.encode(self._recordings.row(index)[0].lower(), add_special_tokens=False).ids
        tokens = [*self._prompt, *text, END][: self._length]
        target = torch.tensor(tokens + [IGNORED] * (self._length - len(tokens)))
        return {"source": self._spectra.read(index), "target": target, "index": torch.tensor(index)}


class SpeechToText(SequenceToSequence):
    """English recordings to text with a multilingual Whisper; ``target_length`` under ``model`` is in tokens."""

    samples: ClassVar[str]
    """Name of the data set of recordings."""
    weights: ClassVar[str]
    """Name of the data set with the checkpoint and its tokenizer, in its folder ``hf``."""
    subsets: ClassVar[Sequence[str]]
    eval_subsets: ClassVar[Sequence[str]]
    score = WordErrors(plain=True)
    prompt = (50259, 50359, 50363)
    """English, transcribe, no timestamps."""

    def dataset(self, *, train: bool) -> LoggedSpeech:
        """Return the recordings of the training or the evaluation subsets."""
        recordings = Recordings(self.data_dirs[self.samples], self.subsets if train else self.eval_subsets)
        path = self.data_dirs[self.weights] / "hf" / "tokenizer.json"
        tokenizer = read_tokenizer(path, self.number("vocab_size"))
        if not train:
            self.scored_against(recordings, tokenizer)
        return LoggedSpeech(recordings, tokenizer, self.prompt, self.number("target_length"))

    def synthetic_source(self, size: int, random: torch.Generator) -> Tensor:
        """Return random spectra."""
        return torch.rand(size, BANDS, FRAMES, generator=random) * 2 - 1
