"""The ``telemetry`` section of ``vendor.yaml``: how devices are detected and read, and a tool's output is parsed."""

from __future__ import annotations

import csv
import json
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Optional, Union

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import raising
from accelmark.spec.model import Spec, parse, read_yaml
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.telemetry.device import DeviceSample, SourceError

FieldName = Literal[
    "index", "name", "uuid", "bus_id", "driver", "power_limit_w", "utilisation", "memory_used_mib", "memory_total_mib",
    "power_w", "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "ecc_errors",
]  # fmt: skip
FIELD_NAMES: Final[frozenset[str]] = frozenset(FieldName.__args__)  # type: ignore[attr-defined]

Row = dict[str, str]
"""Field name -> text, of one device."""
Values = dict[str, Optional[Union[float, str]]]
"""Field name -> value in the unit of its name (utilisation 0..1); None where the tool reports none."""

_TEXTS: Final = frozenset({"name", "uuid", "bus_id", "driver"})
_ABSENT: Final = frozenset(
    {"", "-", "--", "/", "n/a", "na", "[n/a]", "nan", "none", "not supported", "[not supported]"}
)
_NUMBER: Final = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*([^\d\s.+-][^\d\s]*)?")
_SEPARATOR: Final = re.compile(r"[\s\-+=|*_#─═┌┐└┘├┤┬┴┼│╭╮╰╯]*")
_NO_UNIT: Final = {"": 1.0}
_MEMORY: Final = _NO_UNIT | {"mib": 1.0, "mb": 1.0, "m": 1.0, "gib": 1024.0, "gb": 1024.0, "g": 1024.0}
_POWER: Final = _NO_UNIT | {"w": 1.0, "mw": 0.001}
_CLOCK: Final = _NO_UNIT | {"mhz": 1.0, "ghz": 1000.0}
_NUMBERS: Final[dict[str, tuple[dict[str, float], float, float]]] = {
    "utilisation": ({"": 0.01, "%": 0.01}, 0.0, 1.0),
    "memory_used_mib": (_MEMORY, 0.0, 4.0 * 1024 * 1024),
    "memory_total_mib": (_MEMORY, 1.0, 4.0 * 1024 * 1024),
    "power_w": (_POWER, 0.0, 5000.0),
    "power_limit_w": (_POWER, 0.0, 5000.0),
    "temperature_c": (_NO_UNIT | {"c": 1.0, "°c": 1.0, "℃": 1.0}, -40.0, 150.0),
    "sm_clock_mhz": (_CLOCK, 0.0, 10000.0),
    "memory_clock_mhz": (_CLOCK, 0.0, 20000.0),
    "ecc_errors": (_NO_UNIT, 0.0, 1e15),
    "index": (_NO_UNIT, 0.0, 4096.0),
}
"""Field -> the factor of each unit (tools report utilisation in percent, with or without a unit), and bounds."""
_SAMPLED: Final = _NUMBERS.keys() - {"index", "power_limit_w"}


def implausible_power(samples: Iterable[DeviceSample]) -> str | None:
    """Return which device's power is out of bounds, so that its unit is wrong; equal readings give equal texts."""
    _, least, most = _NUMBERS["power_w"]
    for sample in samples:
        if sample.power_w is not None and not least <= sample.power_w <= most:
            return f"device {sample.index}: power_w is out of bounds ({least:g} to {most:g} W). Check its unit."
    return None


def _compiles(value: str) -> str:
    with raising(ValueError, "is not a regular expression", re.error):
        names = re.compile(value).groupindex
    unknown = sorted(set(names) - FIELD_NAMES)
    if unknown:
        raise ValueError(f"names the unknown field {unknown[0]!r}; known: {', '.join(sorted(FIELD_NAMES))}")
    return value


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression; named groups are fields of a device."""


class _Form(Spec):
    version: Pattern | None = None
    """Must match somewhere in the output; identifies the tool versions that print this form."""
    source: str
    """Where this form is documented (a page, a log), and the tool's version."""
    power_shared: Literal["previous", "next"] | None = None
    """A device without power is included in the power of the one before or after it (two dies on one card)."""

    @abstractmethod
    def _rows(self, text: str) -> Iterator[Row]:
        """Yield the fields of each device in a tool's output."""


