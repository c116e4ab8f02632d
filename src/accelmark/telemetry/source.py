"""Where device samples come from: a vendor's library, its tool by a declared rule, or a FlagPerf monitor script."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Protocol, runtime_checkable

from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import parse
from accelmark.spec.vendor import VendorSpec
from accelmark.spec.yaml_file import read_yaml
from accelmark.telemetry.rule import VendorTelemetry
from accelmark.telemetry.sample import DeviceInfo, DeviceSample

MODULE_FILE = "telemetry.py"
"""A vendor's own reader; it defines a class ``Source``, called without arguments."""


class SourceError(Exception):
    """The devices cannot be read (now); the message is the reason that is recorded."""


@runtime_checkable
class DeviceSource(Protocol):
    """Reads one vendor's devices. Called from one thread; may block, since nothing waits for it."""

    def open(self) -> tuple[DeviceInfo, ...]:
        """Reach the devices and say what they are.

        Raises:
            SourceError: they cannot be reached.
        """
        ...

    def sample(self) -> tuple[DeviceSample, ...]:
        """Read every device once.

        Raises:
            SourceError: nothing could be read this time.
        """
        ...

    def close(self) -> None:
        """Let go of the devices; never raises."""
        ...


def read_vendor(folder: Path) -> tuple[VendorSpec, VendorTelemetry]:
    """Read ``vendor.yaml`` of a folder together with its checked ``telemetry`` section.

    Raises:
        SpecError: something in the file is wrong; every problem is named.
    """
    path = folder / "vendor.yaml"
    spec = parse(VendorSpec, read_yaml(path), str(path))
    return spec, telemetry_of(spec, str(path))


def telemetry_of(spec: VendorSpec, where: str) -> VendorTelemetry:
    """Check the ``telemetry`` section of a vendor.

    Raises:
        SpecError: something in it is wrong; every problem is named.
    """
    try:
        return parse(VendorTelemetry, spec.telemetry, where)
    except SpecError as error:
        raise SpecError(
            Problem(problem.where, f"telemetry.{problem.key}", problem.what, problem.hint) for problem in error.problems
        ) from error


def source_of(folder: Path, telemetry: VendorTelemetry, log_dir: Path | None = None) -> tuple[DeviceSource, ...]:
    """Return the ways in which a vendor's devices can be read, best first, at least one.

    Args:
        folder: the vendor's folder.
        telemetry: its checked ``telemetry`` section.
        log_dir: where a FlagPerf monitor script may write; without it, scripts are left out.

    Raises:
        SourceError: ``telemetry.py`` cannot be used, or nothing is declared; the message says why.
    """
    sources: list[DeviceSource] = []
    if (folder / MODULE_FILE).is_file():
        sources.append(_library(folder))
    if telemetry.tool is not None:
        from accelmark.telemetry.tool import ToolSource

        sources.append(ToolSource(telemetry.tool))
    if telemetry.script is not None and log_dir is not None:
        from accelmark.telemetry.script import ScriptSource

        sources.append(ScriptSource(folder / telemetry.script.file, log_dir, telemetry.script))
    if not sources:
        raise SourceError(telemetry.reasons.get("devices", "the vendor declares no way to read its devices"))
    return tuple(sources)


def _library(folder: Path) -> DeviceSource:
    path = folder / MODULE_FILE
    try:
        module = _module(path)
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


def _module(path: Path) -> ModuleType:
    built_in = Path(__file__).parents[1] / "vendors"
    if path.parent.parent == built_in:
        return importlib.import_module(f"accelmark.vendors.{path.parent.name}.{path.stem}")
    name = f"_accelmark_vendor_{path.parent.name}_telemetry"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
