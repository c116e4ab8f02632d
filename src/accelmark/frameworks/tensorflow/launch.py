"""Starting TensorFlow ranks on a host. Imports no framework: planning and node agents use it."""

from __future__ import annotations

import importlib.metadata
from typing import Final

from accelmark.spec.plugins.framework import DeviceSupport, HostPlace, Launch, RankPlace
from accelmark.spec.plugins.requirements import pip_install

COORDINATOR: Final = "ACCELMARK_COORDINATOR"
"""Variable with ``HOST:PORT`` where rank 0 collects the addresses of all ranks."""
_BUILDS: Final = {"gpu": ("tensorflow", "tensorflow-rocm")}
"""Device type -> packages that are built for it."""


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
    """Determine from the installed packages whether TensorFlow was built for ``device_type``."""
    wanted = _BUILDS.get(device_type)
    if wanted is None:
        return DeviceSupport(True, f"TensorFlow {version}")
    for package in wanted:
        try:
            return DeviceSupport(True, f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    install = pip_install([f"tensorflow[and-cuda]=={version}"])
    return DeviceSupport(False, f"TensorFlow {version} is a build for the CPU: {install}")
