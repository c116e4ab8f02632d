"""What a machine has and what would run on it: devices, drivers, frameworks, engines, found without importing any."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final

from accelmark.spec.catalog import folders, framework_device, load_framework, load_launch, load_vendor
from accelmark.spec.errors import AccelmarkError, RequestError
from accelmark.spec.framework import FrameworkSpec
from accelmark.spec.vendor import VendorSpec
from accelmark.telemetry.declaration import telemetry_of
from accelmark.telemetry.detect import DetectedVendor, detect
from accelmark.telemetry.host.power import Rapl, RaplError

OTHER_FRAMEWORKS: Final = {"tensorflow": "tensorflow", "paddle": "paddle", "mindspore": "mindspore", "jax": "jax"}
"""Frameworks that are listed where AccelMark has no folder for them: name -> module."""
ENGINES: Final = {
    "inductor": "torch",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "tensorrt": "tensorrt",
    "torchtrt": "torch_tensorrt",
    "ixrt": "ixrt",
    "migraphx": "migraphx",
}
"""Inference engine -> the module it comes in."""


@final
@dataclass(frozen=True, slots=True)
class Installed:
    """A framework or engine."""

    name: str
    module: str
    version: str | None
    """None where it is not installed."""


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether something would run here, and why (not)."""

    what: str
    works: bool
    why: str


@final
@dataclass(frozen=True, slots=True)
class Inventory:
    """What ``accelmark doctor`` tells."""

    found: tuple[DetectedVendor, ...]
    frameworks: tuple[Installed, ...]
    engines: tuple[Installed, ...]
    containers: dict[str, str | None]
    """Container engine -> its path, or None."""
    verdicts: tuple[Verdict, ...]
    problems: tuple[str, ...] = field(default=())
    """Vendor folders that cannot be read."""

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        values = asdict(self)
        for entry, found in zip(values["found"], self.found, strict=True):
            entry["hardware"] = found.hardware
            entry["chips"] = [chip and chip.model_dump() for chip in found.chips]
        return values


def inventory() -> Inventory:
    """Look around on this machine; imports no framework and starts no device's runtime."""
    found = detect()
    frameworks = [load_framework(name) for name in folders("frameworks")]
    modules = {**{spec.name: spec.module for spec in frameworks}, **OTHER_FRAMEWORKS}
    problems = tuple(_vendor_problems())
    verdicts = [
        *(_on_devices(entry, load_vendor(entry.vendor), spec) for entry in found for spec in frameworks),
        *(_readable(entry) for entry in found),
        *(_known_chip(entry, load_vendor(entry.vendor)) for entry in found if entry.problem is None),
        _rapl(),
        _ipmi(),
    ]
    return Inventory(
        found,
        tuple(_installed(modules)),
        tuple(_installed(ENGINES)),
        {engine: shutil.which(engine) for engine in ("docker", "podman")},
        tuple(verdicts),
        problems,
    )


def _installed(modules: dict[str, str]) -> list[Installed]:
    return [Installed(name, module, _version(module)) for name, module in modules.items()]


def _version(module: str) -> str | None:
    if not _is_there(module):
        return None
    for name in dict.fromkeys((*_distributions().get(module, ()), module)):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _distributions() -> dict[str, tuple[str, ...]]:
    # Reading every distribution's file list takes longer than all else here; these are the names that differ.
    return {
        "torch": ("torch",),
        "paddle": ("paddlepaddle-gpu", "paddlepaddle"),
        "onnxruntime": ("onnxruntime-gpu", "onnxruntime"),
        "torch_tensorrt": ("torch-tensorrt",),
        "tensorflow": ("tensorflow", "tensorflow-cpu"),
    }


def _on_devices(entry: DetectedVendor, vendor: VendorSpec, framework: FrameworkSpec) -> Verdict:
    try:
        device = framework_device(vendor, framework.name)
    except RequestError as error:
        return Verdict(f"{framework.name} on {entry.vendor}", False, str(error))
    what = f"{framework.name} on {entry.vendor} ({device.device_type})"
    version = _version(framework.module)
    if version is None:
        requirements = " ".join(f"'{requirement}'" for requirement in framework.requires)
        return Verdict(what, False, f"{framework.title} is not installed: pip install {requirements}")
    if device.module is not None:
        there = _is_there(device.module)
        need = f"{device.module}, which registers the device with {framework.title}"
        return Verdict(what, there, f"{need}, is {'installed' if there else 'not installed'}")
    support = load_launch(framework.name).device_support(device.device_type, version)
    return Verdict(what, support.works, support.reason)


def _readable(entry: DetectedVendor) -> Verdict:
    what = f"telemetry of {entry.vendor}"
    if entry.problem is not None:
        return Verdict(what, False, entry.problem + (f" ({entry.hint})" if entry.hint else ""))
    without = sorted({name for device in entry.devices for name in device.reasons})
    lacking = f"; without {', '.join(without)}" if without else ""
    return Verdict(what, True, f"{len(entry.devices)} device(s){lacking}")


def _known_chip(entry: DetectedVendor, spec: VendorSpec) -> Verdict:
    what = f"MFU on {entry.vendor}"
    for device, chip in zip(entry.devices, entry.chips, strict=True):
        if chip is None:
            return Verdict(what, False, f"{device.name}: {spec.unknown_chip}")
        if chip.peaks.bf16 is None and chip.peaks.fp16 is None and chip.peaks.fp32 is None:
            return Verdict(what, False, f"{device.name}: {chip.source}")
    names = sorted({f"{chip.name} {chip.variant}".strip() for chip in entry.chips if chip is not None})
    return Verdict(what, bool(names), ", ".join(names) or "there are no devices")


def _rapl() -> Verdict:
    try:
        return Verdict("power of CPU packages", True, f"RAPL, {Rapl().num_packages} package(s)")
    except RaplError as error:
        return Verdict("power of CPU packages", False, str(error))


def _ipmi() -> Verdict:
    tool = shutil.which("ipmitool")
    why = f"{tool} (needs access to the management controller)" if tool else "ipmitool is not installed"
    return Verdict("power of the whole host", tool is not None, why)


def _vendor_problems() -> list[str]:
    problems: list[str] = []
    for name, folder in folders("vendors").items():
        try:
            telemetry_of(load_vendor(name), str(folder.path / "vendor.yaml"))
        except AccelmarkError as error:
            problems.append(str(error))
    return problems
