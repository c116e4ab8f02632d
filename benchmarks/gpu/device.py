"""Which device is measured."""

from __future__ import annotations

from accelmark.telemetry.inventory import default_vendor, detect
from benchmarks.gpu.session import Device


def device_here() -> Device:
    """Return the accelerator, or the CPU where there is none."""
    vendor = default_vendor()
    found = next(found for found in detect([vendor]) if found.vendor == vendor)
    first = found.devices[0] if found.devices else None
    chip = found.chips[0] if found.chips else None
    peaks = chip.peaks.model_dump(exclude_none=True) if chip is not None else {}
    return Device(
        name=first.name if first else vendor,
        hardware=found.hardware or "unknown",
        memory_gib=(first.memory_gib or 0.0) if first else 0.0,
        is_accelerator=not found.fallback,
        peaks_tflops=peaks,
        bandwidth_gb_s=chip.memory_bandwidth_gb_s if chip is not None else None,
    )
