"""The small translation case: its catalogue of names, and that it learns from one."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accelmark.cases.translation_mini.pytorch import CATALOGUE, characters, read_names, split_names
from accelmark.spec.log.events import Event
from tests.cases.job_of import job_of, losses_of, run, value_of

LETTERS = dict(zip("abcdefgh", "абцдефгх", strict=True))


def write_catalogue(path: Path, texts: Mapping[str, str]) -> None:
    """Write a catalogue of GNU gettext in its binary format."""
    pairs = sorted({"": "Content-Type: text/plain; charset=UTF-8\n", **texts}.items())
    tables, content = [b"", b""], b""
    start = 28 + 16 * len(pairs)
    for column in (0, 1):
        for pair in pairs:
            text = pair[column].encode()
            tables[column] += struct.pack("<2I", len(text), start + len(content))
            content += text + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"".join(tables) + content)


@pytest.fixture
def names(tmp_path: Path) -> Path:
    """Words of four letters, each of which has one letter of the other alphabet."""
    words = [f"{a}{b}{c}a" for a in LETTERS for b in LETTERS for c in "abcd"]
    texts = {word: "".join(LETTERS[letter] for letter in word) for word in words}
    more = {"Old Abba, Cab": "абба", "Cab (old)": "цаб", "A name of too many letters": "абцдефгх"}
    write_catalogue(
        tmp_path / "iso_codes" / CATALOGUE, {**texts, **{name: text for name, text in more.items() if name}}
    )
    return tmp_path / "iso_codes"


def test_names_are_read_without_those_that_repeat_others(names: Path) -> None:
    found = read_names(names, 16)
    assert len(found) == 256
    assert found[1] == ("aaba", "ааба")
    held_out, others = (split_names(found, held_out=held) for held in (True, False))
    assert 16 <= len(held_out) <= 56
    assert len(held_out) + len(others) == 256
    tokenizer = characters(found)
    tokens = tokenizer.encode("cafe-").ids
    assert len(tokens) == 5
    assert tokens[-1] == 2, "an unknown letter"
    assert tokenizer.decode([*tokens[:4], 1, 0], skip_special_tokens=True) == "cafe"


@pytest.mark.heavy
def test_translation_mini_learns(tmp_path: Path, names: Path) -> None:
    over: dict[str, Any] = {
        "model.hidden_size": 32,
        "model.intermediate_size": 64,
        "model.num_layers": 1,
        "end.max_steps": 120,
    }
    over |= {"threads": 1, "precision": "fp32", "optimizer.lr": 1e-2, "batch_size": 32}
    over |= {"model.source_length": 6, "model.target_length": 6}
    events = run(job_of("translation_mini", tmp_path / "run", {"iso_codes": names}, over))
    finished, losses = value_of(events, Event.FINISHED), losses_of(events)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5]), losses
    assert finished["final_metrics"]["cer"] < 0.7, "words of which a few letters are guessed have about 0.85"
