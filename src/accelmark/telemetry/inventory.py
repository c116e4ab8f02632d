"""Inventory of a machine: vendors and devices, drivers, frameworks, engines, what can run; nothing is imported."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import AccelmarkError, RequestError
from accelmark.spec.number_format import counted
from accelmark.spec.plugins import catalog
from accelmark.spec.plugins.catalog import find, folders, load_vendor
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.plugins.vendor import Chip, VendorSpec
from accelmark.telemetry.device import DeviceInfo, SourceError
from accelmark.telemetry.forms import Detect, telemetry_of
from accelmark.telemetry.host import Rapl
from accelmark.telemetry.sources import device_sources, first_readable

DEVICES: Final = Path("/dev")


@dataclass(frozen=True)
class DetectedVendor:
    """One vendor's devices on this machine."""

    vendor: str
    title: str
    evidence: str
    fallback: bool
    """True for a device that every machine has (the CPU)."""
    devices: tuple[DeviceInfo, ...] = ()
    chips: tuple[Chip | None, ...] = ()
    problem: str | None = None
    hint: str | None = None
    hardware: str | None = None
    """The devices' hardware name in keys; None where they are not all the same known chip and no fallback."""


def detect(vendors: Iterable[str] | None = None, *, read: bool = True) -> tuple[DetectedVendor, ...]:
    """Return the vendors (by default all known) whose devices are present, accelerators first."""
    pci: set[str] = set()
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            pci.add(":".join((device / name).read_text().strip() for name in ("vendor", "class")))
    detected: list[DetectedVendor] = []
    for name in folders("vendors") if vendors is None else vendors:
        try:
            spec, folder = load_vendor(name), find("vendors", name).path
            telemetry = telemetry_of(spec, str(folder / "vendor.yaml"))
        except AccelmarkError:
            # `vendors` and `doctor` report a broken vendor folder; it must not prevent the detection of others.
            continue
        evidence = evidence_of(telemetry.detect, pci)
        if evidence is None:
            continue
        devices: tuple[DeviceInfo, ...] = ()
        problem = hint = None
        if read:
            try:
                source, devices = first_readable(device_sources(folder, telemetry), lambda source: source.open())
                source.close()
            except SourceError as error:
                problem, hint = str(error), _hint(telemetry.detect)
        chips = tuple(spec.chip_of(device.name, device.memory_gib) for device in devices)
        fallback, names = telemetry.detect.always, {None if chip is None else chip.name for chip in chips}
        hardware = (names.pop() if len(names) == 1 else None) or (name.upper() if fallback else None)
        detected.append(DetectedVendor(name, spec.title, evidence, fallback, devices, chips, problem, hint, hardware))
    return tuple(sorted(detected, key=lambda entry: (entry.fallback, entry.problem is not None, entry.vendor)))


def default_vendor() -> str:
    """Return the vendor to measure by default: the first accelerator that can be read, else the CPU."""
    return measurable_vendors()[0]


def measurable_vendors() -> tuple[str, ...]:
    """Return the vendors of the accelerators of this machine that can be read, by name; without one, the CPU's."""
    detected = detect()
    accelerators = [entry.vendor for entry in detected if entry.problem is None and not entry.fallback]
    return tuple(accelerators or [entry.vendor for entry in detected if entry.fallback] or ["cpu"])


def evidence_of(rule: Detect, pci: Iterable[str], devices: Path = DEVICES) -> str | None:
    """Return the evidence that a vendor's devices are present, or None; ``pci`` has ``vendor:class`` of PCI devices."""
    if rule.always:
        return "present on every machine"
    for pattern in rule.device_files:
        if path := min(devices.glob(pattern), default=None):
            return f"device file {path}"
    for prefix in rule.pci:
        if any(identity.startswith(prefix) for identity in pci):
            return f"PCI device {prefix}"
    return None


def _hint(rule: Detect) -> str | None:
    for module in rule.modules:
        if not _is_there(module.partition(".")[0]):
            return f"install the Python module {module}"
    missing = next((tool for tool in rule.tools if shutil.which(tool) is None), None)
    return missing and f"{missing} is not on the PATH; install the driver"


@dataclass(frozen=True)
class Installed:
    """A framework or engine."""

    name: str
    module: str
    version: str | None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Support:
    """Whether something works here, and the version or reason."""

    what: str
    works: bool
    why: str


