"""Detect the vendors whose devices are on this machine, without a framework."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from accelmark.spec.errors import AccelmarkError
from accelmark.spec.plugins.catalog import find, folders, load_vendor
from accelmark.spec.plugins.vendor import Chip
from accelmark.telemetry.declaration import Detect, VendorTelemetry, telemetry_of
from accelmark.telemetry.device import DeviceInfo, SourceError
from accelmark.telemetry.sources import device_sources, first_readable

DEVICES: Final = Path("/dev")
PCI: Final = Path("/sys/bus/pci/devices")


@final
@dataclass(frozen=True)
class DetectedVendor:
    """One vendor's devices on this machine."""

    vendor: str
    title: str
    evidence: str
    """Evidence that they are present."""
    fallback: bool
    """True for a device that every machine has (the CPU)."""
    devices: tuple[DeviceInfo, ...] = ()
    chips: tuple[Chip | None, ...] = ()
    """The chip of each device from the vendor's description; None where unknown."""
    problem: str | None = None
    """Why the devices cannot be read although they are present."""
    hint: str | None = None
    """Advice on what to install."""

    @property
    def hardware(self) -> str | None:
        """The devices' hardware name in keys; None where they are not all the same known chip and no fallback."""
        names = {None if chip is None else chip.name for chip in self.chips}
        known = names.pop() if len(names) == 1 else None
        return self.vendor.upper() if known is None and self.fallback else known


def detect(vendors: Iterable[str] | None = None, *, read: bool = True) -> tuple[DetectedVendor, ...]:
    """Return the vendors (by default of all known ones) whose devices are present, accelerators first.

    Without ``read`` the devices are not opened.
    """
    pci = pci_ids()
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
        devices, problem = _devices(folder, telemetry) if read else ((), None)
        chips = tuple(spec.chip_of(device.name, device.memory_gib) for device in devices)
        hint = None if problem is None else _hint(telemetry.detect)
        fallback = telemetry.detect.always
        detected.append(DetectedVendor(name, spec.title, evidence, fallback, devices, chips, problem, hint))
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
    """Return the evidence that a vendor's devices are present, or None; ``pci`` as :func:`pci_ids` returns it."""
    if rule.always:
        return "present on every machine"
    for pattern in rule.device_files:
        if path := min(devices.glob(pattern), default=None):
            return f"device file {path}"
    for prefix in rule.pci:
        if any(identity.startswith(prefix) for identity in pci):
            return f"PCI device {prefix}"
    return None


def pci_ids(root: Path = PCI) -> frozenset[str]:
    """Return ``vendor:class`` of all PCI devices, as sysfs writes them."""
    identities: set[str] = set()
    for device in root.glob("*"):
        with contextlib.suppress(OSError):
            identities.add(":".join((device / name).read_text().strip() for name in ("vendor", "class")))
    return frozenset(identities)


def _devices(folder: Path, telemetry: VendorTelemetry) -> tuple[tuple[DeviceInfo, ...], str | None]:
    try:
        source, devices = first_readable(device_sources(folder, telemetry), lambda source: source.open())
    except SourceError as error:
        return (), str(error)
    source.close()
    return devices, None


def _hint(rule: Detect) -> str | None:
    for module in rule.modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"install the Python module {module}"
    missing = next((tool for tool in rule.tools if shutil.which(tool) is None), None)
    return missing and f"{missing} is not on the PATH; install the driver"
