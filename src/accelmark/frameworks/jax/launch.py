"""Starting JAX ranks on a host. Imports no framework: planning and node agents use it."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from accelmark.frameworks.process_launcher import launch_ranks
from accelmark.spec.plugins.framework import DeviceSupport
from accelmark.spec.plugins.requirements import pip_install

_PLUGINS: Final = {"cuda": "-cuda", "rocm": "-rocm"}
"""Device type -> part of the name of the package that adds it to JAX (``jax-cuda13-plugin``)."""
launch = launch_ranks


def device_support(device_type: str, version: str) -> DeviceSupport:
    """Determine from the installed packages whether JAX has a plug-in for ``device_type``."""
    part = _PLUGINS.get(device_type)
    if part is None:
        return DeviceSupport(True, f"JAX {version}")
    for distribution in importlib.metadata.distributions():
        name = distribution.name or ""
        if name.startswith("jax") and part in name and "plugin" in name:
            return DeviceSupport(True, f"JAX {version} with {name} {distribution.version}")
    extra = "cuda13" if device_type == "cuda" else device_type
    install = pip_install([f"jax[{extra}]=={version}"])
    return DeviceSupport(False, f"JAX {version} has no plug-in for {device_type}: {install}")
