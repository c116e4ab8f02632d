"""Starting Paddle ranks on a host. Imports no framework: planning and node agents use it.

The ranks are processes of AccelMark's own launcher: ``paddle.distributed.launch`` writes the environment, secrets
included, into its log directory, kills the other ranks three seconds after one has failed, and looks only every second.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from accelmark.frameworks.process_launcher import built_for, launch_ranks
from accelmark.spec.plugins.framework import DeviceSupport

MASTER: Final = "PADDLE_MASTER"
"""Variable with ``HOST:PORT`` of the store through which the ranks find each other; rank 0 opens it."""
_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "BKCL_SOCKET_IFNAME")
_BUILDS: Final = {"gpu": ("cuda_version", "hip_version"), "xpu": ("xpu_xre_version",)}
"""Device type -> entries of ``paddle/version``, one of which names a version in a build with that device type."""
launch = partial(launch_ranks, coordinator=MASTER, interfaces=_INTERFACES)


def device_support(device_type: str, version: str) -> DeviceSupport:
    """Read from Paddle's files whether it was built for ``device_type``; other types come with a plug-in."""
    otherwise = f"{device_type}: install paddlepaddle-{device_type}"
    return built_for(f"Paddle {version}", _BUILDS.get(device_type, ()), "paddle", "version/__init__.py", otherwise)
