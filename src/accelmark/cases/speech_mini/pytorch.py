"""Speech recognition on the recorded prompts of a telephone system in PyTorch."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from accelmark.spec.errors import DataError, raising
from accelmark.tasks.metrics import ErrorRate
from accelmark.tasks.speech.pytorch import FULL_SCALE, LETTERS, Recordings, SpeechToLetters, read_audio, spans

TRANSCRIPTS: Final = "core-sounds-en.txt"
RATE_HZ: Final = 8_000
_HELD_OUT: Final = 8
"""One of this many transcripts is held out."""
_DIGITS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_SPOKEN: Final = {**{str(digit): word for digit, word in enumerate(_DIGITS)}, "*": "star", "#": "pound"}
_Samples = npt.NDArray[np.int16]


def spoken(transcript: str) -> str | None:
    """Return the words that are said, in lower case: no remarks in brackets, digits and signs of the keypad as words.

    None where there are none, or a number of several digits, which has several readings.
    """
    text = re.sub(r"\[[^]]*\]|\([^)]*\)|<[^>]*>", " ", transcript.lower())
    text = re.sub(r"\b\d\b|[*#]", lambda match: f" {_SPOKEN[match[0]]} ", text)
    words = re.sub(r"[^a-z0-9' ]", " ", text).split()
    return None if not words or re.search(r"\d", text) else " ".join(words)


def read_transcripts(directory: Path) -> Mapping[str, str]:
    """Return the words of each prompt by its name; raise DataError where the list is not readable."""
    path = directory / TRANSCRIPTS
    with raising(DataError, f"{path}: is not a readable list of transcripts", OSError, UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8").splitlines()
    parts = (line.partition(":") for line in lines if not line.startswith(";"))
    transcripts = {name.strip(): spoken(text) for name, _, text in parts}
    return {name: text for name, text in transcripts.items() if text}


class Prompts(Recordings):
    """The prompts of a split that have recordings, sorted.

    One in eight transcripts is held out, by its SHA-256: no text is in both splits. In training, an utterance is
    several prompts one after another, each at 0.9 to 1.1 times its speed: first that of the index, then random ones.
    """

    rate_hz = RATE_HZ

    def __init__(self, recordings: Path, transcripts: Mapping[str, str], *, train: bool) -> None:
        texts = {recordings / f"{name}.wav": transcripts[name] for name in sorted(transcripts)}
        self._utterances = [(path, text) for path, text in texts.items() if path.is_file() and _held_out(text) != train]
        if not self._utterances:
            raise DataError(f"{recordings}: expected recordings such as {next(iter(texts), 'hello.wav')}, found none")
        self._train = train

    def utterance(self, index: int, most_s: float, seed: int) -> tuple[_Samples, str]:
        """Return a held-out prompt, or in training several of at most ``most_s`` seconds together."""
        most, random = round(most_s * RATE_HZ), np.random.default_rng(seed)
        audio, texts = self._read(index, random), [*self.row(index)]
        if len(audio) > most:
            raise DataError(f"{self.where(index)}: lasts {len(audio) / RATE_HZ:.1f} s; expected at most {most_s:g} s")
        while self._train:
            other = int(random.integers(len(self)))
            following = self._read(other, random)
            if len(audio) + len(following) > most:
                break
            audio = np.concatenate([audio, following])
            texts += self.row(other)
        return audio, " ".join(texts)

    def _read(self, index: int, random: np.random.Generator) -> _Samples:
        audio = read_audio(self.where(index), RATE_HZ)
        if not self._train:
            return audio
        places = np.arange(0, len(audio) - 1, random.uniform(0.9, 1.1))
        changed: _Samples = np.interp(places, np.arange(len(audio)), audio).astype(np.int16)
        return changed


def _held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % _HELD_OUT == 0


_WINDOW: Final = 200
_HOP: Final = 80
"""Samples: 25 and 10 ms."""
_FFT: Final = 256
_BANDS: Final = 40
_TIME_SPAN: Final = 20
_BAND_SPAN: Final = 6


class Block(nn.Module):
    """A convolution over time of each channel, then two layers for each frame (Liu et al. 2022, arXiv:2201.03545)."""

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return frames of shape (batch, frames, width)."""
        heard = self.over_time(hidden.transpose(1, 2)).transpose(1, 2)
        changed: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm(heard)))))
        return hidden + changed


class Acoustic(nn.Module):
    """Log-mel spectra, two convolutions to a quarter of the frames, blocks, and logits of letters.

    In training, spans of frames and bands are silenced (SpecAugment; Park et al. 2019, arXiv:1904.08779).
    """

    window: Tensor
    filters: Tensor

    def __init__(
        self, width: int, num_layers: int, kernel: int, dropout: float, time_share: float, band_share: float
    ) -> None:
        super().__init__()
        self._shares = time_share, band_share
        bank = mel_filter_bank(_FFT // 2 + 1, _BANDS, 60.0, RATE_HZ / 2, RATE_HZ)
        self.register_buffer("filters", torch.tensor(bank.T, dtype=torch.float32), persistent=False)
        self.register_buffer("window", torch.hann_window(_WINDOW), persistent=False)
        self.level = nn.BatchNorm1d(_BANDS, affine=False)
        self.first = nn.Conv1d(_BANDS, width, 5, stride=2, padding=2)
        self.second = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(Block(width, kernel, dropout) for _ in range(num_layers)))
        self.norm, self.letters = nn.LayerNorm(width), nn.Linear(width, len(LETTERS))

    def forward(self, audio: Tensor) -> Tensor:
        """Return logits of shape (batch, frames, letters) for int16 recordings of shape (batch, samples)."""
        spectrum = self._spectrum(audio)
        if self.training:
            batch, bands, frames = spectrum.shape
            times = spans((batch, frames), self._shares[0], _TIME_SPAN, audio.device)[:, None]
            silent = spans((batch, bands), self._shares[1], _BAND_SPAN, audio.device)[..., None]
            spectrum = spectrum.masked_fill(times | silent, 0.0)
        hidden = F.gelu(self.second(F.gelu(self.first(spectrum)))).transpose(1, 2)
        logits: Tensor = self.letters(self.norm(self.blocks(hidden)))
        return logits

    def frames(self, lengths: Tensor) -> Tensor:
        """Return the number of frames of recordings with these numbers of samples."""
        return lengths // _HOP // 4 + 1

    def _spectrum(self, audio: Tensor) -> Tensor:
        """Return standardized logarithms of shape (batch, bands, frames), in full precision."""
        # The meta device, on which operations are counted, has no autocast.
        with nullcontext() if audio.is_meta else torch.autocast(audio.device.type, enabled=False):
            waves = torch.stft(
                audio.float() / FULL_SCALE, _FFT, _HOP, _WINDOW, self.window, pad_mode="constant", return_complex=True
            )
            energy = self.filters @ waves.abs().square()
            standard: Tensor = self.level((energy + 1e-6).log())
            return standard


class Case(SpeechToLetters):
    """English prompts by one voice at 8 kHz, letter by letter, from random weights."""

    score = ErrorRate("character")
    rate_hz = RATE_HZ
    block_class = "Block"

    def recordings(self, *, train: bool) -> Prompts:
        transcripts = read_transcripts(self.data_dirs["asterisk_transcripts"])
        return Prompts(self.data_dirs["asterisk_prompts"], transcripts, train=train)

    def build_model(self) -> nn.Module:
        sizes = (self.number(name) for name in ("hidden_size", "num_layers", "kernel_size"))
        return Acoustic(*sizes, *(self.real(name) for name in ("dropout", "masked_time", "masked_bands")))
