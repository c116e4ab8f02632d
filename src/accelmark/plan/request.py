"""Input and output of a planner: the request for a run, the request for one key, and the planned work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, final

from accelmark.plan.adaptation import Capabilities
from accelmark.plan.plan import LayerFile
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import DataError, Problem, SpecError
from accelmark.spec.job import Work
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, Provenance
from accelmark.spec.log.records import Ceilings
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import Folder, folders, load_case
from accelmark.spec.plugins.launcher import LauncherSpec
from accelmark.spec.plugins.vendor import Chip, VendorSpec
from accelmark.spec.runfile import CaseRequest, RunOptions

S = TypeVar("S")
DataDirs = Callable[[CaseSpec, Path | None], Mapping[str, Path]]
"""(case, data directory of the user or None) -> {data set name: its directory, existing or to be fetched}."""


@final
@dataclass(frozen=True, slots=True)
class Detected:
    """Properties of the machine under test, detected without a framework."""

    vendor: str
    hardware: str
    """The chip's name for keys (``H100``, ``CPU``)."""
    chip: Chip | None
    num_devices: int | None
    """null if ranks are not bound to devices (a CPU)."""
    ceilings: Ceilings | None = None
    """Rates that ``accelmark probe`` measured on these devices; None without a probe."""
    is_present: bool = True
    """Whether devices of the vendor were found; otherwise ``hardware`` is only the vendor's name."""
    capabilities: Mapping[str, str] = field(default_factory=dict)
    """Detected capability of this machine (``amx_bf16``) -> the file that shows it."""
    others: tuple[str, ...] = ()
    """Vendors of other accelerators of this machine, where the user named no vendor."""


@final
@dataclass(frozen=True, slots=True)
class RunRequest:
    """What all keys of a run share."""

    options: RunOptions
    cluster: ClusterSpec
    launcher: LauncherSpec
    vendor: VendorSpec
    vendor_folder: Path
    detected: Detected
    where: str
    """The run file, or ``command line``, for errors."""
    command_line: Mapping[str, Any]
    data_dirs: DataDirs

    @property
    def is_detected_vendor(self) -> bool:
        """Whether the run uses chips of the vendor that was detected here."""
        return self.vendor.name == self.detected.vendor

    @property
    def is_here(self) -> bool:
        """Whether the run uses the detected chips of this machine."""
        return self.launcher.is_localhost and self.is_detected_vendor


@final
@dataclass(frozen=True, slots=True)
class KeyRequest:
    """One key of a run with all inputs of its planning."""

    run: RunRequest
    key: CaseKey
    request: CaseRequest
    folder: Folder
    case: CaseSpec
    capabilities: Capabilities
    missing: list[Problem] = field(default_factory=list)
    """Data, weights and devices that are found to be missing while the key is planned, whatever its settings."""

    @property
    def adaptation(self) -> Path:
        """The vendor's folder for the case; it need not exist."""
        return self.run.vendor_folder / "cases" / f"{self.key.model}-{self.key.framework}"

    @property
    def case_file(self) -> str:
        """Name of the case's file in errors and provenance."""
        return f"cases/{self.folder.name}/case.yaml"

    def own_layers(self, command_line: Mapping[str, Any], files: Mapping[str, bool]) -> list[Layer]:
        """Return the layers of the run file and of the command line with absolute paths: a rank runs elsewhere.

        A relative path is below the directory of the run file, or the current one. ``files`` has the settings that name
        a file, and whether they may be another word, which is kept where no such file exists.
        """
        run = self.run
        # "command line" as a path has the current directory as its parent.
        own = [(Layer.of(run.where, self.request.settings), Path(run.where).parent)]
        own.append((Layer("command line", command_line), Path()))
        return [
            Layer(layer.name, {key: _absolute(key, value, base, files) for key, value in layer.values.items()})
            for layer, base in own
        ]

    def data_dirs(self, case: CaseSpec, given: Path | None) -> Mapping[str, Path]:
        """Return the directories of a case's data; none, and an entry in ``missing``, where the user must give one."""
        try:
            return self.run.data_dirs(case, given)
        except DataError as error:
            hint = "data: DIRECTORY next to the key in a run file; --data of train, infer"
            hint += "" if self.key.framework in folders("trainers") else "; --synthetic for speed only"
            self.missing.append(Problem(self.run.where, self.request.key, str(error), hint))
            return {}

    def data_of(self, names: Collection[str]) -> dict[str, Path]:
        """Return the directories of the named data sets, in the given directory or to be fetched.

        A known data set that the case does not declare for training is taken from the given directory only where that
        contains a directory of its name.
        """
        given, case = self.request.data, self.case
        found: dict[str, Path] = {}
        for entry in case.all_data:
            name = entry if isinstance(entry, str) else str(entry.get("name"))
            is_declared = name in case.data_names
            where = given if is_declared or (given is not None and (given / name).is_dir()) else None
            if name in names:
                found |= self.data_dirs(case.model_copy(update={"data": (entry,)}), where)
        return found


def _absolute(key: str, value: Any, base: Path, files: Mapping[str, bool]) -> Any:
    if key not in files or not isinstance(value, str):
        return value
    path = (base / Path(value).expanduser()).absolute()
    return value if files[key] and not path.is_file() else str(path)


@final
@dataclass(frozen=True, slots=True)
class PlannedWork:
    """The work of the first round of a key."""

    work: Work
    directory: str
    """Directory of the key's rounds, relative to the run directory."""
    data_dirs: Mapping[str, Path]
    provenance: Mapping[str, Provenance]
    layer_files: tuple[LayerFile, ...] = ()
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Origin (``trainer torchtitan``) -> requirements."""
    engine: str | None = None
    """Name of the inference engine, if one is used."""
    warnings: tuple[str, ...] = ()


def require_task(request: KeyRequest, task: Literal["train", "infer", "serve"], side: S | None) -> S:
    """Return the side of the case for a task; raise SpecError with the cases that have one."""
    if side is not None:
        return side
    able = [name for name in folders("cases") if getattr(load_case(name), task) is not None]
    word = {"train": "training", "infer": "inference", "serve": "serving"}[task]
    what = f"the case {request.key.model!r} has no {word} side; those that have: {', '.join(able) or 'none'}"
    raise SpecError([Problem(request.run.where, str(request.key), what)])
