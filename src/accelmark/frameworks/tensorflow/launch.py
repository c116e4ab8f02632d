"""Starting TensorFlow ranks on a host. Imports no framework: planning and node agents use it."""

from __future__ import annotations

import importlib.metadata
from contextlib import suppress
from typing import Final

from accelmark.frameworks.process_launcher import launch_ranks
from accelmark.spec.plugins.framework import DeviceSupport
from accelmark.spec.plugins.requirements import pip_install

_BUILDS: Final = {"gpu": ("tensorflow", "tensorflow-rocm")}
launch = launch_ranks


def device_support(device_type: str, version: str) -> DeviceSupport:
    """Determine from the installed packages whether TensorFlow was built for ``device_type``."""
    needed = _BUILDS.get(device_type)
    if needed is None:
        return DeviceSupport(True, f"TensorFlow {version}")
    for package in needed:
        with suppress(importlib.metadata.PackageNotFoundError):
            return DeviceSupport(True, f"{package} {importlib.metadata.version(package)}")
    install = pip_install([f"tensorflow[and-cuda]=={version}"])
    return DeviceSupport(False, f"TensorFlow {version} is a build for the CPU: {install}")
