"""Recorded prompts of the telephone system Asterisk, with their transcripts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import numpy as np
import numpy.typing as npt

from accelmark.spec.errors import DataError
from accelmark.tasks.speech.data import read_audio

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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is not a readable list of transcripts: {error}") from error
    parts = (line.partition(":") for line in lines if not line.startswith(";"))
    transcripts = {name.strip(): spoken(text) for name, _, text in parts}
    return {name: text for name, text in transcripts.items() if text}


@final
class Prompts:
    """The prompts of a split, sorted; see :class:`accelmark.tasks.speech.data.Utterances`.

    One in eight transcripts is held out, by its SHA-256: no text is in both splits. In training, an utterance is
    several prompts one after another, each at 0.9 to 1.1 times its speed: first that of the index, then random ones.

    Args:
        recordings: directory of the recordings.
        transcripts: the result of ``read_transcripts``; those without a recording are left out.
        train: the training prompts; otherwise the held-out ones.

    Raises:
        DataError: no prompt has a recording.
    """

    rate_hz = RATE_HZ

    def __init__(self, recordings: Path, transcripts: Mapping[str, str], *, train: bool) -> None:
        texts = {recordings / f"{name}.wav": transcripts[name] for name in sorted(transcripts)}
        self._prompts = [(path, text) for path, text in texts.items() if path.is_file() and _held_out(text) != train]
        if not self._prompts:
            raise DataError(f"{recordings}: expected recordings such as {next(iter(texts), 'hello.wav')}, found none")
        self._train = train

    def __len__(self) -> int:
        return len(self._prompts)

    def row(self, index: int) -> tuple[str, ...]:
        """Return the transcript of prompt ``index``."""
        return (self._prompts[index][1],)

    def where(self, index: int) -> Path:
        """Return the path of a recording."""
        return self._prompts[index][0]

    def utterance(self, index: int, most_s: float, seed: int) -> tuple[_Samples, str]:
        """Return a held-out prompt, or in training several of at most ``most_s`` seconds together."""
        most, random = round(most_s * RATE_HZ), np.random.default_rng(seed)
        audio, texts = self._read(index, random), [self._prompts[index][1]]
        if len(audio) > most:
            raise DataError(f"{self.where(index)}: lasts {len(audio) / RATE_HZ:.1f} s; expected at most {most_s:g} s")
        while self._train:
            other = int(random.integers(len(self)))
            following = self._read(other, random)
            if len(audio) + len(following) > most:
                break
            audio = np.concatenate([audio, following])
            texts.append(self._prompts[other][1])
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
