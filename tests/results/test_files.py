"""Files that are whole or not there, and some that are for one person alone."""

from __future__ import annotations

from pathlib import Path

from accelmark.results.store.files import write_atomic


def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    write_atomic(tmp_path / "private", "x", private=True)
    write_atomic(tmp_path / "open", "x")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "open").stat().st_mode & 0o004
