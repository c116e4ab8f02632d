"""``sys_info.json``: hardware and operating system of a host, without anything that may be secret."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil

from accelmark.telemetry.device import DeviceInfo

_MIB: Final = 1024 * 1024
_SYS: Final = Path("/sys")
_CONTAINER_FILES: Final = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_VARIABLES: Final = ("APPTAINER_CONTAINER", "container")
"""Apptainer's, and that of systemd's container interface."""
_PROC: Final = Path("/proc")


def collect(devices: Iterable[DeviceInfo] = ()) -> dict[str, Any]:
    """Return the properties of this host; a value that cannot be read is None. No environment variable is included."""
    infos = [asdict(device) for device in devices]
    return {
        "schema_version": 1,
        "hostname": socket.gethostname(),
        "os": _os_name(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "virtualisation": _virtualisation(),
        "cpu": _cpu(),
        "memory": {
            "total_mib": psutil.virtual_memory().total / _MIB,
            "swap_mib": psutil.swap_memory().total / _MIB,
            "huge_pages": text_of(_SYS / "kernel/mm/transparent_hugepage/enabled"),
        },
        "cgroup": _cgroup(),
        "drivers": sorted({info["driver"] for info in infos if info["driver"]}),
        "devices": infos,
    }


def write(directory: Path, devices: Iterable[DeviceInfo] = ()) -> None:
    """Write ``sys_info.json`` atomically; raises OSError if it cannot be written."""
    path = directory / "sys_info.json"
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(collect(devices), indent=2) + "\n")
    part.replace(path)


def cpu_model() -> str:
    """Return the CPU's name as its vendor (or the hypervisor) reports it."""
    fields = _cpuinfo()
    for key in ("model name", "Model", "Hardware", "cpu model", "cpu"):
        if fields.get(key):
            return fields[key]
    implementer, part = fields.get("CPU implementer"), fields.get("CPU part")
    if implementer and part:
        return f"{platform.machine()} implementer {implementer} part {part}"
    return platform.processor() or platform.machine()


def cpu_features() -> frozenset[str]:
    """Return the instruction set extensions of the CPU, as Linux names them."""
    fields = _cpuinfo()
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


def _cpuinfo() -> dict[str, str]:
    text = text_of(_PROC / "cpuinfo") or ""
    first = text.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def _cpu() -> dict[str, Any]:
    fields = _cpuinfo()
    policy = _SYS / "devices/system/cpu/cpu0/cpufreq"
    no_turbo = text_of(_SYS / "devices/system/cpu/intel_pstate/no_turbo")
    boost = text_of(_SYS / "devices/system/cpu/cpufreq/boost")
    turbo = None if no_turbo is None and boost is None else (no_turbo == "0" if no_turbo is not None else boost == "1")
    flags = cpu_features()
    wanted = (
        "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8", "asimd", "sve", "bf16",
    )  # fmt: skip
    return {
        "model": cpu_model(),
        "logical_cores": psutil.cpu_count(),
        "physical_cores": psutil.cpu_count(logical=False),
        "usable_cores": len(os.sched_getaffinity(0)),
        "microcode": fields.get("microcode"),
        "features": [flag for flag in wanted if flag in flags],
        "governor": text_of(policy / "scaling_governor"),
        "max_mhz": thousandths(policy / "cpuinfo_max_freq"),
        "limit_mhz": thousandths(policy / "scaling_max_freq"),
        "turbo": turbo,
        "smt": text_of(_SYS / "devices/system/cpu/smt/control"),
        "numa_nodes": len(list((_SYS / "devices/system/node").glob("node[0-9]*"))) or None,
    }


def _cgroup() -> dict[str, Any]:
    """Return the limits of this process's control group (version 2), set by a container or scheduler."""
    lines = (text_of(_PROC / "self/cgroup") or "").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    files = {"cpu_max": "cpu.max", "memory_max": "memory.max", "cpuset": "cpuset.cpus.effective"}
    if path is None:
        return dict.fromkeys(files)
    group = _SYS / "fs/cgroup" / path.lstrip("/")
    return {name: text_of(group / file) for name, file in files.items()}


def _virtualisation() -> str | None:
    product = text_of(_SYS / "class/dmi/id/product_name")
    hypervisor = " hypervisor" in f" {_cpuinfo().get('flags', '')}"
    if any(Path(path).exists() for path in _CONTAINER_FILES) or not os.environ.keys().isdisjoint(_CONTAINER_VARIABLES):
        return "container"
    return f"virtual machine ({product or 'unknown product'})" if hypervisor else product


def _os_name() -> str:
    for line in (text_of(Path("/etc/os-release")) or "").splitlines():
        name, _, value = line.partition("=")
        if name == "PRETTY_NAME":
            return value.strip("\"'")
    return f"{platform.system()} {platform.release()} ({sys.platform})"


def thousandths(path: Path) -> float | None:
    """Return the whole number in a file of the kernel, divided by 1000; None where there is none."""
    text = text_of(path)
    return int(text) / 1000 if text is not None and text.lstrip("-").isdigit() else None


def text_of(path: Path) -> str | None:
    """Return the text of a file of the kernel; None where it is empty or cannot be read."""
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None