class TableForm(_Form):
    """Rows below a heading. Whole lines are matched, with runs of blanks collapsed."""

    form: Literal["table"] = "table"
    header: tuple[Pattern, ...] = Field(min_length=1)
    """Consecutive heading lines; they match only if the columns are unchanged."""
    rows: tuple[Pattern, ...] = Field(min_length=1)
    ignore: tuple[Pattern, ...] = ()
    end: Pattern | None = None
    """The line that ends the table; by default an empty line or a line that names processes."""

    def _rows(self, text: str) -> Iterator[Row]:
        lines, num = _lines(text), len(self.header)
        starts = (at for at in range(len(lines) - num + 1) if all(map(re.fullmatch, self.header, lines[at : at + num])))
        start = next(starts, None)
        if start is None:
            raise SourceError("its heading is unknown (a column may have moved)")
        body: list[str] = []
        for line in lines[start + num :]:
            by_default = bool(body) and (not line or "process" in line.lower())
            if by_default if self.end is None else re.fullmatch(self.end, line):
                break
            if not _SEPARATOR.fullmatch(line) and not any(re.fullmatch(known, line) for known in self.ignore):
                body.append(line)
        step = len(self.rows)
        if len(body) % step:
            raise SourceError(f"its table has {len(body)} lines, not a multiple of {step} lines per device")
        for at in range(0, len(body), step):
            row: Row = {}
            for pattern, line in zip_strict(self.rows, body[at : at + step]):
                row |= _groups(pattern, line)
            yield row


class LinesForm(_Form):
    """Lines that contain their units, for tools whose heading is unknown."""

    form: Literal["lines"]
    like: Pattern
    """Every line that matches this must be a device's line."""
    line: Pattern
    """A device's line including units, so that it does not match if columns change."""

    def _rows(self, text: str) -> Iterator[Row]:
        return (_groups(self.line, line) for line in _lines(text) if re.fullmatch(self.like, line))


class CsvForm(_Form):
    """Comma-separated cells below a line with the column names."""

    form: Literal["csv"]
    columns: dict[FieldName, str]

    def _rows(self, text: str) -> Iterator[Row]:
        table = iter([cell.strip() for cell in row] for row in csv.reader(text.splitlines(), strict=False))
        columns = set(self.columns.values())
        names = next((cells for cells in table if columns <= set(cells)), None)
        if names is None:
            raise SourceError("its heading lacks a declared column (a column may have moved)")
        if any(names.count(name) > 1 for name in columns):
            raise SourceError("its heading names a column twice")
        for cells in filter(any, table):
            if len(cells) != len(names):
                raise SourceError(f"a row has {len(cells)} cells for {len(names)} columns")
            at = dict(zip_strict(names, cells))
            yield {field: at[column] for field, column in self.columns.items()}


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

    def _rows(self, text: str) -> Iterator[Row]:
        start = re.search(r"[\[{]", text)
        if start is None:
            raise SourceError("it contains no JSON")
        with raising(SourceError, "it is not JSON", ValueError, RecursionError):
            whole, _ = _DECODER.raw_decode(text[start.start() :])
        common = {field: _json_text(whole, path) for field, path in self.common.items()}
        value = _follow(whole, self.devices)
        devices: Iterable[tuple[Row, object]]
        if self.device is None and isinstance(value, list):
            devices = (({}, device) for device in value)
        elif self.device is not None and isinstance(value, dict):
            keys = [key for key in value if re.fullmatch(self.device, key)]
            devices = ((_groups(self.device, key), value[key]) for key in keys)
        else:
            kind = "list of devices" if self.device is None else "object with devices"
            raise SourceError(f"there is no {kind} at {self.devices!r}")
        for row, device in devices:
            yield row | common | {field: _json_text(device, path) for field, path in self.keys.items()}


