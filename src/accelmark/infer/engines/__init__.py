"""Inference engines, one file each, and the look-up of an engine's class by its name.

``engines.yaml`` declares each engine's module and requirements, so that planning knows them without an import.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from accelmark.infer.engine import Engine
from accelmark.infer.flagperf import adapted
from accelmark.spec.backports import entry_points
from accelmark.spec.errors import RequestError, RunError, nearest
from accelmark.spec.plugins.catalog import ENGINES_ENTRY_POINTS, engine_files, file_module, known_engines


def engine_class(name: str, vendor_folder: Path | None) -> type[Engine]:
    """Return the class of the engine ``name``; a vendor's file takes precedence over AccelMark's of the same name.

    A vendor's file may be one of FlagPerf, with a class ``InferModel``.

    Raises:
        RequestError: there is no such engine; the nearest name is suggested.
        RunError: the file or package defines no ``Engine``.
    """
    if vendor_folder is not None and name in engine_files(vendor_folder / "engines"):
        path = vendor_folder / "engines" / f"{name}.py"
        module = file_module(f"accelmark_vendor_engines.{name}", path)
        if not hasattr(module, "Engine") and hasattr(module, "InferModel"):
            return adapted(module.InferModel)
        return _checked(getattr(module, "Engine", None), str(path))
    for entry in entry_points(group=ENGINES_ENTRY_POINTS):
        if entry.name == name:
            return _checked(entry.load(), entry.value)
    if name in engine_files():
        module = importlib.import_module(f"{__name__}.{name}")
        return _checked(getattr(module, "Engine", None), module.__name__)
    raise RequestError(f"compiler: unknown engine {name!r} ({nearest(name, known_engines(vendor_folder))})")


def _checked(candidate: object, where: str) -> type[Engine]:
    if not (isinstance(candidate, type) and issubclass(candidate, Engine)):
        problem = "no class Engine derived from accelmark.infer.engine.Engine, and no FlagPerf class InferModel"
        raise RunError(f"{where}: defines {problem}")
    return candidate
