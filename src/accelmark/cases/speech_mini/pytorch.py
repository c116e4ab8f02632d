"""Speech recognition on the recorded prompts of a telephone system in PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from accelmark.cases.speech_mini._prompts import RATE_HZ, Prompts, read_transcripts
from accelmark.tasks.speech.pytorch import FULL_SCALE, LETTERS, SpeechToLetters, spans
from accelmark.tasks.text.metrics import CharacterErrors

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

    score = CharacterErrors()
    rate_hz = RATE_HZ
    block_class = "Block"

    def recordings(self, *, train: bool) -> Prompts:
        """Return the prompts of a split."""
        transcripts = read_transcripts(self.data_dirs["asterisk_transcripts"])
        return Prompts(self.data_dirs["asterisk_prompts"], transcripts, train=train)

    def build_model(self) -> nn.Module:
        """Build the network."""
        sizes = (self.number(name) for name in ("hidden_size", "num_layers", "kernel_size"))
        return Acoustic(*sizes, *(self.real(name) for name in ("dropout", "masked_time", "masked_bands")))