Form = Annotated[Union[TableForm, LinesForm, CsvForm, JsonForm], Field(discriminator="form")]
_DECODER: Final = json.JSONDecoder(object_pairs_hook=lambda pairs: {key.strip(): value for key, value in pairs})


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def _groups(pattern: str, line: str) -> Row:
    match = re.fullmatch(pattern, line)
    if match is None:
        raise SourceError(f"the line {line[:80]!r} does not match")
    return {name: value for name, value in match.groupdict().items() if value is not None}


def _follow(value: object, path: str) -> object:
    for key in path.split("/") if path else ():
        if not isinstance(value, dict) or key not in value:
            raise SourceError(f"{path!r} is missing (an entry may have moved)")
        value = value[key]
    return value


def _json_text(device: object, path: str) -> str:
    value = _follow(device, path)
    if isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))):
        raise SourceError(f"{path!r} is not a number or a string")
    return "" if value is None else str(value)


def parse_output(text: str, form: Form) -> tuple[Values, ...]:
    """Return the values of every device in a tool's output, in the order of its rows; raises SourceError."""
    if form.version is not None and not re.search(form.version, text):
        raise SourceError("it is from another version of the tool")
    devices = tuple(map(_values, form._rows(text)))
    if not devices:
        raise SourceError("it lists no device")
    indices = [device["index"] for device in devices if device.get("index") is not None]
    if indices and (len(set(indices)) != len(devices)):
        raise SourceError("its device numbers are not unique")
    return devices


def _values(row: Row) -> Values:
    values: Values = {}
    for name, text in row.items():
        stripped = text.strip()
        is_absent = stripped.lower() in _ABSENT
        values[name] = parse_number(name, text) if name not in _TEXTS else None if is_absent else stripped
    used, total = number(values, "memory_used_mib"), number(values, "memory_total_mib")
    if used is not None and total is not None and used > total * 1.01:
        raise SourceError(f"memory used ({used:g} MiB) is more than the total ({total:g} MiB)")
    return values


def parse_number(name: str, text: str) -> float | None:
    """Return the value of a field in the unit of its name, None where there is none; raises SourceError."""
    stripped = text.strip()
    if stripped.lower() in _ABSENT:
        return None
    match = _NUMBER.fullmatch(stripped)
    units, low, high = _NUMBERS[name]
    unit = (match[2] or "").lower() if match else ""
    if match is None or unit not in units:
        raise SourceError(f"{name} is {stripped[:40]!r}: not a number, or in an unknown unit")
    value = round(float(match[1]) * units[unit], 9)
    if not low <= value <= high:
        raise SourceError(f"{name} is {stripped[:40]!r}: out of bounds")
    return value


def device_sample(at: int, values: Values) -> DeviceSample:
    """Return parsed values as a sample of a device, the one at position ``at`` of the output."""
    known: dict[str, Any] = {name: number(values, name) for name in _SAMPLED}
    errors = known.pop("ecc_errors")
    return DeviceSample(device_index(at, values), ecc_errors=None if errors is None else int(errors), **known)


def device_index(at: int, values: Values) -> int:
    """Return the device's declared index, or its position ``at`` if the tool reports none."""
    index = number(values, "index")
    return at if index is None else int(index)


def number(values: Values, name: str) -> float | None:
    """Return a numeric value, or None."""
    value = values.get(name)
    return value if isinstance(value, float) else None


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


class ToolCommand(Spec):
    """A command of a vendor's tool and the forms of its output."""

    command: tuple[str, ...] = Field(min_length=1)
    forms: tuple[Form, ...] = Field(min_length=1)
    """One per version of the tool; the first that matches is used."""

    @model_validator(mode="before")
    @classmethod
    def _default_to_table(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("forms"), list):
            forms = [{"form": "table", **form} if isinstance(form, dict) else form for form in values["forms"]]
            return {**values, "forms": forms}
        return values


class ToolRule(ToolCommand):
    """A vendor's tool."""

    timeout_s: PositiveFloat = 10.0
    identify: ToolCommand | None = None
    """A second command, run once, for fields missing in the first (names, memory); joined by ``index``."""
    reasons: dict[FieldName, str] = Field(default_factory=dict)
    """Field -> why this tool does not report it."""


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
