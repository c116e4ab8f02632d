"""The device ``testchip`` for PyTorch: host memory behind the PrivateUse1 key. A path that assumes CUDA fails on it.

Imported by ranks as the vendor's framework module; ``build()`` compiles the extension once.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration, cpp_extension

DIRECTORY_VARIABLE = "TESTCHIP_BUILD"


def build(directory: Path) -> Any:
    """Compile the extension into ``directory`` unless it is current, and import it."""
    with (directory / "flock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # PyTorch's own lock file outlives a process that was killed while it compiled.
        (directory / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            "testchip_extension",
            [str(Path(__file__).with_name("device.cpp"))],
            build_directory=str(directory),
            extra_cflags=["-O0", "-w"],
        )


class DeviceModule(ModuleType):
    """What ``torch.testchip`` offers."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        pass

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "Test Chip"

    @staticmethod
    def synchronize(device: object = None) -> None:
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False


def register() -> None:
    """Register the device with PyTorch."""
    build(Path(os.environ[DIRECTORY_VARIABLE])).register_hooks()
    backend_registration.rename_privateuse1_backend("testchip")
    torch._register_device_module("testchip", DeviceModule("torch.testchip"))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()


if DIRECTORY_VARIABLE in os.environ and "pytest" not in sys.modules:
    register()
