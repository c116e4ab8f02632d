"""Expose the last sample of each recorder as Prometheus metrics (text format 0.0.4), with units in their names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from accelmark.spec.model import json_objects

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
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
    """Return the last sample of each recorder (labels, and its ``<case>/<round>/<node>/telemetry.jsonl``) as metrics.

    Records that have ended, or have no new sample for ten intervals (and 30 s), are omitted.
    """
    rows: list[tuple[str, Mapping[str, str], Mapping[str, Any]]] = []
    for labels, path in recorders:
        sample, max_age_s = last_sample(path), _MIN_AGE_S
        with suppress(OSError, ValueError, TypeError, KeyError), path.open("rb") as file:  # no header yet
            max_age_s = max(_INTERVALS * json.loads(file.readline())["header"]["interval_s"], _MIN_AGE_S)
        if sample is None or now_s - sample["wall"] > max_age_s:
            continue
        node, round_dir, case = (path.parents[above].name for above in range(3))
        labels = {"node": node, "round": round_dir, "case": case, **labels}
        rows += [("sample", labels, sample), ("host", labels, sample["host"])]
        rows += [("device", {**labels, "device": str(device["index"])}, device) for device in sample["devices"]]
    lines: list[str] = []
    for where, field, name, factor, kind, text in _METRICS:
        values = [(labels, row[field]) for at, labels, row in rows if at == where and row.get(field) is not None]
        if values:
            lines += [f"# HELP accelmark_{name} {text}", f"# TYPE accelmark_{name} {kind}"]
            lines += [f"accelmark_{name}{{{_labels(labels)}}} {value * factor!r}" for labels, value in values]
    return "".join(f"{line}\n" for line in lines)


def last_sample(path: Path) -> dict[str, Any] | None:
    """Return the last complete sample of a record; None where it has ended, has none or cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 256 * 1024))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for entry in json_objects(reversed(lines)):
        if "footer" in entry:
            return None
        if isinstance(entry.get("host"), dict):
            return entry
    return None


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels.items()))
