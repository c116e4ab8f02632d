"""The ``telemetry`` section of ``vendor.yaml``: how a vendor's devices are found and read, as data."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from accelmark.spec.model import Spec

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
    """What shows that this vendor's devices are on a machine, without any library: one of these suffices."""

    device_files: tuple[str, ...] = ()
    """Glob patterns below ``/dev``."""
    pci: tuple[str, ...] = ()
    """``vendor:class`` in hexadecimal as sysfs writes them (``0x10de:0x0302``); the class may be a prefix."""
    tools: tuple[str, ...] = ()
    """Programs that come with the driver: not proof of a device, named when it cannot be read."""
    modules: tuple[str, ...] = ()
    """Python modules that read the devices, named when they are not installed."""
    always: bool = False
    """Every machine has one (the CPU)."""


class _Form(Spec):
    version: Pattern | None = None
    """Has to be found in the output: the versions of the tool that this form was seen in."""
    source: str
    """Where this form was seen (a page, a document, a log), and in which version of the tool."""
    power_shared: Literal["previous", "next"] | None = None
    """A device without power is counted with the device before or after it (two dies on one card)."""


class TableForm(_Form):
    """Rows below a heading. Lines are compared with their blanks collapsed, each as a whole."""

    form: Literal["table"] = "table"
    header: tuple[Pattern, ...] = Field(min_length=1)
    """Lines that stand one after another, whose match proves that no column has moved."""
    rows: tuple[Pattern, ...] = Field(min_length=1)
    """The lines of one device."""
    ignore: tuple[Pattern, ...] = ()
    """Other lines that may stand between devices."""
    end: Pattern | None = None
    """The line that ends the table; by default an empty line or one that names processes."""


class LinesForm(_Form):
    """Lines that carry their own units, for tools whose heading is not known."""

    form: Literal["lines"]
    like: Pattern
    """Every line that matches this has to be a device's line."""
    line: Pattern
    """A device's line, with the units in it, so that a column that moves no longer matches."""


class CsvForm(_Form):
    """Comma-separated cells below a line with their names."""

    form: Literal["csv"]
    columns: dict[FieldName, str]
    """Field -> name of its column, exactly."""


class JsonForm(_Form):
    """JSON with one object a device. Blanks around keys do not count."""

    form: Literal["json"]
    devices: str = ""
    """Path of what holds the devices, keys joined by ``/``; empty: the whole."""
    device: Pattern | None = None
    """Matches the key of a device where an object holds them; null where a list does."""
    keys: dict[FieldName, str]
    """Field -> path of its value within a device."""
    common: dict[FieldName, str] = Field(default_factory=dict)
    """Field -> path of its value within the whole, the same for all devices."""


Form = Annotated[TableForm | LinesForm | CsvForm | JsonForm, Field(discriminator="form")]


class Identify(Spec):
    """A second call, made once, for what the first does not tell (names, memory); joined by ``index``."""

    command: tuple[str, ...] = Field(min_length=1)
    forms: tuple[Form, ...] = Field(min_length=1)


class ToolRule(Spec):
    """A vendor's tool: how it is called, and the forms its output has."""

    command: tuple[str, ...] = Field(min_length=1)
    timeout_s: PositiveFloat = 10.0
    forms: tuple[Form, ...] = Field(min_length=1)
    """One a version of the tool; the first that fits is taken."""
    identify: Identify | None = None
    reasons: dict[FieldName, str] = Field(default_factory=dict)
    """Field -> why this tool does not give it."""

    @model_validator(mode="before")
    @classmethod
    def _table_is_usual(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("forms"), list):
            forms = [{"form": "table", **form} if isinstance(form, dict) else form for form in values["forms"]]
            return {**values, "forms": forms}
        return values


class ScriptRule(Spec):
    """A FlagPerf monitor script (``-o start|stop|restart|status -l DIR``) that stands in the vendor's folder."""

    file: str
    line: Pattern = (
        r"(?P<temperature_c>\S+)C (?P<power_w>\S+)W (?P<memory_used_mib>\S+)MiB (?P<memory_total_mib>\S+)MiB"
        r" (?P<utilisation>\S+)%"
    )
    """One device's line in its log, blanks collapsed."""


class VendorTelemetry(Spec):
    """How a vendor's devices are found and read. A ``telemetry.py`` beside ``vendor.yaml`` comes first, if there."""

    detect: Detect = Detect()
    tool: ToolRule | None = None
    script: ScriptRule | None = None
    reasons: dict[Literal["devices"], str] = Field(default_factory=dict)
    """``devices`` -> why they cannot be read at all, where nothing above does."""
