"""Summarise the contents of a vendor's folder for a case."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accelmark.spec.catalog import tree_hash
from accelmark.spec.records import AdaptationFiles
from accelmark.spec.secret import without_userinfo

ENVIRONMENT_FILE: Final = "environment_variables.sh"
REQUIREMENTS_FILE: Final = "requirements.txt"
BUILD_FILES: Final = ("setup.py", "pyproject.toml", "setup.cfg", "MANIFEST.in", "CMakeLists.txt", "README.md")


def adaptation_files(folder: Path) -> AdaptationFiles | None:
    """Return the contents of ``folder`` (``vendors/<v>/cases/<model>-<framework>``), None if it does not exist."""
    if not folder.is_dir():
        return None
    csrc = folder / "csrc"
    return AdaptationFiles(
        name=folder.name,
        sha256=tree_hash(folder),
        extern={name: _lines(path, "#") for name, path in _files(folder / "extern") if path.suffix == ".py"},
        kernels={name: _lines(path, "//") for name, path in _files(csrc) if path.name not in BUILD_FILES},
        requirements=_requirements(folder / REQUIREMENTS_FILE),
        has_environment=(folder / ENVIRONMENT_FILE).is_file(),
        has_build=any((csrc / name).is_file() for name in ("setup.py", "pyproject.toml")),
    )


def requirements_file(*folders: Path | None) -> Path | None:
    """Return the first ``requirements.txt`` of ``folders``: that of a vendor's folder replaces the case's own."""
    files = (folder / REQUIREMENTS_FILE for folder in folders if folder is not None)
    return next(filter(Path.is_file, files), None)


def _files(folder: Path) -> list[tuple[str, Path]]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return [(path.relative_to(folder).as_posix(), path) for path in found]


def _lines(path: Path, comment: str) -> int:
    text = path.read_text(encoding="utf-8", errors="replace")
    return sum(1 for line in map(str.strip, text.splitlines()) if line and not line.startswith(comment))


def _requirements(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    # for reports only; pip reads the file itself
    return tuple(without_userinfo(line) for line in lines if line)
