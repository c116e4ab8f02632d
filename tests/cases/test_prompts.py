"""The small speech case: its prompts with their transcripts, and that it learns from some."""

from __future__ import annotations

import wave
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from accelmark.cases.speech_mini.pytorch import RATE_HZ, TRANSCRIPTS, Prompts, read_transcripts, spoken
from accelmark.spec.log.events import Event
from tests.cases.job_of import job_of, losses_of, run, value_of
from tests.cases.test_definitions import case_of

LETTER_S = 0.12


def write_prompt(path: Path, text: str, rate_hz: int = RATE_HZ) -> None:
    """Write a recording in which each letter is a tone of its own."""
    times = np.arange(round(LETTER_S * RATE_HZ)) / RATE_HZ
    tones = [np.sin(2 * np.pi * 300 * (1 + "abcd ".index(letter)) * times) for letter in text]
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes((8000 * np.concatenate(tones)).astype("<i2").tobytes())


@pytest.fixture
def data(tmp_path: Path) -> Mapping[str, Path]:
    """Prompts of three and four letters, and transcripts with one more that was not recorded."""
    texts = [*map("".join, product("abcd", repeat=3)), *map("".join, product("abc", "cd", "ad", "bd"))]
    lines = ["; a comment", "missing: Nobody said this."]
    for number, text in enumerate(texts):
        name = f"digits/{number}" if number % 2 else f"prompt-{number}"
        write_prompt(tmp_path / "prompts" / f"{name}.wav", text)
        lines.append(f"{name}: {text.capitalize()}.")
    (tmp_path / "transcripts").mkdir()
    (tmp_path / "transcripts" / TRANSCRIPTS).write_text("\n".join(lines), encoding="utf-8")
    return {"asterisk_prompts": tmp_path / "prompts", "asterisk_transcripts": tmp_path / "transcripts"}


def prompts_of(data: Mapping[str, Path], *, train: bool) -> Prompts:
    return Prompts(data["asterisk_prompts"], read_transcripts(data["asterisk_transcripts"]), train=train)


@pytest.mark.parametrize(
    ("transcript", "words"),
    [
        ("Press 1, or 2 to reject it", "press one or two to reject it"),
        ("followed by # or just *.", "followed by pound or just star"),
        ('IAX (note: does not say "2")', "iax"),
        ("dash [-]", "dash"),
        ("You've got the 8500 extension.", None),
        ("3D audio enabled", None),
        ("<beep ascending>", None),
    ],
)
def test_a_transcript_becomes_the_words_that_are_said(transcript: str, words: str | None) -> None:
    assert spoken(transcript) == words


def test_no_text_is_trained_on_and_held_out(data: Mapping[str, Path]) -> None:
    splits = [prompts_of(data, train=train) for train in (True, False)]
    texts = [{split.row(index)[0] for index in range(len(split))} for split in splits]
    assert len(texts[0] | texts[1]) == 88
    assert not texts[0] & texts[1]
    assert 4 <= len(texts[1]) <= 25
    assert not any("nobody" in text for split in texts for text in split)


def test_training_joins_prompts_at_speeds_of_their_own_and_evaluation_does_not(data: Mapping[str, Path]) -> None:
    train, held_out = (prompts_of(data, train=train) for train in (True, False))
    audio, text = train.utterance(3, 2.0, seed=1)
    again: tuple[npt.NDArray[np.int16], str] = train.utterance(3, 2.0, seed=1)
    other, _ = train.utterance(3, 2.0, seed=2)
    assert text.startswith(train.row(3)[0] + " ")
    assert 1.0 * RATE_HZ < len(audio) <= 2.0 * RATE_HZ
    assert (audio.shape, text) == (again[0].shape, again[1])
    assert (audio == again[0]).all()
    assert len(other) != len(audio)
    letters = len(text.replace(" ", ""))
    assert 0.9 * letters * LETTER_S * RATE_HZ < len(audio) < 1.12 * letters * LETTER_S * RATE_HZ
    alone, said = held_out.utterance(0, 2.0, seed=1)
    assert (len(alone), said) == (round(LETTER_S * RATE_HZ) * len(said), held_out.row(0)[0])


def test_frames_are_as_many_as_logits() -> None:
    case = case_of("speech_mini", {"model.hidden_size": 16, "model.num_layers": 1})
    model: Any = case.build_model()
    for length in (8000, 8001, 8319, 8320, 12345):
        logits = model(torch.zeros(1, length, dtype=torch.int16))
        assert logits.shape == (1, int(model.frames(torch.tensor(length))), 32)


@pytest.mark.heavy
def test_speech_mini_learns(tmp_path: Path, data: Mapping[str, Path]) -> None:
    over: dict[str, Any] = {"model.hidden_size": 48, "model.num_layers": 1, "model.train_seconds": 2.0}
    over |= {"model.eval_seconds": 2.0, "end.max_steps": 120, "threads": 1, "precision": "fp32", "optimizer.lr": 1e-2}
    events = run(job_of("speech_mini", tmp_path / "run", data, over))
    finished, losses = value_of(events, Event.FINISHED), losses_of(events)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert finished["final_metrics"]["cer"] < 0.5, "letters that are guessed have about 0.75"
