"""Energy by the device's counter against the trapezoid rule over its power, sampled at several intervals.

Prints one line of JSON. The load alternates between matrix products and pauses of 0.1 s, as training steps with
evaluation do.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, final

INTERVALS_S: Final = (0.1, 0.5, 1.0)
_SAMPLING_S: Final = 0.05
_BUSY_S: Final = 0.2
_PAUSE_S: Final = 0.1


@final
@dataclass(slots=True)
class Samples:
    """Times in seconds, power in W and the counter in J, of equal length."""

    time_s: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    counter_j: list[float] = field(default_factory=list)


def trapezoid_j(time_s: Sequence[float], power_w: Sequence[float], interval_s: float) -> float:
    """Integrate power with samples at least ``interval_s`` apart, the last one included."""
    kept = [0]
    for index in range(1, len(time_s)):
        if time_s[index] - time_s[kept[-1]] >= interval_s - _SAMPLING_S / 2 or index == len(time_s) - 1:
            kept.append(index)
    return sum((power_w[a] + power_w[b]) / 2 * (time_s[b] - time_s[a]) for a, b in pairwise(kept))


def compare(samples: Samples) -> dict[str, Any]:
    """Return the counter's energy, and by interval the relative error of the trapezoid rule."""
    counter_j = samples.counter_j[-1] - samples.counter_j[0]
    by_power = {str(each): trapezoid_j(samples.time_s, samples.power_w, each) for each in INTERVALS_S}
    errors = {each: energy_j / counter_j - 1 if counter_j else None for each, energy_j in by_power.items()}
    duration_s = samples.time_s[-1] - samples.time_s[0]
    return {"duration_s": duration_s, "counter_j": counter_j, "trapezoid_j": by_power, "relative_error": errors}


def measure(duration_s: float) -> dict[str, Any]:
    """Load the device and sample it; null with the reason where it has no energy counter."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:  # noqa: BLE001 - whatever is missing is the reason
        return {"counter_j": None, "reason": f"no energy counter: {type(error).__name__}: {error}"}
    samples, done = Samples(), threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLING_S):
            samples.time_s.append(time.monotonic())
            samples.power_w.append(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
            samples.counter_j.append(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    load(duration_s)
    done.set()
    thread.join()
    return compare(samples)


def load(duration_s: float) -> None:
    """Alternate between bf16 matrix products and pauses."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        busy = time.monotonic() + _BUSY_S
        while time.monotonic() < busy:
            torch.mm(a, a)
            torch.cuda.synchronize()
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    print(json.dumps(measure(1.0 if parser.parse_args().tiny else 32.0)))
