"""The source record: from a wheel that is built and installed, and from a git checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelmark.run.record.registry import source_record

ROOT = Path(__file__).parents[2]

SOURCE = """
import sys
sys.path.insert(0, sys.argv[1])
from accelmark.run.record.registry import source_record
print(source_record().model_dump_json())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that AccelMark's own wheel was installed into by pip."""
    root = tmp_path_factory.mktemp("wheel")
    copy = root / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    files = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "src"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-compile", "--target", str(root / "site"), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root / "site"


def record_of(site: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", SOURCE, str(site)]
    done = subprocess.run(command, cwd=site, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_an_installed_wheel_is_recognised_as_unmodified(site: Path) -> None:
    record = record_of(site)
    assert (record["kind"], record["modified"], record["reason"]) == ("wheel", [], None)


def test_files_of_a_wheel_that_were_changed_added_or_removed_are_listed(site: Path) -> None:
    before = record_of(site)["sha256"]
    changed, added = site / "accelmark" / "train" / "loop" / "ends.py", site / "accelmark" / "train" / "faster.py"
    removed = site / "accelmark" / "py.typed"
    kept = changed.read_bytes()
    changed.write_bytes(kept + b"\n# a change\n")
    added.write_text("")
    removed.unlink()
    try:
        record = record_of(site)
    finally:
        changed.write_bytes(kept)
        added.unlink()
        removed.write_bytes(b"")
    assert record["modified"] == ["accelmark/py.typed", "accelmark/train/faster.py", "accelmark/train/loop/ends.py"]
    assert record["sha256"] != before


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
    subprocess.run(["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True)


def test_files_of_a_checkout_that_differ_from_the_commit_are_listed(tmp_path: Path) -> None:
    package = tmp_path / "src" / "accelmark"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "driver.py").write_text("steps = 1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    clean = source_record(package)
    assert (clean.kind, clean.modified) == ("checkout", ())
    assert clean.commit is not None
    (package / "driver.py").write_text("steps = 2\n")
    (package / "extra.py").write_text("")
    assert source_record(package).modified == ("src/accelmark/driver.py", "src/accelmark/extra.py")
