"""Starting MindSpore ranks on a host. Imports no framework: planning and node agents use it.

The ranks are processes of AccelMark's own launcher: ``msrun`` kills ranks without a grace period, and redirects output.
"""

from __future__ import annotations

import platform
from typing import Final

from accelmark.frameworks.process_launcher import launch_ranks
from accelmark.spec.plugins.framework import DeviceSupport, HostPlace, Launch

_X86: Final = ("x86_64", "AMD64")


def launch(place: HostPlace) -> Launch:
    """Return the rank's own command for a single rank, else AccelMark's process launcher around it."""
    defaults = {"GLOG_v": "3"}  # errors only
    if platform.machine() in _X86:
        # With AVX-512, MindSpore 2.10 computes convolutions on the CPU 30 to 90 times more slowly.
        defaults["DNNL_MAX_CPU_ISA"] = "AVX2"
    addresses = {"MS_WORKER_IP": place.local_address} if place.local_address is not None else {}
    return launch_ranks(place, defaults=defaults, between_hosts=addresses)


def device_support(device_type: str, version: str) -> DeviceSupport:
    """Return that every device type works: one package is for the CPU and for Ascend, whose CANN the ranks look for."""
    return DeviceSupport(True, f"MindSpore {version}")
