"""Schema of the ``telemetry`` section of ``vendor.yaml``: how a vendor's devices are detected and read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import Spec, parse, read_yaml
from accelmark.spec.plugins.vendor import VendorSpec

FieldName = Literal[
    "index", "name", "uuid", "bus_id", "driver", "power_limit_w", "utilisation", "memory_used_mib", "memory_total_mib",
    "power_w", "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "ecc_errors",
]  # fmt: skip
FIELD_NAMES: Final[frozenset[str]] = frozenset(FieldName.__args__)  # type: ignore[attr-defined]


def _compiles(value: str) -> str:
    try:
        names = re.compile(value).groupindex
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from error
    unknown = sorted(set(names) - FIELD_NAMES)
    if unknown:
        raise ValueError(f"names the unknown field {unknown[0]!r}; known: {', '.join(sorted(FIELD_NAMES))}")
    return value


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression; named groups are fields of a device."""


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
    """Every machine has this device (the CPU)."""


class _Form(Spec):
    version: Pattern | None = None
    """Must match somewhere in the output; identifies the tool versions that print this form."""
    source: str
    """Where this form is documented (a page, a log), and the tool's version."""
    power_shared: Literal["previous", "next"] | None = None
    """A device without power is included in the power of the one before or after it (two dies on one card)."""


class TableForm(_Form):
    """Rows below a heading. Whole lines are matched, with runs of blanks collapsed."""

    form: Literal["table"] = "table"
    header: tuple[Pattern, ...] = Field(min_length=1)
    """Consecutive heading lines; they match only if the columns are unchanged."""
    rows: tuple[Pattern, ...] = Field(min_length=1)
    """The lines of one device."""
    ignore: tuple[Pattern, ...] = ()
    """Other lines allowed between devices."""
    end: Pattern | None = None
    """The line that ends the table; by default an empty line or one that names processes."""


class LinesForm(_Form):
    """Lines that contain their units, for tools whose heading is unknown."""

    form: Literal["lines"]
    like: Pattern
    """Every line that matches this must be a device's line."""
    line: Pattern
    """A device's line including units, so that it does not match if columns change."""


class CsvForm(_Form):
    """Comma-separated cells below a line with the column names."""

    form: Literal["csv"]
    columns: dict[FieldName, str]
    """Field -> exact name of its column."""


class JsonForm(_Form):
    """JSON with one object per device. Blanks around keys are ignored."""

    form: Literal["json"]
    devices: str = ""
    """Path of the list or object of devices, keys joined by ``/``; empty: the document."""
    device: Pattern | None = None
    """Matches the key of a device in an object; null for a list."""
    keys: dict[FieldName, str]
    """Field -> path of its value within a device."""
    common: dict[FieldName, str] = Field(default_factory=dict)
    """Field -> path of its value within the document, the same for all devices."""


Form = Annotated[TableForm | LinesForm | CsvForm | JsonForm, Field(discriminator="form")]


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
    tool: ToolRule | None = None
    script: ScriptRule | None = None
    reasons: dict[Literal["devices"], str] = Field(default_factory=dict)
    """``devices`` -> why they cannot be read, if no source is declared above."""


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
