"""Starting MindSpore ranks on a host. Imports no framework: planning and node agents use it.

The ranks are processes of AccelMark's own launcher: ``msrun`` kills ranks without a grace period, and redirects output.
"""

from __future__ import annotations

import platform
from typing import Final

from accelmark.spec.plugins.framework import DeviceSupport, HostPlace, Launch, RankPlace

COORDINATOR: Final = "ACCELMARK_COORDINATOR"
"""Variable with ``HOST:PORT`` of the scheduler through which the ranks find each other; rank 0 starts it."""
_X86: Final = ("x86_64", "AMD64")


def launch(place: HostPlace) -> Launch:
    """Return the rank's own command for a single rank, else AccelMark's process launcher around it."""
    defaults = {"GLOG_v": "3"}  # errors only
    if platform.machine() in _X86:
        # With AVX-512, MindSpore 2.10 computes convolutions on the CPU 30 to 90 times more slowly.
        defaults["DNNL_MAX_CPU_ISA"] = "AVX2"
    environment = {COORDINATOR: f"{place.master_address}:{place.master_port}"}
    if place.nnodes * place.num_ranks == 1:
        return Launch(place.rank_command, {**environment, **RankPlace().variables()}, defaults)
    command = [place.python, "-m", "accelmark.frameworks.process_launcher", "--nproc", str(place.num_ranks)]
    command += ["--nnodes", str(place.nnodes), "--node-rank", str(place.noderank)]
    if place.nnodes == 1:
        return Launch([*command, "--free-port", COORDINATOR, "--", *place.rank_command], {}, defaults)
    if place.local_address is not None:
        environment["MS_WORKER_IP"] = place.local_address
    return Launch([*command, "--", *place.rank_command], environment, defaults)


def device_support(device_type: str, version: str) -> DeviceSupport:
    """Return that every device type works: one package is for the CPU and for Ascend, whose CANN the ranks look for."""
    return DeviceSupport(True, f"MindSpore {version}")
