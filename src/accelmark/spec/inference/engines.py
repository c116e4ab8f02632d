"""The names of inference engines, known without importing one: AccelMark's own, a vendor's, an installed package's."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

ENTRY_POINTS: Final = "accelmark.engines"
"""Group in which a package names its engines: ``name = package.module:Class``."""
_OWN: Final = Path(__file__).parents[2] / "infer" / "engines"


def own_engines() -> set[str]:
    """Return the names of AccelMark's own engines."""
    return engine_files(_OWN)


def known_engines(vendor_folder: Path | None) -> set[str]:
    """Return the names of all engines that a run on this vendor could name, as this Python sees them."""
    found = own_engines() | {entry.name for entry in entry_points(group=ENTRY_POINTS)}
    return found | (engine_files(vendor_folder / "engines") if vendor_folder is not None else set())


def engine_files(folder: Path) -> set[str]:
    """Return the names of the engines in a directory, a file each."""
    return {file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")} if folder.is_dir() else set()
