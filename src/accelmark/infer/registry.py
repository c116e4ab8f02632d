"""Finding an engine by its name: AccelMark's own, a vendor's, an installed package's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

from accelmark.infer import engines
from accelmark.infer.engine import Engine
from accelmark.spec.errors import RequestError, RunError, nearest
from accelmark.spec.inference.engines import ENTRY_POINTS, engine_files, known_engines, own_engines


def engine_class(name: str, vendor_folder: Path | None) -> type[Engine]:
    """Return the engine called ``name``; a vendor's file takes precedence over AccelMark's of the same name.

    Raises:
        RequestError: no such engine is known; the nearest name is suggested.
        RunError: the file or package is there but holds no ``Engine``.
    """
    if vendor_folder is not None and name in engine_files(vendor_folder / "engines"):
        return _from_file(name, vendor_folder / "engines" / f"{name}.py")
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            return _checked(entry.load(), entry.value)
    if name in own_engines():
        module = importlib.import_module(f"{engines.__name__}.{name}")
        return _checked(getattr(module, "Engine", None), module.__name__)
    raise RequestError(f"compiler: unknown engine {name!r} ({nearest(name, known_engines(vendor_folder))})")


def _from_file(name: str, path: Path) -> type[Engine]:
    module_name = f"accelmark_vendor_engines.{name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise RunError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return _checked(getattr(module, "Engine", None), str(path))


def _checked(found: object, where: str) -> type[Engine]:
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise RunError(f"{where}: holds no class Engine that subclasses accelmark.infer.engine.Engine")
    return found
