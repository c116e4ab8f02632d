"""``python -m accelmark.run.preflight.devices VENDOR``: on a host, print the vendor's devices as JSON."""

from __future__ import annotations

import json
import sys

from accelmark.telemetry.detect import detect


def main(vendor: str) -> int:
    """Print what there is; returns the exit code."""
    found = next((entry for entry in detect([vendor]) if entry.vendor == vendor), None)
    if found is not None and found.problem is not None:
        print(found.problem, file=sys.stderr)
        return 1
    devices = found.devices if found is not None else ()
    print(json.dumps([{"name": device.name, "driver": device.driver} for device in devices]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
