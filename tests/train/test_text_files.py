"""Text and speech of public layouts: what is read, and how bad input is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accelmark.spec.errors import DataError
from accelmark.tasks.speech.data import Recordings, read_audio
from accelmark.tasks.text.data import JsonLines, Lines, Parallel, Table
from tests.cases.tiny_data import save_tone


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"one\n\xc3\xa9t\xc3\xa9\r\n\nlast\n", b"one\n\xc3\xa9t\xc3\xa9\r\n\nlast"])
def test_lines_are_found_with_and_without_a_last_end(tmp_path: Path, content: bytes) -> None:
    lines = Lines(written(tmp_path / "a", content))
    assert [lines.text(index) for index in range(len(lines))] == ["one", "été", "", "last"]


def test_lines_across_chunks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelmark.tasks.text.data._CHUNK", 3)
    lines = Lines(written(tmp_path / "a", b"ab\ncdef\n\ng\n"))
    assert [lines.text(index) for index in range(len(lines))] == ["ab", "cdef", "", "g"]


def test_a_table_gives_the_columns_asked_for(tmp_path: Path) -> None:
    table = Table(written(tmp_path / "a.tsv", b"id\tsentence\tlabel\n7\tgood\t1\n"), ["sentence", "label"])
    assert (len(table), table.row(0)) == (1, ("good", "1"))


def test_parallel_files_and_json_lines_give_rows(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, text) for name, text in (("a.en", b"one\ntwo\n"), ("a.de", b"eins\nzwei\n"))]
    assert Parallel(paths).row(1) == ("two", "zwei")
    path = written(tmp_path / "a.jsonl", b'{"article": "a", "highlights": "b", "id": "x"}\n')
    lines = JsonLines(path, ["highlights"])
    assert lines.row(0) == ("b",)


def recordings(root: Path, transcript: str) -> Path:
    folder = root / "test-clean" / "19" / "198"
    written(folder / "19-198.trans.txt", transcript.encode())
    save_tone(folder / "19-198-0000.wav", ["ONE", "TEN"])
    return root


def test_recordings_are_found_with_their_transcripts(tmp_path: Path) -> None:
    found = Recordings(recordings(tmp_path, "19-198-0000 ONE TEN\n"), ["test-clean"])
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
