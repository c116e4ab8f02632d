"""``python -m accelmark.run.preflight.devices VENDOR``: print the vendor's devices on a host, and their load."""

from __future__ import annotations

import json
import sys
from typing import Any

from accelmark.spec.errors import AccelmarkError
from accelmark.spec.plugins.catalog import find
from accelmark.telemetry.device import DeviceSource, SourceError
from accelmark.telemetry.forms import read_vendor
from accelmark.telemetry.sources import device_sources, first_readable


def main(vendor: str) -> int:
    """Print the devices; returns the exit code."""

    def look(source: DeviceSource) -> list[dict[str, Any]]:
        infos = source.open()
        now = {sample.index: sample for sample in source.sample()}
        devices: list[dict[str, Any]] = []
        for info in infos:
            sample = now.get(info.index)
            busy = {"utilisation": sample.utilisation, "memory_used_mib": sample.memory_used_mib} if sample else {}
            devices.append({"name": info.name, "driver": info.driver, **busy})
        return devices

    try:
        folder = find("vendors", vendor).path
        source, devices = first_readable(device_sources(folder, read_vendor(folder)[1]), look)
    except (AccelmarkError, SourceError) as error:
        print(error, file=sys.stderr)
        return 1
    source.close()
    print(json.dumps(devices))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
