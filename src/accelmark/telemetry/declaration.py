"""Schema of the ``telemetry`` section of ``vendor.yaml``: how a vendor's devices are detected and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from accelmark.spec.model import Spec, parse, read_yaml
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.telemetry.forms import FieldName, Form, Pattern


class Detect(Spec):
    """Evidence of this vendor's devices on a machine, detected without a library; one match suffices."""

    device_files: tuple[str, ...] = ()
    """Glob patterns below ``/dev``."""
    pci: tuple[str, ...] = ()
    """``vendor:class`` in hexadecimal as sysfs writes them (``0x10de:0x0302``); the class may be a prefix."""
    tools: tuple[str, ...] = ()
    """Programs of the driver; a missing one is named when the devices cannot be read."""
    modules: tuple[str, ...] = ()
    """Python modules that read the devices; a missing one is named when the devices cannot be read."""
    always: bool = False
    """Every machine has this device, as the CPU."""


class Identify(Spec):
    """A second command, run once, for fields missing in the first (names, memory); joined by ``index``."""

    command: tuple[str, ...] = Field(min_length=1)
    forms: tuple[Form, ...] = Field(min_length=1)


class ToolRule(Spec):
    """A vendor's tool: its command and the forms of its output."""

    command: tuple[str, ...] = Field(min_length=1)
    timeout_s: PositiveFloat = 10.0
    forms: tuple[Form, ...] = Field(min_length=1)
    """One per version of the tool; the first that matches is used."""
    identify: Identify | None = None
    reasons: dict[FieldName, str] = Field(default_factory=dict)
    """Field -> why this tool does not report it."""

    @model_validator(mode="before")
    @classmethod
    def _default_to_table(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("forms"), list):
            forms = [{"form": "table", **form} if isinstance(form, dict) else form for form in values["forms"]]
            return {**values, "forms": forms}
        return values


class ScriptRule(Spec):
    """A FlagPerf monitor script (``-o start|stop|restart|status -l DIR``) in the vendor's folder."""

    file: str
    line: Pattern = (
        r"(?P<temperature_c>\S+)C (?P<power_w>\S+)W (?P<memory_used_mib>\S+)MiB (?P<memory_total_mib>\S+)MiB"
        r" (?P<utilisation>\S+)%"
    )
    """One device's line in its log, runs of blanks collapsed."""


class VendorTelemetry(Spec):
    """How a vendor's devices are detected and read. A ``telemetry.py`` next to ``vendor.yaml`` takes precedence."""

    detect: Detect = Detect()
    of_cpus: bool = False
    """The devices are the host's CPUs, with the utilisation and power of the host."""
    tool: ToolRule | None = None
    script: ScriptRule | None = None
    reasons: dict[Literal["devices"], str] = Field(default_factory=dict)
    """``devices`` -> why they cannot be read, if no source is declared above."""


def read_vendor(folder: Path) -> tuple[VendorSpec, VendorTelemetry]:
    """Read ``vendor.yaml`` of a folder with its ``telemetry`` section; raises SpecError that names every problem."""
    path = folder / "vendor.yaml"
    spec = parse(VendorSpec, read_yaml(path), str(path))
    return spec, telemetry_of(spec, str(path))


def telemetry_of(spec: VendorSpec, where: str) -> VendorTelemetry:
    """Check the ``telemetry`` section of a vendor; raises SpecError that names every problem."""
    return parse(_Section, {"telemetry": spec.telemetry}, where).telemetry


class _Section(Spec):
    telemetry: VendorTelemetry
