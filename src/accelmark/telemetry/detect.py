"""Which vendors' devices are on this machine, found without a framework and quickly where there are none."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from accelmark.spec.catalog import find, folders, load_vendor
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.vendor import Chip
from accelmark.telemetry.rule import Detect
from accelmark.telemetry.sample import DeviceInfo
from accelmark.telemetry.source import SourceError, source_of, telemetry_of

DEVICES: Final = Path("/dev")
PCI: Final = Path("/sys/bus/pci/devices")


@final
@dataclass(frozen=True, slots=True)
class Found:
    """One vendor's devices on this machine."""

    vendor: str
    title: str
    evidence: str
    """What showed that they are here."""
    fallback: bool
    """True for what every machine has (the CPU)."""
    devices: tuple[DeviceInfo, ...] = ()
    chips: tuple[Chip | None, ...] = ()
    """The chip of each device as the vendor describes it; None where it is not known."""
    problem: str | None = None
    """Why the devices cannot be read although they are here."""
    hint: str | None = None

    @property
    def hardware(self) -> str | None:
        """The name that keys use for the devices, or None where they are not one known chip."""
        if self.fallback:
            return self.vendor.upper()
        names = {None if chip is None else chip.name for chip in self.chips}
        return names.pop() if len(names) == 1 else None


def detect(vendors: Iterable[str] | None = None, *, read: bool = True) -> tuple[Found, ...]:
    """Return the vendors whose devices are here, accelerators first, each with its devices.

    Args:
        vendors: names to look for; None looks for all that are known.
        read: open the devices and name them; without it only the evidence is looked for.
    """
    pci = pci_ids()
    found: list[Found] = []
    for name in folders("vendors") if vendors is None else vendors:
        try:
            spec = load_vendor(name)
            folder = find("vendors", name).path
            telemetry = telemetry_of(spec, str(folder / "vendor.yaml"))
        except AccelmarkError:
            # A broken vendor folder is reported by `vendors` and `doctor`; it must not keep others from being found.
            continue
        evidence = evidence_of(telemetry.detect, pci)
        if evidence is None:
            continue
        entry = Found(name, spec.title, evidence, telemetry.detect.always)
        if read:
            devices, problem = _devices(folder)
            chips = tuple(spec.chip_of(device.name, device.memory_gib) for device in devices)
            hint = None if problem is None else _hint(telemetry.detect)
            entry = Found(name, spec.title, evidence, telemetry.detect.always, devices, chips, problem, hint)
        found.append(entry)
    return tuple(sorted(found, key=lambda entry: (entry.fallback, entry.problem is not None, entry.vendor)))


def default_vendor() -> str:
    """Return the vendor to measure when nobody named one: the accelerator here that can be read, else the CPU."""
    found = detect()
    readable = [entry.vendor for entry in found if entry.problem is None]
    return (readable or [entry.vendor for entry in found if entry.fallback] or ["cpu"])[0]


def evidence_of(rule: Detect, pci: Iterable[str], devices: Path = DEVICES) -> str | None:
    """Return what shows that a vendor's devices are here, or None.

    Args:
        rule: what to look for.
        pci: ``vendor:class`` of all PCI devices.
        devices: where device files are.
    """
    if rule.always:
        return "every machine has one"
    for pattern in rule.device_files:
        path = next(iter(sorted(devices.glob(pattern))), None)
        if path is not None:
            return f"device file {path}"
    for wanted in rule.pci:
        if any(identity.startswith(wanted) for identity in pci):
            return f"PCI device {wanted}"
    return None


def pci_ids(root: Path = PCI) -> frozenset[str]:
    """Return ``vendor:class`` of all PCI devices, as sysfs writes them."""
    found: set[str] = set()
    if root.is_dir():
        for device in root.iterdir():
            try:
                vendor = (device / "vendor").read_text().strip()
                found.add(f"{vendor}:{(device / 'class').read_text().strip()}")
            except OSError:
                continue
    return frozenset(found)


def _devices(folder: Path) -> tuple[tuple[DeviceInfo, ...], str | None]:
    problems: list[str] = []
    try:
        sources = source_of(folder, telemetry_of(load_vendor(folder.name), str(folder)))
    except (AccelmarkError, SourceError) as error:
        return (), str(error)
    for source in sources:
        try:
            return source.open(), None
        except SourceError as error:
            problems.append(str(error))
        except Exception as error:  # noqa: BLE001 - a vendor's reader may raise anything; the reason is shown
            problems.append(f"{type(source).__name__}.open() raises {type(error).__name__}: {error}")
        finally:
            source.close()
    return (), "; ".join(problems)


def _hint(rule: Detect) -> str | None:
    for module in rule.modules:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"the Python module {module} is not installed"
    for tool in rule.tools:
        if shutil.which(tool) is None:
            return f"{tool} is not on the PATH: is the driver installed?"
    return None
