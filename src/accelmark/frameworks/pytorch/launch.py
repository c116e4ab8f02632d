"""Starting PyTorch ranks on a host. Imports no framework: planning and node agents use it."""

from __future__ import annotations

from typing import Final

from accelmark.frameworks.process_launcher import built_for, launch_ranks
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
    needed = _BUILDS.get(device_type, ())
    return built_for(
        f"PyTorch {version}", needed, "torch", "version.py", f"{' or '.join(needed)}: install another build"
    )
