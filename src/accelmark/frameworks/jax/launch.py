"""Starting JAX ranks on a host. Imports no framework: planning and node agents use it."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from accelmark.spec.plugins.framework import DeviceSupport, HostPlace, Launch, RankPlace
from accelmark.spec.plugins.requirements import pip_install

COORDINATOR: Final = "ACCELMARK_COORDINATOR"
"""Variable with ``HOST:PORT`` of the coordination service, which rank 0 opens."""
_PLUGINS: Final = {"cuda": "-cuda", "rocm": "-rocm"}
"""Device type -> part of the name of the package that adds it to JAX (``jax-cuda13-plugin``)."""


def launch(place: HostPlace) -> Launch:
    """Return the rank's own command for a single rank, else AccelMark's process launcher around it."""
    environment = {COORDINATOR: f"{place.master_address}:{place.master_port}"}
    if place.nnodes * place.num_ranks == 1:
        return Launch(place.rank_command, {**environment, **RankPlace().variables()})
    command = [place.python, "-m", "accelmark.frameworks.process_launcher", "--nproc", str(place.num_ranks)]
    command += ["--nnodes", str(place.nnodes), "--node-rank", str(place.noderank)]
    if place.nnodes == 1:
        return Launch([*command, "--free-port", COORDINATOR, "--", *place.rank_command])
    return Launch([*command, "--", *place.rank_command], environment)


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
