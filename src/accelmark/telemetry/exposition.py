"""Expose the last sample of each recorder as Prometheus metrics, with units in their names.

Format: the Prometheus text exposition format 0.0.4.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from accelmark.spec.model import json_objects

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_TAIL_BYTES: Final = 256 * 1024
_MIB: Final = 2.0**20
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_INTERVALS: Final = 10
_MIN_AGE_S: Final = 30.0
"""A sample counts as current for ten intervals, and for at least 30 s since busy machines sample late."""

_METRICS: Final[tuple[tuple[str, str, str, float, str, str], ...]] = (
    ("host", "cpu", "host_cpu_ratio", 1.0, "gauge", "Share of all cores that was busy."),
    ("host", "mem_used_mib", "host_memory_used_bytes", _MIB, "gauge", "Memory in use."),
    ("host", "mem_total_mib", "host_memory_bytes", _MIB, "gauge", "Total memory."),
    ("host", "load1", "host_load1", 1.0, "gauge", "Load average over one minute."),
    ("host", "power_w", "host_power_watts", 1.0, "gauge", "Power of the host from its management controller."),
    ("host", "rapl_j", "host_cpu_energy_joules_total", 1.0, "counter", "Energy of the CPU packages."),
    ("host", "rank_rss_mib", "host_ranks_resident_bytes", _MIB, "gauge", "Resident memory of the ranks."),
    ("device", "utilisation", "device_utilisation_ratio", 1.0, "gauge", "Share of time the device was busy."),
    ("device", "memory_used_mib", "device_memory_used_bytes", _MIB, "gauge", "Device memory in use."),
    ("device", "memory_total_mib", "device_memory_bytes", _MIB, "gauge", "Total device memory."),
    ("device", "power_w", "device_power_watts", 1.0, "gauge", "Power of the device."),
    ("device", "temperature_c", "device_temperature_celsius", 1.0, "gauge", "Temperature of the device."),
    ("device", "sm_clock_mhz", "device_clock_hertz", 1e6, "gauge", "Clock of the device."),
    ("device", "memory_clock_mhz", "device_memory_clock_hertz", 1e6, "gauge", "Clock of the device's memory."),
    ("device", "energy_j", "device_energy_joules_total", 1.0, "counter", "The device's own energy counter."),
    ("device", "ecc_errors", "device_ecc_errors_total", 1.0, "counter", "Uncorrected memory errors."),
    ("sample", "wall", "sample_timestamp_seconds", 1.0, "gauge", "Unix time of the sample."),
)


def expose(recorders: Iterable[tuple[Mapping[str, str], Path]], *, now_s: float) -> str:
    """Return the last sample of each recorder as metrics.

    ``recorders`` are labels and the ``telemetry.jsonl`` of each, in ``<case>/<round>/<node>/``; ``now_s`` is Unix time.
    Records that have ended, have no sample, or have no new sample for ten intervals (and 30 s) are omitted.
    """
    rows: list[tuple[str, Mapping[str, str], Mapping[str, Any]]] = []
    for labels, path in recorders:
        sample = last_sample(path)
        if sample is None or not _is_number(sample.get("wall")) or now_s - sample["wall"] > _max_age_s(path):
            continue
        node, round_dir, case = (path.parents[above].name for above in range(3))
        labels = {"node": node, "round": round_dir, "case": case, **labels}
        rows += [("sample", labels, sample), ("host", labels, sample["host"])]
        for device in sample["devices"] if isinstance(sample.get("devices"), list) else ():
            if isinstance(device, dict):
                rows.append(("device", {**labels, "device": str(device.get("index", ""))}, device))
    lines: list[str] = []
    for where, field, name, factor, kind, text in _METRICS:
        values = [(labels, row[field]) for place, labels, row in rows if place == where and _is_number(row.get(field))]
        if values:
            lines += [f"# HELP accelmark_{name} {text}", f"# TYPE accelmark_{name} {kind}"]
            lines += [f"accelmark_{name}{{{_labels(labels)}}} {value * factor!r}" for labels, value in values]
    return "".join(f"{line}\n" for line in lines)


def _max_age_s(path: Path) -> float:
    """Return the age in seconds up to which a sample is current, by the interval in the record's header."""
    try:
        with path.open("rb") as file:
            return max(_INTERVALS * float(json.loads(file.readline(_TAIL_BYTES))["header"]["interval_s"]), _MIN_AGE_S)
    except (OSError, ValueError, TypeError, KeyError):  # no header yet
        return _MIN_AGE_S


def last_sample(path: Path) -> dict[str, Any] | None:
    """Return the last complete sample of a record; None where it has ended, has none or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for entry in json_objects(reversed(lines)):
        if "footer" in entry:
            return None
        if isinstance(entry.get("host"), dict):
            return entry
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels.items()))
