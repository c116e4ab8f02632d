"""Mock: a stand-in for ``pynvml``, since no NVIDIA GPU is here. Values are those of an idle A100-SXM4-40GB.

FlagPerf's reference line for it is ``31C 57W 15MiB 40536MiB 0%``. Function names and error codes are NVML's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

NOT_SUPPORTED = "Not Supported"
GPU_LOST = "GPU is lost"


class NVMLError(Exception):
    """What every call raises when it cannot answer."""


class FakeNvml:
    """The part of ``pynvml`` that is read; ``refuse`` maps a function's name to the error it raises."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlMemory_v2 = 33554472  # noqa: N815 - NVML's name

    def __init__(self, num_gpus: int = 1, refuse: dict[str, str] | None = None, instant_mw: int = 57_300) -> None:
        self.num_gpus = num_gpus
        self.refuse = refuse or {}
        self.instant_mw = instant_mw
        self.energy_mj = 1_000_000
        self.throttle_mask = 0x1
        self.pids: list[int] = []
        self.shut = False

    def __getattribute__(self, name: str) -> Any:
        refuse = object.__getattribute__(self, "__dict__").get("refuse", {})
        if name in refuse:

            def refused(*_: object, **__: object) -> None:
                raise NVMLError(refuse[name])

            return refused
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.15"

    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, _handle: int) -> str:
        return "NVIDIA A100-SXM4-40GB"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-0000000{handle}"

    def nvmlDeviceGetPciInfo(self, _handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=b"00000000:07:00.0")

    def nvmlDeviceGetUtilizationRates(self, _handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=0, memory=0)

    def nvmlDeviceGetMemoryInfo(self, _handle: int, version: int | None = None) -> SimpleNamespace:
        # Version 1 counts the driver's reserve as used.
        used = 15 if version else 438
        return SimpleNamespace(total=40536 * 2**20, used=used * 2**20)

    def nvmlDeviceGetFieldValues(self, _handle: int, _fields: list[int]) -> list[SimpleNamespace]:
        code = 0 if self.instant_mw else 3
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=self.instant_mw))]

    def nvmlDeviceGetPowerUsage(self, _handle: int) -> int:
        return 60_000

    def nvmlDeviceGetEnforcedPowerLimit(self, _handle: int) -> int:
        return 400_000

    def nvmlDeviceGetTemperature(self, _handle: int, _sensor: int) -> int:
        return 31

    def nvmlDeviceGetClockInfo(self, _handle: int, clock: int) -> int:
        return {1: 210, 2: 1215}[clock]

    def nvmlDeviceGetMaxClockInfo(self, _handle: int, _clock: int) -> int:
        return 1410

    def nvmlDeviceGetCurrentClocksEventReasons(self, _handle: int) -> int:
        return self.throttle_mask

    def nvmlDeviceGetTotalEnergyConsumption(self, _handle: int) -> int:
        return self.energy_mj

    def nvmlDeviceGetTotalEccErrors(self, _handle: int, _kind: int, _counter: int) -> int:
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=512 << 20) for pid in self.pids]

    def nvmlDeviceGetPersistenceMode(self, _handle: int) -> int:
        return 1

    def nvmlDeviceGetEccMode(self, _handle: int) -> tuple[int, int]:
        return (1, 1)

    def nvmlDeviceGetMigMode(self, _handle: int) -> tuple[int, int]:
        return (0, 0)

    def nvmlDeviceGetVbiosVersion(self, _handle: int) -> str:
        return "92.00.45.00.05"
