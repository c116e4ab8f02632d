"""Parse a tool's output by its declared form; raises ``UnreadableError`` if it does not match."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from accelmark.telemetry.declaration import CsvForm, Form, JsonForm, LinesForm, TableForm
from accelmark.telemetry.device import DeviceSample

Row = dict[str, str]
"""Field name -> text, of one device."""
Values = dict[str, float | str | None]
"""Field name -> value in the unit of its name (utilisation 0..1); None where the tool reports none."""

_TEXTS: Final = frozenset({"name", "uuid", "bus_id", "driver"})
_ABSENT: Final = frozenset(
    {"", "-", "--", "/", "n/a", "na", "[n/a]", "nan", "none", "not supported", "[not supported]"}
)
_NUMBER: Final = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*([^\d\s.+-][^\d\s]*)?")
_SEPARATOR: Final = re.compile(r"[\s\-+=|*_#─═┌┐└┘├┤┬┴┼│╭╮╰╯]*")
_END: Final = re.compile(r"(?i).*process.*")
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


class UnreadableError(Exception):
    """The output does not match the form; the message says where."""


def parse_output(text: str, form: Form) -> tuple[Values, ...]:
    """Return the values of every device in a tool's output, in the order of its rows.

    Raises:
        UnreadableError: the output has another form, or a value has an unknown unit or is out of bounds.
    """
    if form.version is not None and not re.search(form.version, text):
        raise UnreadableError("it is from another version of the tool")
    rows = _ROWS[type(form)](text, form)
    devices = tuple(_values(row) for row in rows)
    if not devices:
        raise UnreadableError("it lists no device")
    indices = [device["index"] for device in devices if device.get("index") is not None]
    if indices and (len(set(indices)) != len(devices)):
        raise UnreadableError("its device numbers are not unique")
    return devices


def _values(row: Row) -> Values:
    values: Values = {}
    for name, text in row.items():
        if name in _TEXTS:
            stripped = text.strip()
            values[name] = stripped if stripped.lower() not in _ABSENT else None
        else:
            values[name] = parse_number(name, text)
    used, total = values.get("memory_used_mib"), values.get("memory_total_mib")
    if isinstance(used, float) and isinstance(total, float) and used > total * 1.01:
        raise UnreadableError(f"memory used ({used:g} MiB) is more than the total ({total:g} MiB)")
    return values


def parse_number(name: str, text: str) -> float | None:
    """Return the value of a field in the unit of its name; None where the tool reports none.

    Raises:
        UnreadableError: it is not a number, has an unknown unit, or is out of bounds.
    """
    stripped = text.strip()
    if stripped.lower() in _ABSENT:
        return None
    found = _NUMBER.fullmatch(stripped)
    if found is None:
        raise UnreadableError(f"{name} is {stripped[:40]!r}")
    units, low, high = _NUMBERS[name]
    unit = (found[2] or "").lower()
    if unit not in units:
        raise UnreadableError(f"{name} is {stripped[:40]!r}: unknown unit")
    value = round(float(found[1]) * units[unit], 9)
    if not math.isfinite(value) or not low <= value <= high:
        raise UnreadableError(f"{name} is {stripped[:40]!r}: out of bounds")
    return value


def _table_rows(text: str, form: TableForm) -> Iterator[Row]:
    lines = [" ".join(line.split()) for line in text.splitlines()]
    start = _after_header(lines, form.header)
    body: list[str] = []
    for line in lines[start:]:
        if _ends(line, form.end, bool(body)):
            break
        if not _SEPARATOR.fullmatch(line) and not any(re.fullmatch(known, line) for known in form.ignore):
            body.append(line)
    step = len(form.rows)
    if len(body) % step:
        raise UnreadableError(f"its table has {len(body)} lines, not a multiple of {step} lines per device")
    for at in range(0, len(body), step):
        row: Row = {}
        for pattern, line in zip(form.rows, body[at : at + step], strict=True):
            found = re.fullmatch(pattern, line)
            if found is None:
                raise UnreadableError(f"the line {line[:80]!r} does not match")
            row |= {name: value for name, value in found.groupdict().items() if value is not None}
        yield row


def _ends(line: str, end: str | None, started: bool) -> bool:
    if end is not None:
        return re.fullmatch(end, line) is not None
    return started and (not line or _END.fullmatch(line) is not None)


def _after_header(lines: list[str], header: tuple[str, ...]) -> int:
    for start in range(len(lines) - len(header) + 1):
        if all(re.fullmatch(pattern, lines[start + offset]) for offset, pattern in enumerate(header)):
            return start + len(header)
    raise UnreadableError("its heading is unknown (a column may have moved)")


def _csv_rows(text: str, form: CsvForm) -> Iterator[Row]:
    table = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines(), strict=False)]
    wanted = set(form.columns.values())
    heads = [at for at, cells in enumerate(table) if wanted <= set(cells)]
    if not heads:
        raise UnreadableError("its heading lacks a declared column (a column may have moved)")
    names = table[heads[0]]
    if any(names.count(name) > 1 for name in wanted):
        raise UnreadableError("its heading names a column twice")
    for cells in table[heads[0] + 1 :]:
        if not any(cells):
            continue
        if len(cells) != len(names):
            raise UnreadableError(f"a row has {len(cells)} cells for {len(names)} columns")
        at = dict(zip(names, cells, strict=True))
        yield {field: at[column] for field, column in form.columns.items()}


def _line_rows(text: str, form: LinesForm) -> Iterator[Row]:
    for line in (" ".join(line.split()) for line in text.splitlines()):
        if re.fullmatch(form.like, line):
            found = re.fullmatch(form.line, line)
            if found is None:
                raise UnreadableError(f"the line {line[:80]!r} does not match")
            yield {name: value for name, value in found.groupdict().items() if value is not None}


def _json_rows(text: str, form: JsonForm) -> Iterator[Row]:
    starts = [at for at in (text.find("{"), text.find("[")) if at >= 0]
    if not starts:
        raise UnreadableError("it contains no JSON")
    try:
        loaded, _ = json.JSONDecoder().raw_decode(text[min(starts) :])
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is not JSON: {str(error)[:80]}") from error
    whole = _stripped(loaded)
    held = _follow(whole, form.devices)
    common = {field: _json_text(whole, path) for field, path in form.common.items()}
    for found, device in _json_devices(held, form):
        if not isinstance(device, dict):
            raise UnreadableError("a device is not an object")
        yield found | common | {field: _json_text(device, path) for field, path in form.keys.items()}


def _json_devices(held: object, form: JsonForm) -> Iterator[tuple[Row, object]]:
    if form.device is None:
        if not isinstance(held, list):
            raise UnreadableError(f"there is no list of devices at {form.devices!r}")
        yield from (({}, device) for device in held)
        return
    if not isinstance(held, dict):
        raise UnreadableError(f"there is no object with devices at {form.devices!r}")
    for key, device in held.items():
        match = re.fullmatch(form.device, key)
        if match is not None:
            yield {name: value for name, value in match.groupdict().items() if value is not None}, device


def _stripped(value: object) -> object:
    if isinstance(value, dict):
        return {str(key).strip(): _stripped(inner) for key, inner in value.items()}
    return [_stripped(inner) for inner in value] if isinstance(value, list) else value


def _follow(value: object, path: str) -> object:
    for key in path.split("/") if path else ():
        if not isinstance(value, dict) or key not in value:
            raise UnreadableError(f"{path!r} is missing (an entry may have moved)")
        value = value[key]
    return value


def _json_text(device: object, path: str) -> str:
    value = _follow(device, path)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UnreadableError(f"{path!r} is not a number or a string")
    return str(value)


def device_sample(index: int, values: Values) -> DeviceSample:
    """Return parsed values as a sample of device ``index``."""
    known: dict[str, Any] = {name: number(values, name) for name in _SAMPLED}
    errors = known.pop("ecc_errors")
    return DeviceSample(index, ecc_errors=None if errors is None else int(errors), **known)


def device_index(at: int, values: Values) -> int:
    """Return the device's declared index, or its position ``at`` if the tool reports none."""
    index = number(values, "index")
    return at if index is None else int(index)


def number(values: Values, name: str) -> float | None:
    """Return a numeric value, or None."""
    value = values.get(name)
    return value if isinstance(value, float) else None


_ROWS: Final[dict[type, Callable[[str, Any], Iterator[Row]]]] = {
    TableForm: _table_rows,
    LinesForm: _line_rows,
    CsvForm: _csv_rows,
    JsonForm: _json_rows,
}
