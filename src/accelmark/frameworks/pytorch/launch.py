"""Starting PyTorch ranks on a host. Imports no framework: planning and node agents use it."""

from __future__ import annotations

import re
from typing import Final

from accelmark.frameworks.process_launcher import launch_ranks, source_of
from accelmark.spec.plugins.framework import DeviceSupport, HostPlace, Launch

_INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_BUILDS: Final = {"cuda": ("cuda", "hip"), "xpu": ("xpu",)}
"""Device type -> entries of ``torch/version.py``, one of which is set in a build with that device type."""


def launch(place: HostPlace) -> Launch:
    """Return the rank's own command for a single rank, else AccelMark's process launcher around it."""
    interfaces = dict.fromkeys(_INTERFACE_VARIABLES, place.interface) if place.interface is not None else {}
    return launch_ranks(place, defaults=interfaces)


def device_support(device_type: str, version: str) -> DeviceSupport:
    """Read from PyTorch's files whether it was built for ``device_type``; other types come with their own module."""
    needed = _BUILDS.get(device_type)
    if needed is None:
        return DeviceSupport(True, f"PyTorch {version}")
    versions = re.finditer(r"^(cuda|hip|xpu)\b[^=]*=\s*'([^']+)'", source_of("torch", "version.py"), re.MULTILINE)
    build = {version[1]: version[2] for version in versions}
    have = [f"{name} {build[name]}" for name in needed if build.get(name)]
    if have:
        return DeviceSupport(True, f"PyTorch {version}, built for {', '.join(have)}")
    return DeviceSupport(False, f"PyTorch {version} is a build without {' or '.join(needed)}: install another build")
