"""Description of a vendor's platform: ``vendors/<vendor>/vendor.yaml``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PositiveFloat, StringConstraints

from accelmark.spec.errors import raising
from accelmark.spec.model import Spec


def _compiles(value: str) -> str:
    with raising(ValueError, "is not a regular expression", re.error):
        re.compile(value)
    return value


Regex = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_compiles)]
"""A regular expression, as text."""


class Peaks(Spec):
    """Dense peak rates of one chip in TFLOP/s (int8: TOP/s), never with sparsity; null where its maker states none."""

    fp64: PositiveFloat | None = None
    fp32: PositiveFloat | None = None
    tf32: PositiveFloat | None = None
    bf16: PositiveFloat | None = None
    fp16: PositiveFloat | None = None
    fp8: PositiveFloat | None = None
    int8: PositiveFloat | None = None


class Chip(Spec):
    """One chip: how to recognise it, and its published figures."""

    name: str
    """The name used in keys (``H100``), unique within its vendor together with ``variant``."""
    variant: str = ""
    """Variant of chips of the same name (``SXM``, ``PCIe``)."""
    device_name: Regex
    """Regular expression that the whole device name has to match, ignoring case."""
    memory_gib: tuple[float, float] | None = None
    """Range of device memory, if the device name is ambiguous."""
    memory_bandwidth_gb_s: PositiveFloat | None = None
    """Published memory bandwidth, 1e9 bytes per second."""
    tdp_w: PositiveFloat | None = None
    """Published thermal design power in watts."""
    peaks: Peaks
    capabilities: tuple[str, ...] = ()
    """Capabilities (``fp8``), which ``config_<capability>.yaml`` in a case's folder is named after."""
    source: str
    """Source of the figures: a document and its address or number."""

    @property
    def title(self) -> str:
        """Name and variant."""
        return f"{self.name} {self.variant}".strip()

    @property
    def key_names(self) -> frozenset[str]:
        """What keys may name it, in lower case: its name, alone or with its variant."""
        return frozenset({self.name.lower(), f"{self.name}-{self.variant}".removesuffix("-").lower()})

    def matches_name(self, device_name: str) -> bool:
        """Return whether a device with this name may be this chip, whatever its memory."""
        return re.fullmatch(self.device_name, device_name.strip(), re.IGNORECASE) is not None

    def matches(self, device_name: str, memory_gib: float | None) -> bool:
        """Return whether a device with this name (and memory, if required) is this chip."""
        if not self.matches_name(device_name):
            return False
        if self.memory_gib is None:
            return True
        return memory_gib is not None and self.memory_gib[0] <= memory_gib <= self.memory_gib[1]


class CapabilityFile(Spec):
    """A file of the host that shows whether it has a capability."""

    file: Path
    """Name of the configuration file of the capability."""
    pattern: Regex
    """Searched for in the file."""


class ContainerDefaults(Spec):
    """Container options that give access to this vendor's devices."""

    options: tuple[str, ...] = ()
    """Options of Docker and Podman, one argument each."""
    apptainer_options: tuple[str, ...] = ()
    """Options of Apptainer, which has the host's ``/dev`` without any."""
    mounts: tuple[str, ...] = ()
    """``host path:container path[:ro]``."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables inside the container."""


class FrameworkDevice(Spec):
    """A vendor's device in one framework."""

    device_type: str
    """The framework's name of the device (``cuda``, ``npu``, ``cpu``)."""
    module: str | None = None
    """Module that registers the device with the framework when imported (``torch_npu``); null: none is needed."""
    collective_backend: str
    """The framework's name of the collective backend (``nccl``, ``hccl``, ``gloo``)."""
    requires: tuple[str, ...] = ()
    """Packages that the framework needs for this device, in addition to its general packages (``jax[cuda13]``)."""
    index: str | None = None
    """Address of a package index with the framework's builds for this device, in addition to PyPI; null: none."""
    size_gb: float | None = None
    """Size of the installed framework with its packages for this device, in GB; null: not known."""


class VendorSpec(Spec):
    """A vendor's platform."""

    name: str
    """Name of the folder."""
    title: str
    """The maker's name in reports."""
    frameworks: dict[str, FrameworkDevice]
    """Framework -> device; frameworks that are not listed do not run on this platform."""
    visible_devices_env: str | None
    """Environment variable that limits the devices visible to a process; null if there is none."""
    container: ContainerDefaults = ContainerDefaults()
    telemetry: dict[str, Any] = Field(default_factory=dict)
    """How to read its devices; validated by ``accelmark.telemetry``."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every rank."""
    reported_variables: tuple[str, ...] = ()
    """Prefixes of variables that change how its devices and collectives run, recorded in ``sys_info.json``."""
    chips: tuple[Chip, ...]
    capabilities: dict[str, CapabilityFile] = Field(default_factory=dict)
    """Capability -> the file that shows whether this host's device has it."""
    cannot_run: str | None = None
    """Why no case can run on it yet, even if its devices can be read; null if cases can run."""
    unknown_chip: str = "its vendor's list names no chip that matches this device"
    """Reason for missing peak rates on a device that matches no chip, shown next to each null figure."""

    @property
    def uses_host_cpu(self) -> bool:
        """Whether the devices are the host's CPUs."""
        return bool(self.frameworks) and all(device.device_type.lower() == "cpu" for device in self.frameworks.values())

    def chip_of(self, device_name: str, memory_gib: float | None) -> Chip | None:
        """Return the chip that matches, or None if none or several do."""
        matching = [chip for chip in self.chips if chip.matches(device_name, memory_gib)]
        return matching[0] if len(matching) == 1 else None
