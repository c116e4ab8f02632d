"""Starting PyTorch ranks on a host. Imports no framework: planning and node agents use it."""

from __future__ import annotations

from functools import partial
from typing import Final

from accelmark.frameworks.process_launcher import built_for, launch_ranks
from accelmark.spec.plugins.framework import DeviceSupport

_BUILDS: Final = {"cuda": ("cuda", "hip"), "xpu": ("xpu",)}
"""Device type -> entries of ``torch/version.py``, one of which is set in a build with that device type."""
launch = partial(launch_ranks, interfaces=("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))


def device_support(device_type: str, version: str) -> DeviceSupport:
    """Read from PyTorch's files whether it was built for ``device_type``; other types come with their own module."""
    needed = _BUILDS.get(device_type, ())
    return built_for(
        f"PyTorch {version}", needed, "torch", "version.py", f"{' or '.join(needed)}: install another build"
    )
