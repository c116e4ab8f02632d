"""Input and output of a planner: the request for a key, a vendor's files that apply to it, and the planned work."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from accelmark.plan.plan import LayerFile
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import DataError, Problem, SpecError
from accelmark.spec.job import Work
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, Provenance, flatten
from accelmark.spec.log.records import AdaptationFiles, Ceilings
from accelmark.spec.model import read_yaml
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import Folder, adaptations, folders, load_case, tree_hash
from accelmark.spec.plugins.launcher import LauncherSpec
from accelmark.spec.plugins.vendor import Chip, VendorSpec
from accelmark.spec.runfile import CaseRequest, RunOptions
from accelmark.spec.secret import without_userinfo
from accelmark.spec.settings.inference import BENCHMARK_DATA, BenchmarkSettings

S = TypeVar("S")
DataDirs = Callable[[CaseSpec, Path | None], Mapping[str, Path]]
"""(case, data directory of the user or None) -> {data set name: its directory, existing or to be fetched}."""
ENVIRONMENT_FILE: Final = "environment_variables.sh"
_BUILD_FILES: Final = ("setup.py", "pyproject.toml", "setup.cfg", "MANIFEST.in", "CMakeLists.txt", "README.md")
_SCALE: Final = re.compile(r".+x\d+x\d+")


def adaptation_files(folder: Path) -> AdaptationFiles | None:
    """Return the contents of ``folder`` (``vendors/<v>/cases/<model>-<framework>``), None if it does not exist."""
    if not folder.is_dir():
        return None
    csrc, listed = folder / "csrc", configuration_file(folder, "requirements.txt")
    written = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else ()
    requirements = filter(None, (line.partition("#")[0].strip() for line in written))
    return AdaptationFiles(
        path=folder,
        is_extension=not (folder.parents[1] / "vendor.yaml").is_file(),
        sha256=tree_hash(folder, whole=True),
        extern={name: _lines(path, "#") for name, path in _files(folder / "extern") if path.suffix == ".py"},
        kernels={name: _lines(path, "//") for name, path in _files(csrc) if path.name not in _BUILD_FILES},
        requirements=tuple(map(without_userinfo, requirements)),
        has_environment=configuration_file(folder, ENVIRONMENT_FILE).is_file(),
        has_build=any((csrc / name).is_file() for name in ("setup.py", "pyproject.toml")),
    )


def requirements_file(*folders: Path | None) -> Path | None:
    """Return the first ``requirements.txt`` of ``folders``: a vendor's file replaces the case's."""
    files = (configuration_file(folder, "requirements.txt") for folder in folders if folder is not None)
    return next(filter(Path.is_file, files), None)


def configuration_file(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, or in its ``config/``, as FlagPerf has it, where that has it."""
    inside = folder / "config" / name
    return inside if inside.is_file() else folder / name


def _files(folder: Path) -> list[tuple[str, Path]]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return [(path.relative_to(folder).as_posix(), path) for path in files]


def _lines(path: Path, comment: str) -> int:
    text = path.read_text(encoding="utf-8", errors="replace")
    return sum(1 for line in map(str.strip, text.splitlines()) if line and not line.startswith(comment))


def host_capabilities(vendor: VendorSpec) -> dict[str, str]:
    """Detect capabilities from files of this host; return each with its file."""
    return {
        name: str(test.file)
        for name, test in vendor.capabilities.items()
        if test.file.is_file() and re.search(test.pattern, test.file.read_text(encoding="utf-8", errors="replace"))
    }


def vendor_layers(
    adaptations: Sequence[Path], vendor: str, key: CaseKey, capabilities: Mapping[str, str], stem: str
) -> tuple[list[Layer], tuple[LayerFile, ...]]:
    """Return the vendor's layers for ``key``, weakest first, and which files of ``adaptations`` were applied.

    ``<stem>.yaml`` (``config``, ``infer`` or ``serve``) applies at every scale, ``<stem>_<capability>.yaml`` where the
    device has the capability, ``<stem>_<HW>x<nnodes>x<nproc>.yaml`` at that scale.
    """
    scale = f"{key.hardware}x{key.nnodes}x{key.nproc}"
    files: list[tuple[tuple[int, int], LayerFile, Path]] = []
    for place, folder in enumerate(adaptations):
        for path in sorted([*folder.glob(f"{stem}*.yaml"), *folder.glob(f"config/{stem}*.yaml")]):
            suffix = path.stem.removeprefix(stem)
            named = suffix.removeprefix("_")
            if not suffix:
                strength, applied, reason = 0, True, "applies at every scale"
            elif suffix == named:
                continue
            elif _SCALE.fullmatch(named):
                strength, applied, reason = 2, named == scale, f"the scale is {scale}"
            else:
                strength, applied = 1, named in capabilities
                known = ", ".join(sorted(capabilities)) or "none"
                reason = f"the device is not known to have {named} (known: {known}); vendor.yaml can list it"
                reason = f"the device has {named} ({capabilities[named]})" if applied else reason
            name = f"vendors/{vendor}/cases/{path.relative_to(folder.parent).as_posix()}"
            name += f" in {folder.parents[3]}" if place else ""
            files.append(((place, strength), LayerFile(file=name, applied=applied, reason=reason), path))
    used = sorted((entry for entry in files if entry[1].applied), key=lambda entry: (entry[0], entry[2]))
    return [Layer.of(file.file, read_yaml(path)) for _, file, path in used], tuple(file for _, file, _ in files)


