"""Text and speech of public layouts, scores of text, and rows of evaluation results from several ranks."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.spec.errors import DataError
from accelmark.tasks.metrics import Bleu, ErrorRate, Rouge1, TextScore, edit_distance
from accelmark.tasks.speech.pytorch import Recordings, read_audio
from accelmark.tasks.text.pytorch import JsonLines, Lines, Parallel, Table
from tests.cases.tiny_data import save_tone


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"one\n\xc3\xa9t\xc3\xa9\r\n\nlast\n", b"one\n\xc3\xa9t\xc3\xa9\r\n\nlast"])
@pytest.mark.parametrize("chunk", [3, 1 << 24])
def test_lines_are_found_with_and_without_a_last_end_and_across_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, chunk: int
) -> None:
    monkeypatch.setattr("accelmark.tasks.text.pytorch._CHUNK", chunk)
    lines = Lines(written(tmp_path / "a", content))
    assert [lines.text(index) for index in range(len(lines))] == ["one", "été", "", "last"]


def test_tables_parallel_files_and_json_lines_give_rows(tmp_path: Path) -> None:
    table = Table(written(tmp_path / "a.tsv", b"id\tsentence\tlabel\n7\tgood\t1\n"), ["sentence", "label"])
    assert (len(table), table.row(0)) == (1, ("good", "1"))
    paths = [written(tmp_path / name, text) for name, text in (("a.en", b"one\ntwo\n"), ("a.de", b"eins\nzwei\n"))]
    assert Parallel(paths).row(1) == ("two", "zwei")
    path = written(tmp_path / "a.jsonl", b'{"article": "a", "highlights": "b", "id": "x"}\n')
    lines = JsonLines(path, ["highlights"])
    assert lines.row(0) == ("b",)


def test_recordings_are_found_with_their_transcripts(tmp_path: Path) -> None:
    folder = tmp_path / "test-clean" / "19" / "198"
    written(folder / "19-198.trans.txt", b"19-198-0000 ONE TEN\n")
    save_tone(folder / "19-198-0000.wav", ["ONE", "TEN"])
    found = Recordings(tmp_path, ["test-clean"])
    assert (len(found), found.row(0), found.audio(0).shape) == (1, ("ONE TEN",), (6400,))
    with pytest.raises(DataError, match=r"19-198-0000\.wav: lasts 0\.4 s; expected at most 0\.3 s"):
        found.audio(0, 0.3)


def test_flac_is_read_as_wav_is(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    save_tone(tmp_path / "a.wav", ["ONE", "SIX"])
    expected = read_audio(tmp_path / "a.wav")
    soundfile.write(str(tmp_path / "a.flac"), expected, 16000)
    assert np.array_equal(read_audio(tmp_path / "a.flac"), expected)
    with pytest.raises(DataError, match=r"b\.flac: is not a readable recording"):
        read_audio(written(tmp_path / "b.flac", b"nothing"))


def slow_distance(given: Sequence[str], wanted: Sequence[str]) -> int:
    if not given or not wanted:
        return len(given) + len(wanted)
    replaced = slow_distance(given[1:], wanted[1:]) + (given[0] != wanted[0])
    return min(replaced, slow_distance(given[1:], wanted) + 1, slow_distance(given, wanted[1:]) + 1)


@settings(max_examples=50)
@given(st.lists(st.sampled_from("abc"), max_size=4), st.lists(st.sampled_from("abc"), max_size=4))
def test_the_edit_distance_is_that_of_its_definition(first: list[str], second: list[str]) -> None:
    assert edit_distance(first, second) == slow_distance(first, second)


def test_errors_are_over_the_words_or_characters_of_the_references() -> None:
    words, characters = ErrorRate("word"), ErrorRate("character")
    found = words.sums(["the cat sat", "b"], ["the cat sat down", "a b c"])
    assert (found, words.metrics(found)) == ({"word_errors": 3.0, "words": 7.0}, {"wer": 3 / 7})
    found = characters.sums(["abcd", "xy"], ["abd", "xyz"])
    assert found == {"character_errors": 2.0, "characters": 6.0}
    assert characters.metrics(found) == {"cer": pytest.approx(1 / 3)}
    assert characters.metrics({"character_errors": 0.0, "characters": 0.0}) == {"cer": 0.0}
    assert ErrorRate("word", plain=True).sums(["Don't, stop!"], ["DON'T STOP"])["word_errors"] == 0


def sum_of_parts(score: TextScore, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for hypothesis, reference in pairs:
        total.update(score.sums([hypothesis], [reference]))
    return score.metrics(total)


PAIRS = [
    ("the cat sat on the mat today", "the cat sat on a mat today"),
    ("hello there world again", "hello world again"),
]


def test_bleu_of_parts_is_that_of_the_corpus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    whole = sacrebleu.corpus_bleu([pair[0] for pair in PAIRS], [[pair[1] for pair in PAIRS]]).score
    assert sum_of_parts(Bleu(), PAIRS)["bleu"] == pytest.approx(whole)
    assert sum_of_parts(Bleu(lowercase=True), [(PAIRS[0][0].upper(), PAIRS[0][0])])["bleu"] == pytest.approx(100)


def test_rouge_is_the_mean_over_samples() -> None:
    pytest.importorskip("rouge_score")
    assert sum_of_parts(Rouge1(), [("cats running", "cat runs"), ("a", "b")]) == {"rouge1": pytest.approx(50)}


PROGRAM = """
import sys, torch, torch.distributed as dist
from types import SimpleNamespace
from accelmark.frameworks.pytorch.backend import row_metrics
from accelmark.spec.errors import DataError
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
rows = {} if rank == 2 else {"boxes": torch.arange(4 * (rank + 1)).view(-1, 4) + 100 * rank}
if rank == 1:
    rows["more"] = torch.ones(1, 2)

def compute(found):
    assert rank == 0, "the rows of all ranks are in the memory of one only"
    assert sorted(found) == ["boxes", "more"], found
    assert found["boxes"][:, 0].tolist() == [0, 100, 104], found
    assert found["more"].tolist() == [[1, 1]], found
    return {"metric": 0.5}

def fail(found):
    raise DataError("no clicks")

assert row_metrics(SimpleNamespace(row_metrics=compute), rows, dist.group.WORLD, 1) == {"metric": 0.5}
try:
    row_metrics(SimpleNamespace(row_metrics=fail), rows, dist.group.WORLD, 1)
except DataError as error:
    assert str(error) == "no clicks", error
else:
    raise AssertionError("the error of rank 0 is every rank's")
dist.barrier()
dist.destroy_process_group()  # gloo's threads end before the interpreter does
"""


@pytest.mark.heavy
def test_every_rank_has_the_metrics_of_the_rows_of_all(tmp_path: Path) -> None:
    """One rank has none: it had no evaluation batches."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    errors = [rank.communicate(timeout=400)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], errors
