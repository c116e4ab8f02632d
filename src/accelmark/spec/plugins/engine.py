"""Look up inference engines of AccelMark, vendors and installed packages by name, without importing them."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import Spec, parse, read_yaml

ENTRY_POINTS: Final = "accelmark.engines"
"""Entry point group in which a package declares its engines: ``name = package.module:Class``."""
DECLARATIONS_FILE: Final = "engines.yaml"
"""File next to the engines of a folder: name -> :class:`EngineSpec`; optional in a vendor's folder."""
_OWN: Final = Path(__file__).parents[2] / "infer" / "engines"


class EngineSpec(Spec):
    """Declaration of an engine, readable without importing it."""

    title: str
    module: str
    """The module that it imports."""
    distributions: tuple[str, ...] = ()
    """Packages that may provide ``module``, most likely first; empty: the package named like the module."""
    requires: tuple[str, ...] = ()
    """Requirements to install, as pip takes them."""


def own_engines() -> set[str]:
    """Return the names of AccelMark's own engines."""
    return engine_files(_OWN)


def known_engines(vendor_folder: Path | None) -> set[str]:
    """Return the names of all engines in this Python environment that a run on this vendor can use."""
    found = own_engines() | {entry.name for entry in entry_points(group=ENTRY_POINTS)}
    return found | (engine_files(vendor_folder / "engines") if vendor_folder is not None else set())


def engine_specs(vendor_folder: Path | None = None) -> dict[str, EngineSpec]:
    """Return the declared engines of AccelMark and of a vendor, whose declarations take precedence.

    Raises SpecError if a declaration is wrong, or declares an engine without a file.
    """
    declared = _declared(_OWN)
    return declared | (_declared(vendor_folder / "engines") if vendor_folder is not None else {})


def engine_files(folder: Path) -> set[str]:
    """Return the names of the engines in a directory, one per file."""
    return {file.stem for file in folder.glob("*.py") if not file.stem.startswith("_")} if folder.is_dir() else set()


def _declared(folder: Path) -> dict[str, EngineSpec]:
    path = folder / DECLARATIONS_FILE
    if not path.is_file():
        return {}
    entries = read_yaml(path)
    if unknown := sorted(set(entries) - engine_files(folder)):
        raise SpecError([Problem(str(path), unknown[0], f"there is no file {unknown[0]}.py")])
    return {name: parse(EngineSpec, values, str(path)) for name, values in entries.items()}