class Detected(NamedTuple):
    """Properties of the machine under test, detected without a framework."""

    vendor: str
    hardware: str
    """The chip's name for keys (``H100``, ``CPU``)."""
    chip: Chip | None
    num_devices: int | None
    """None if ranks are not bound to devices (a CPU)."""
    ceilings: Ceilings | None = None
    is_present: bool = True
    """Whether devices of the vendor were found; otherwise ``hardware`` is only the vendor's name."""
    capabilities: Mapping[str, str] = {}
    """Capability (``fp8``) -> its source (``vendor.yaml, chip H100``, ``/proc/cpuinfo``)."""
    others: tuple[str, ...] = ()
    """Vendors of other accelerators of this machine, where the user named no vendor."""
    problem: str | None = None
    """Why the devices cannot be read although they are present."""


class RunRequest(NamedTuple):
    """Inputs that all keys of a run share."""

    options: RunOptions
    cluster: ClusterSpec
    launcher: LauncherSpec
    vendor: VendorSpec
    vendor_folder: Path
    detected: Detected
    where: str
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


class KeyRequest(NamedTuple):
    """One key of a run with all inputs of its planning. Planners append what is wrong to its lists."""

    run: RunRequest
    key: CaseKey
    request: CaseRequest
    folder: Folder
    case: CaseSpec
    capabilities: Mapping[str, str]
    problems: list[Problem]
    missing: list[Problem]
    """Missing data, weights, devices and versions, which a dry run lists instead of failing."""

    @property
    def where(self) -> str:
        """The run file, or ``command line``, for errors."""
        return self.run.where

    @property
    def adaptation(self) -> Path:
        """The vendor's folder for the case whose code applies; it need not exist."""
        return self.adaptations[-1]

    @property
    def adaptations(self) -> list[Path]:
        """All of the vendor's folders for the case, whose configuration files are layers."""
        return adaptations(self.run.vendor.name, f"{self.key.model}-{self.key.framework}")

    @property
    def case_file(self) -> str:
        """Name of the case's file in errors and provenance."""
        return f"cases/{self.folder.name}/case.yaml"

    def user_layers(self, command_line: Mapping[str, Any], files: Mapping[str, bool]) -> list[Layer]:
        """Return the layers of the run file and of the command line with absolute paths, since ranks run elsewhere.

        A relative path starts at the directory of the run file, or at the current one. ``files`` maps settings that
        name a file to whether they may also be another word, which is kept where no such file exists.
        """
        layers = []
        for name, given in ((self.where, flatten(self.request.settings)), ("command line", dict(command_line))):
            for key in files.keys() & given:
                if isinstance(value := given[key], str):
                    # The parent of "command line" as a path is the current directory.
                    path = (Path(name).parent / Path(value).expanduser()).absolute()
                    given[key] = value if files[key] and not path.is_file() else str(path)
            layers.append(Layer(name, given))
        return layers

    def data_dirs(self, case: CaseSpec, given: Path | None) -> Mapping[str, Path]:
        """Return the directories of a case's data; append to ``missing`` where the user must name one."""
        try:
            return self.run.data_dirs(case, given)
        except DataError as error:
            hint = "data: DIRECTORY next to the key in a run file; --data of train, infer"
            hint += "" if self.key.framework in folders("trainers") else "; --synthetic for speed only"
            self.missing.append(Problem(self.where, self.request.key, str(error), hint))
            return {}

    def data_of(self, names: Collection[str]) -> dict[str, Path]:
        """Return the directories of the named data sets, in the user's directory or to be fetched."""
        given, case = self.request.data, self.case
        dirs: dict[str, Path] = {}
        for entry in case.all_data:
            name = entry if isinstance(entry, str) else str(entry.get("name"))
            if name in names:
                is_there = name in case.data_names or (given is not None and (given / name).is_dir())
                dirs |= self.data_dirs(case.model_copy(update={"data": (entry,)}), given if is_there else None)
        return dirs

    def benchmark_dirs(self, settings: BenchmarkSettings) -> dict[str, Path]:
        """Return the data directories of accuracy benchmarks below the user's; append to ``missing`` the others."""
        given = self.request.data
        dirs: dict[str, Path] = {}
        for name in settings.benchmarks:
            if given is not None and (given / name).is_dir():
                dirs[name] = (given / name).absolute()
                continue
            where = f"{given}/{name}/ is not a directory" if given is not None else f"{name}/ is needed below --data"
            clone = f"git clone https://huggingface.co/datasets/{BENCHMARK_DATA[name].repository} {name} (with Git LFS)"
            hint = f"in the directory of --data: {clone}; or --set benchmarks=[], whose result is OPEN"
            self.missing.append(Problem(self.where, "benchmarks", f"no data of {name}: {where}", hint))
        return dirs


class PlannedWork(NamedTuple):
    """The work of the first round of a key."""

    work: Work
    directory: str
    data_dirs: Mapping[str, Path]
    provenance: Mapping[str, Provenance]
    layer_files: tuple[LayerFile, ...] = ()
    requires: Mapping[str, tuple[str, ...]] = {}
    """Origin (``trainer torchtitan``) -> requirements."""
    sdks: Mapping[str, str] = {}
    """Requirement that no index has -> where it comes from."""
    warnings: tuple[str, ...] = ()


def require_task(request: KeyRequest, task: Literal["train", "infer", "serve"], described: S | None) -> S:
    """Return the case's description of a task; raise SpecError with the cases that support it."""
    if described is not None:
        return described
    able = [name for name in folders("cases") if getattr(load_case(name), task) is not None]
    word = {"train": "training", "infer": "inference", "serve": "serving"}[task]
    what = f"the case {request.key.model!r} does not support {word}"
    raise SpecError([Problem(request.where, str(request.key), what, f"cases that do: {', '.join(able) or 'none'}")])
