from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from accelmark.datasets.ensure import ArchiveKind, FetchError, extract


def tar(path: Path, entries: list[tuple[str, bytes | str]]) -> Path:
    """Write a tarball; a content that is text makes a link to it."""
    with tarfile.open(path, "w:gz") as opened:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                opened.addfile(info)
            else:
                info.size = len(content)
                opened.addfile(info, io.BytesIO(content))
    return path


def zipped(path: Path, entries: list[tuple[str, bytes | str]]) -> Path:
    with zipfile.ZipFile(path, "w") as opened:
        for name, content in entries:
            info = zipfile.ZipInfo(name)
            kind = stat.S_IFLNK if isinstance(content, str) else stat.S_IFREG
            info.external_attr = (kind | 0o644) << 16
            opened.writestr(info, content)
    return path


@pytest.fixture(params=["tar", "zip"])
def kind(request: pytest.FixtureRequest) -> ArchiveKind:
    value: ArchiveKind = request.param
    return value


def pack(kind: ArchiveKind, path: Path, entries: list[tuple[str, bytes | str]]) -> Path:
    return tar(path, entries) if kind == "tar" else zipped(path, entries)


def test_only_the_named_members_are_written(kind: ArchiveKind, tmp_path: Path) -> None:
    archive = pack(kind, tmp_path / "archive", [("p/a", b"first"), ("p/b", b"second"), ("p/c", b"third")])
    extract(kind, archive, {"p/b": tmp_path / "out/deep/b"}, {"p/b": 6})
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        "archive",
        "out/deep/b",
    ]
    assert (tmp_path / "out/deep/b").read_bytes() == b"second"


def test_a_member_outside_the_archives_root_writes_nothing(kind: ArchiveKind, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    entries: list[tuple[str, bytes | str]] = [("../evil", b"x"), (str(tmp_path / "evil"), b"x"), ("a", b"good")]
    archive = pack(kind, inner / "archive", entries)
    extract(kind, archive, {"a": inner / "out"}, {"a": 4})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["archive", "inner", "out"]


def test_a_link_in_place_of_a_file_is_refused(kind: ArchiveKind, tmp_path: Path) -> None:
    archive = pack(kind, tmp_path / "archive", [("a", "/etc/passwd")])
    with pytest.raises(FetchError, match="is not a regular file"):
        extract(kind, archive, {"a": tmp_path / "out"}, {"a": 100})
    assert not (tmp_path / "out").exists()


def test_a_member_larger_than_declared_is_refused_before_it_is_written(kind: ArchiveKind, tmp_path: Path) -> None:
    archive = pack(kind, tmp_path / "archive", [("a", bytes(1_000_000))])
    with pytest.raises(FetchError, match=r"has 1,000,000 bytes, expected 10"):
        extract(kind, archive, {"a": tmp_path / "out"}, {"a": 10})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["tar", "zip", "deb"])
def test_a_broken_archive_is_an_error_naming_the_file(kind: ArchiveKind, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(b"this is no archive at all" * 100)
    with pytest.raises(FetchError, match="archive is not a readable"):
        extract(kind, tmp_path / "archive", {"a": tmp_path / "out"}, {"a": 1})
