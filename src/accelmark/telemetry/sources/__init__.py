"""Device sources of a vendor: its own library, its command-line tool, or a FlagPerf monitor script."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

from accelmark.spec.plugins.catalog import file_module
from accelmark.telemetry.declaration import VendorTelemetry
from accelmark.telemetry.device import DeviceSource, SourceError

T = TypeVar("T")

MODULE_FILE: Final = "telemetry.py"
"""A vendor's own reader; it defines a class ``Source``, called without arguments."""
_SCRIPT_SOURCE: Final = "accelmark.compat.flagperf.monitor:MonitorScript"
"""Imported by name at run time, since ``compat`` depends on telemetry."""


def device_sources(folder: Path, telemetry: VendorTelemetry, log_dir: Path | None = None) -> tuple[DeviceSource, ...]:
    """Return the ways to read a vendor's devices, best first, at least one.

    Args:
        folder: the vendor's folder.
        telemetry: its checked ``telemetry`` section.
        log_dir: where a FlagPerf monitor script writes its log; without it scripts are left out.

    Raises:
        SourceError: ``telemetry.py`` cannot be used, or nothing is declared; the message says why.
    """
    sources: list[DeviceSource] = []
    if (folder / MODULE_FILE).is_file():
        sources.append(_library_source(folder / MODULE_FILE))
    if telemetry.tool is not None:
        from accelmark.telemetry.sources.tool import ToolSource

        sources.append(ToolSource(telemetry.tool))
    if telemetry.script is not None and log_dir is not None:
        sources.append(pkgutil.resolve_name(_SCRIPT_SOURCE)(folder / telemetry.script.file, log_dir, telemetry.script))
    if not sources:
        raise SourceError(telemetry.reasons.get("devices", "the vendor declares no way to read its devices"))
    return tuple(sources)


def first_readable(sources: Iterable[DeviceSource], read: Callable[[DeviceSource], T]) -> tuple[DeviceSource, T]:
    """Return the first source that ``read`` succeeds with, and its result; those that fail are closed.

    Raises:
        SourceError: none succeeds; the reason of each is given.
    """
    problems: list[str] = []
    for source in sources:
        try:
            return source, read(source)
        except SourceError as error:
            problems.append(str(error))
        except Exception as error:  # noqa: BLE001  a vendor's reader may raise anything
            problems.append(f"{type(source).__name__} raises {type(error).__name__}: {error}")
        source.close()
    raise SourceError("; ".join(problems) or "no device source")


def _library_source(path: Path) -> DeviceSource:
    try:
        module = _import(path)
    except Exception as error:
        raise SourceError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    factory = getattr(module, "Source", None)
    if factory is None:
        raise SourceError(f"{path} defines no class Source")
    try:
        source = factory()
    except Exception as error:
        raise SourceError(f"Source() in {path} raises {type(error).__name__}: {error}") from error
    if not isinstance(source, DeviceSource):
        raise SourceError(f"Source in {path} lacks open(), sample() or close()")
    return source


def _import(path: Path) -> ModuleType:
    if path.parent.parent == Path(__file__).parents[2] / "vendors":
        return importlib.import_module(f"accelmark.vendors.{path.parent.name}.{path.stem}")
    return file_module(f"_accelmark_vendor_{path.parent.name}_telemetry", path)
