"""Records of a run for its audit: data, AccelMark's source, vendor adaptation, measured rates, clocks."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import Final, Literal

from pydantic import Field
from typing_extensions import Self

from accelmark.spec.model import Spec

DATA_FILE: Final = "data.json"
SOURCE_FILE: Final = "source.json"
ADAPTATION_FILE: Final = "adaptation.json"
COORDINATOR_LOG: Final = "coordinator.log"
"""In the run's directory: the log of the coordinator's libraries, mainly asyncssh."""
VENDOR_CODE_DIR: Final = "vendor"
"""In the run's directory: a copy of the vendor's code, with its paths in the vendor's folder."""


class DataRecord(Spec):
    """Hash of one data set on the machine."""

    path: str
    fingerprint: str
    """SHA-256 over the sorted (path, sha256) of the files; for a tree, over (path, size)."""
    declared: str | None


class SourceRecord(Spec):
    """Version and modifications of AccelMark's source."""

    kind: Literal["wheel", "checkout", "folder"]
    version: str
    sha256: str
    commit: str | None = None
    modified: tuple[str, ...] = ()
    """Files that differ from the wheel's RECORD or from the commit."""
    reason: str | None = None
    files: dict[str, str] = Field(default_factory=dict)
    """File of the package -> first 16 digits of its SHA-256."""


REGISTRATION_FILE: Final = "registration.json"


class EarlierRun(Spec):
    """An entry of the registry of runs."""

    number: int
    at: str
    ended: str | None


class Registration(Spec):
    """The entry of a run in the registry of its user, appended before the run started."""

    at: str
    nonce: str
    plan_sha256: str
    """SHA-256 of ``plan.json``; of a search, whose trials are added to it, the last that was registered."""
    work_sha256: str
    """The same for runs of the same cases, settings and code."""
    log: str | None = None
    """Identifies the registry: hash of its first entry; null for a new one."""
    number: int | None = None
    """Number of the run in the registry, from 1; null where it could not be written."""
    previous: str = ""
    earlier: tuple[EarlierRun, ...] = ()
    reason: str | None = None


class AdaptationFiles(Spec):
    """Contents of a vendor's folder for a case when the run was planned."""

    path: Path
    is_extension: bool = False
    """Whether it is outside the vendor's folder, in a directory of ``ACCELMARK_PLUGINS``."""
    sha256: str
    extern: dict[str, int] = Field(default_factory=dict)
    """Python file below ``extern/`` -> lines of code."""
    kernels: dict[str, int] = Field(default_factory=dict)
    """Source file below ``csrc/`` -> lines; build files are excluded."""
    requirements: tuple[str, ...] = ()
    has_environment: bool = False
    has_build: bool = False


class AdaptationRecord(Spec):
    """Effects of a vendor's folder for a case on a host before the ranks started."""

    environment: dict[str, str] = Field(default_factory=dict)
    removed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    installed: tuple[str, ...] = ()
    duration_s: float = 0.0


ENVIRONMENT_FILE: Final = "environment.json"
LOADER_VARIABLES: Final = (
    "LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME",
    "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "PYTHONINSPECT", "PYTHONBREAKPOINT", "PYTHONEXECUTABLE",
    "PYTHONPYCACHEPREFIX",
)  # fmt: skip
VariableOrigin = Literal["shell", "cluster file or vendor.yaml", "environment_variables.sh", "AccelMark"]


class Variable(Spec):
    """One environment variable of the ranks."""

    origin: VariableOrigin
    value: str | None
    """null for a variable of the shell that does not change how ranks run; secrets are omitted."""


class EnvironmentRecord(Spec):
    """The environment that the ranks of a host were started with, whoever set it."""

    variables: dict[str, Variable] = Field(default_factory=dict)
    loaders: dict[str, Variable] = Field(default_factory=dict)
    """Variables that load code before AccelMark's: other paths of Python, and of libraries that Python uses."""
    numeric_switches: dict[str, Variable] = Field(default_factory=dict)
    """Variables that make the framework compute in another precision than declared."""
    start_files: tuple[str, ...] = ()
    """Files that run code whenever Python starts there, and belong to no installed package."""


CEILINGS_FILE: Final = "ceilings.json"
"""Written by rank 0 of a probe into the directory of its host."""

ProbeItem = Literal["matmul", "memory", "copies", "collectives"]


class Rate(Spec):
    """A measured rate; if ``value`` is null, ``reason`` is set."""

    value: float | None
    unit: Literal["TFLOP/s", "TOP/s", "GB/s"]
    reason: str | None = None
    size: str | None = None
    repetitions: int = 0


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point"]


class CollectiveTiming(Spec):
    """A collective at one size, on all ranks together; rates as nccl-tests defines them."""

    operation: Collective
    size_bytes: int
    """Of the buffer: for all-gather the gathered one, for reduce-scatter the one before it."""
    time_us: float
    algorithm_gb_s: float
    bus_gb_s: float
    """The same times 2(n-1)/n for all-reduce, 1 for point to point, (n-1)/n for the others, with n ranks."""
    repetitions: int


class Ceilings(Spec):
    """Measured rates of one device and, for collectives, of the group."""

    schema_version: Literal[1] = 1
    device_type: str
    device_name: str
    world_size: int
    framework: str
    measured_at: str
    matmul: dict[str, Rate] = Field(default_factory=dict)
    """Precision -> dense matrix product, 2MNK operations each."""
    memory: dict[str, Rate] = Field(default_factory=dict)
    """``copy`` and ``triad``: bytes read and written."""
    copies: dict[str, Rate] = Field(default_factory=dict)
    """``host_to_device`` and ``device_to_host``, pinned memory."""
    collectives: dict[str, Rate] = Field(default_factory=dict)
    """:data:`Collective` -> the largest bus bandwidth over sizes; ``point_to_point`` is rank 0 to the last rank."""
    sweep: tuple[CollectiveTiming, ...] = ()
    hosts: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()


class ClockReading(Spec):
    """The clocks of one host at one moment, in seconds."""

    wall_s: float
    mono_s: float
    uptime_s: float | None = None
    """Of ``/proc/uptime``, which the kernel writes: a replaced library function does not change it."""

    @classmethod
    def now(cls) -> Self:
        """Read the clocks."""
        uptime_s = None
        with contextlib.suppress(OSError, ValueError, IndexError):
            uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return cls(wall_s=round(time.time(), 4), mono_s=round(time.monotonic(), 4), uptime_s=uptime_s)

    def earlier(self, by_s: float) -> ClockReading:
        """Return the reading of ``by_s`` seconds before."""
        uptime_s = None if self.uptime_s is None else self.uptime_s - by_s
        return ClockReading(wall_s=self.wall_s - by_s, mono_s=self.mono_s - by_s, uptime_s=uptime_s)


class LogSeal(Spec):
    """The content of a rank's log when the processes of the ranks had ended."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> LogSeal:
        """Seal a log."""
        return cls(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


class HostClocks(Spec):
    """Readings by the node agent of one host."""

    began: ClockReading
    ended: ClockReading
    seen: dict[str, tuple[ClockReading, ClockReading]] = Field(default_factory=dict)
    """Name of an event -> when the agent first and last saw it in the log of the host's first rank."""
