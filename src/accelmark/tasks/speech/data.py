"""Recorded speech with transcripts in the layout of LibriSpeech."""

from __future__ import annotations

import sys
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import UNREADABLE, DataError, raising

RATE_HZ: Final = 16_000
"""Sampling rate of LibriSpeech."""
_SUFFIXES: Final = (".flac", ".wav")


class Utterances(Protocol):
    """Recorded speech with a transcript for each recording."""

    rate_hz: int

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[str, ...]:
        """Return the transcript that utterance ``index`` is scored against."""

    def where(self, index: int) -> Path:
        """Return the path of a recording."""

    def utterance(self, index: int, most_s: float, seed: int) -> tuple[npt.NDArray[np.int16], str]:
        """Return samples and transcript, in training changed by random numbers for ``seed``.

        Raises DataError: the recording cannot be read, or is longer than ``most_s`` seconds.
        """


@final
class Recordings:
    """The utterances of some subsets: ``<subset>/<speaker>/<chapter>/*.trans.txt`` with a recording for each line."""

    rate_hz = RATE_HZ

    def __init__(self, directory: Path, subsets: Sequence[str]) -> None:
        self._utterances: list[tuple[Path, str]] = []
        for subset in subsets:
            transcripts = sorted((directory / subset).glob("*/*/*.trans.txt"))
            if not transcripts:
                raise DataError(f"{directory / subset}: expected <speaker>/<chapter>/*.trans.txt here, found none")
            for transcript in transcripts:
                self._utterances += _utterances(transcript)

    def __len__(self) -> int:
        return len(self._utterances)

    def row(self, index: int) -> tuple[str, ...]:
        """Return the transcript of utterance ``index``."""
        return (self._utterances[index][1],)

    def where(self, index: int) -> Path:
        """Return the path of a recording."""
        return self._utterances[index][0]

    def audio(self, index: int, most_s: float | None = None) -> npt.NDArray[np.int16]:
        """Return the samples of utterance ``index``; raises DataError where it is longer than ``most_s`` seconds."""
        path = self.where(index)
        samples = read_audio(path)
        if most_s is not None and len(samples) > round(most_s * RATE_HZ):
            raise DataError(f"{path}: lasts {len(samples) / RATE_HZ:.1f} s; expected at most {most_s:g} s")
        return samples

    def utterance(self, index: int, most_s: float, seed: int) -> tuple[npt.NDArray[np.int16], str]:
        """Return samples and transcript, which are the same in every epoch."""
        return self.audio(index, most_s), self._utterances[index][1]


def _utterances(transcript: Path) -> list[tuple[Path, str]]:
    present = {path.name for path in transcript.parent.iterdir()}
    utterances = []
    for number, line in enumerate(transcript.read_text(encoding="utf-8").splitlines(), 1):
        name, _, text = line.strip().partition(" ")
        file = next((name + suffix for suffix in _SUFFIXES if name + suffix in present), None)
        if file is None or not text.strip():
            lacks = "no text" if file else f"no recording {name}.flac or {name}.wav"
            raise DataError(f"{transcript}:{number}: utterance {name!r} has {lacks}")
        utterances.append((transcript.parent / file, text.strip()))
    return utterances


def read_audio(path: Path, rate_hz: int = RATE_HZ) -> npt.NDArray[np.int16]:
    """Return the samples of a recording; raises DataError where it is not one channel of 16 bits at ``rate_hz``."""
    with raising(DataError, f"{path}: is not a readable recording", *UNREADABLE, wave.Error):
        samples, channels, rate = _read_wav(path) if path.suffix == ".wav" else _read_flac(path)
    if (channels, rate) != (1, rate_hz):
        expected = f"expected 1 at {rate_hz:,} Hz: convert it"
        raise DataError(f"{path}: has {channels} channels at {rate:,} Hz; {expected}")
    return samples


def _read_wav(path: Path) -> tuple[npt.NDArray[np.int16], int, int]:
    with wave.open(str(path)) as file:
        count, width = file.getnframes(), file.getsampwidth()
        if width != 2:
            raise ValueError(f"has samples of {8 * width} bits; expected 16")
        data = file.readframes(count)
        if len(data) != count * width * file.getnchannels():
            raise ValueError("ends before its last sample")
        return np.frombuffer(data, "<i2"), file.getnchannels(), file.getframerate()


def _read_flac(path: Path) -> tuple[npt.NDArray[np.int16], int, int]:
    import soundfile

    sys.audit("open", str(path), "r", 0)  # the library opens it itself
    with soundfile.SoundFile(str(path)) as file:
        samples: npt.NDArray[np.int16] = file.read(dtype="int16")
        if len(samples) != file.frames:
            raise ValueError("ends before its last sample")
        return samples, int(file.channels), int(file.samplerate)