@dataclass(frozen=True)
class Inventory:
    """The report of ``accelmark doctor``."""

    found: tuple[DetectedVendor, ...]
    frameworks: tuple[Installed, ...]
    engines: tuple[Installed, ...]
    containers: dict[str, str | None]
    support: tuple[Support, ...]
    problems: tuple[str, ...] = ()
    """Errors in the files of vendors and frameworks, and directories of plug-ins that do not exist or have none."""


def inventory(environments: Mapping[str, Path]) -> Inventory:
    """Inspect this machine; ``environments`` are the virtual environments of frameworks. No framework is imported."""
    detected = detect()
    frameworks, unreadable = catalog.readable("frameworks", catalog.load_framework)
    support: list[Support] = []
    problems = [*catalog.unread_plugins()]
    for entry in detected:
        vendor = catalog.load_vendor(entry.vendor)
        support += (_on_devices(entry, vendor, spec, environments.get(spec.name)) for spec in frameworks.values())
    for entry in detected:
        without = sorted({name for device in entry.devices for name in device.reasons})
        works = counted(len(entry.devices), "device") + (f"; without {', '.join(without)}" if without else "")
        hint = f" ({entry.hint})" if entry.hint else ""
        why = works if entry.problem is None else entry.problem + hint
        support.append(Support(f"telemetry of {entry.vendor}", entry.problem is None, why))
    support += (_known_chip(entry, catalog.load_vendor(entry.vendor)) for entry in detected if entry.problem is None)
    try:
        support.append(Support("power of CPU packages", True, f"RAPL, {Rapl().num_packages} package(s)"))
    except SourceError as error:
        support.append(Support("power of CPU packages", False, str(error)))
    tool = shutil.which("ipmitool")
    why = f"{tool} (needs access to the management controller)" if tool else "ipmitool is not installed"
    support.append(Support("power of the whole host", tool is not None, why))
    for name, folder in catalog.folders("vendors").items():
        try:
            telemetry_of(catalog.load_vendor(name), str(folder.path / "vendor.yaml"))
        except AccelmarkError as error:
            problems.append(str(error))
    engines = catalog.engine_specs().items()
    return Inventory(
        detected,
        tuple(Installed(spec.name, spec.module, _version(spec)) for spec in frameworks.values()),
        tuple(Installed(name, spec.module, _version(spec), tuple(spec.options)) for name, spec in engines),
        {engine: shutil.which(engine) for engine in ("docker", "podman")},
        tuple(support),
        (*problems, *unreadable),
    )


def _version(spec: FrameworkSpec | catalog.EngineSpec) -> str | None:
    """Return the version of the first installed distribution; a search by file would take far longer."""
    if not _is_there(spec.module):
        return None
    for name in dict.fromkeys((*spec.distributions, spec.module)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"


def _is_there(module: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False


def _on_devices(
    entry: DetectedVendor, vendor: VendorSpec, framework: FrameworkSpec, environment: Path | None
) -> Support:
    try:
        device = catalog.framework_device(vendor, framework.name)
    except RequestError as error:
        return Support(f"{framework.name} on {entry.vendor}", False, str(error))
    what = f"{framework.name} on {entry.vendor} ({device.device_type})"
    if environment is not None:
        unchecked = "" if device.device_type == "cpu" else f", whose build for {device.device_type} is not checked"
        return Support(what, True, f"in the environment {environment}{unchecked}")
    version = _version(framework)
    if version is None:
        size = f" ({device.size_gb:g} GB)" if device.size_gb is not None else ""
        create = f"accelmark env create {framework.name} --vendor {vendor.name}{size}"
        return Support(what, False, f"{framework.title} is not installed in this Python: run {create}")
    if device.module is not None:
        there = _is_there(device.module)
        need = f"{device.module}, which registers the device with {framework.title}"
        return Support(what, there, f"{need}, is {'installed' if there else 'not installed'}")
    support = catalog.load_launch(framework.name).device_support(device.device_type, version)
    return Support(what, support.works, support.reason)


def _known_chip(entry: DetectedVendor, spec: VendorSpec) -> Support:
    what = f"MFU on {entry.vendor}"
    for device, chip in zip_strict(entry.devices, entry.chips):
        if chip is None:
            return Support(what, False, f"{device.name}: {spec.unknown_chip}")
        if chip.peaks.bf16 is None and chip.peaks.fp16 is None and chip.peaks.fp32 is None:
            return Support(what, False, f"{device.name}: {chip.source}")
    names = sorted({f"{chip.name} {chip.variant}".strip() for chip in entry.chips if chip is not None})
    return Support(what, bool(names), ", ".join(names) or "no devices")
