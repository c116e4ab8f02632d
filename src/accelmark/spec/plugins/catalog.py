"""Find plug-ins (cases, vendors, frameworks, ..., engines) in AccelMark, installed packages and ACCELMARK_PLUGINS."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast, get_args

from pydantic import Field, model_validator

from accelmark.spec.backports import entry_points
from accelmark.spec.errors import Problem, RequestError, SpecError, closest, nearest
from accelmark.spec.model import Spec, parse, read_value, read_yaml
from accelmark.spec.plugins.case import REFERENCE_FILE, CaseSpec, ReferenceLoss
from accelmark.spec.plugins.framework import FrameworkLaunch, FrameworkSpec
from accelmark.spec.plugins.programs import ServerSpec, TrainerSpec
from accelmark.spec.plugins.vendor import FrameworkDevice, VendorSpec
from accelmark.spec.settings.inference import InferPrecision
from accelmark.spec.settings.training import Scalar

M = TypeVar("M", bound=Spec)

Kind = Literal["cases", "vendors", "frameworks", "launchers", "trainers", "servers"]
JOB_KINDS: Final[tuple[Kind, ...]] = ("cases", "vendors", "frameworks", "trainers", "servers")
"""Kinds of plug-ins that a job needs on its hosts."""
PLUGINS_VARIABLE: Final = "ACCELMARK_PLUGINS"
"""Environment variable: directories, separated as in ``PATH``, with one folder per kind (``cases/``, ``trainers/``)."""
ADAPTATION_NAMES: Final = (
    "config*.yaml", "infer*.yaml", "serve*.yaml", "environment_variables.sh", "requirements.txt", "extern", "csrc",
    "README.md", "__*",
)  # fmt: skip
"""Names in a vendor's folder for a case, or its ``config/``, that have a meaning."""

_PACKAGE: Final = {
    "cases": "accelmark.cases",
    "vendors": "accelmark.vendors",
    "frameworks": "accelmark.frameworks",
    "launchers": "accelmark.run.launchers",
    "trainers": "accelmark.train.external.trainers",
    "servers": "accelmark.serving.servers",
}
_SOURCE: Final = Path(__file__).parents[3]
ENGINES_ENTRY_POINTS: Final = "accelmark.engines"
"""Entry point group in which a package declares its engines: ``name = package.module:Class``."""
_ENGINES: Final = _SOURCE / "accelmark/infer/engines"
_ENGINES_FILE: Final = "engines.yaml"
"""File next to the engines of a folder: name -> :class:`EngineSpec`; optional in a vendor's folder."""
_OTHER_TASKS: Final = ("infer", "serve")
"""Sections of ``case.yaml``, and beginnings of the names of a case's files, that training does not use."""
SKIPPED: Final = {"__pycache__", ".git", ".mypy_cache", ".ruff_cache"}


class EngineOptionSpec(Spec):
    """Declaration of one of an engine's ``engine_options``; a text alone is read as ``what``."""

    what: str
    """What it does, with the default."""
    values: tuple[Scalar, ...] = ()
    """All values that it may have; empty: not declared."""
    least: int | None = None
    """Where it is an integer: the least one."""

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, given: Any) -> Any:
        return {"what": given} if isinstance(given, str) else given

    def problem(self, value: object) -> str | None:
        """Return why it cannot have ``value``, or None."""
        if self.values and not any(type(value) is type(allowed) and value == allowed for allowed in self.values):
            is_switch = self.values == (False, True)
            return "must be true or false" if is_switch else f"must be one of {', '.join(map(str, self.values))}"
        if self.least is not None and (type(value) is not int or value < self.least):
            return f"must be an integer of at least {self.least}"
        return None


class EngineSpec(Spec):
    """Declaration of an engine, readable without importing it."""

    title: str
    module: str
    distributions: tuple[str, ...] = ()
    """Packages that may provide ``module``, most likely first; empty: the package named like the module."""
    requires: tuple[str, ...] = ()
    builds: dict[str, str] = Field(default_factory=dict)
    """Device type -> the build of ``module`` that computes on it, in place of the one in ``requires``."""
    sdks: dict[str, str] = Field(default_factory=dict)
    """Requirement that no index has -> where it comes from."""
    precisions: tuple[InferPrecision, ...] = ()
    """Precisions that it computes in; empty: not declared, and ``--tune`` keeps the case's precision."""
    generates: bool = False
    iterates: bool = False
    """Whether it computes models with a loop of dependent steps, such as denoising, which are not one static graph."""
    max_devices: int | None = 1
    """Devices of one language model; null: any number."""
    tunes: dict[str, tuple[Scalar | None, ...]] = Field(default_factory=dict)
    """Setting -> values that ``--tune`` tries; an option with the value null is left out."""
    device_types: tuple[str, ...] = ()
    """The framework's names of the devices that it computes on (``cuda``); empty: not declared."""
    loads: bool | None = None
    """Whether it loads a compiled engine (``exist_compiler_path``); null: reported when it compiles."""
    options: dict[str, EngineOptionSpec] = Field(default_factory=dict)

    def requires_on(self, device_type: str, options: Mapping[str, object]) -> tuple[str, ...]:
        """Return what to install for a device type; any build will do where the options name the ``providers``."""
        build = None if options.get("providers") else self.builds.get(device_type)
        if build is None:
            return self.requires
        return (*(requirement for requirement in self.requires if not requirement.startswith(self.module)), build)

    def uses(self, num_devices: int) -> bool:
        """Whether it can spread one model over so many devices."""
        return self.max_devices is None or num_devices <= self.max_devices


class FolderRef(Spec):
    """Location of a case or vendor folder: an importable package or a directory."""

    name: str
    path: Path
    package: str | None = None
    """The package of the folder (``accelmark.cases.resnet_mini``); null for a loose directory."""
    sha256: str
    """Hash over the folder's files; of a case, over the files of its task (:func:`task_files`)."""


class Folder(NamedTuple):
    """The folder of a plug-in, and where it was found."""

    name: str
    path: Path
    package: str | None
    origin: str
    """``accelmark``, the distribution that ships it, or the directory."""

    def ref(self, task: str) -> FolderRef:
        """Return a reference to a case's folder for a job of this task, with the hash of the task's files."""
        return FolderRef(name=self.name, path=self.path, package=self.package, sha256=case_hash(self.path, task))


def tree_hash(path: Path, *, whole: bool = False) -> str:
    """Return the SHA-256 over the names and contents of all files below ``path``, in sorted order.

    Caches, folders that are links, and ``README.md`` files, whose tables of results change, are excluded. ``whole``
    excludes caches only: code in a vendor's folder could use every other file.
    """
    return files_hash(tree_files(path, whole=whole))


def tree_files(path: Path, *, whole: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of the files that :func:`tree_hash` covers, in its order."""
    files: list[Path] = []
    for directory, names, found in os.walk(path, followlinks=whole):
        names[:] = [name for name in names if name not in SKIPPED]
        files += [Path(directory, name) for name in found if whole or is_hashed(name)]
    for file in sorted(files):
        yield str(file.relative_to(path)), file.read_bytes()


def files_hash(files: Iterable[tuple[str, bytes]]) -> str:
    """Return the SHA-256 over (name, content) of files in the given order."""
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def case_hash(path: Path, task: str) -> str:
    """Return the SHA-256 over those files of a case's folder from which a result of ``task`` follows."""
    return files_hash(task_files(tree_files(path), task))


def task_files(files: Iterable[tuple[str, bytes]], task: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a case for a task; training leaves out files and sections of inference and serving."""
    for name, content in files:
        if task == "train" and name.startswith(_OTHER_TASKS):
            continue
        if task == "train" and name == "case.yaml":
            with contextlib.suppress(SpecError, ValueError, TypeError):  # a damaged file counts as it is
                sections = dict(read_value(content.decode(), name)).items()
                kept = [[key, value] for key, value in sections if key not in _OTHER_TASKS]
                content = json.dumps(kept, default=str).encode()
        yield name, content


def is_hashed(file: str) -> bool:
    """Return whether :func:`tree_hash` includes a file of this name by default."""
    return not file.endswith(".pyc") and file != "README.md"


def folders(kind: Kind) -> dict[str, Folder]:
    """Return all folders of ``kind`` by name; raise SpecError with both paths if two have the same name."""
    return _folders(kind, os.environ.get(PLUGINS_VARIABLE, ""))


@cache
def _folders(kind: Kind, plugins: str) -> dict[str, Folder]:
    by_name: dict[str, Folder] = {}
    for folder in _search(kind, plugins):
        other = by_name.setdefault(folder.name, folder)
        if other.path != folder.path:
            what = f"two {kind} have the name {folder.name!r}: {other.path} ({other.origin}) and here"
            raise SpecError([Problem(str(folder.path), "", what, "rename or uninstall one")])
    return dict(sorted(by_name.items()))


def plugin_directories() -> list[Path]:
    """Return the directories of ``ACCELMARK_PLUGINS``."""
    return [Path(entry).absolute() for entry in os.environ.get(PLUGINS_VARIABLE, "").split(os.pathsep) if entry]


def add_plugins(directory: Path) -> None:
    """Add a directory to ``ACCELMARK_PLUGINS`` of this process if it has a folder of plug-ins."""
    known = plugin_directories()
    if directory.absolute() not in known and any((directory / kind).is_dir() for kind in JOB_KINDS):
        os.environ[PLUGINS_VARIABLE] = os.pathsep.join(map(str, [*known, directory.absolute()]))


def extensions(vendor: str) -> list[Path]:
    """Return folders ``vendors/<vendor>`` in ``ACCELMARK_PLUGINS`` without a ``vendor.yaml``."""
    paths = [directory / "vendors" / vendor for directory in plugin_directories()]
    return [path for path in paths if path.is_dir() and not (path / "vendor.yaml").is_file()]


def adaptations(vendor: str, case: str) -> list[Path]:
    """Return the vendor's folders for a case, then those of its extensions; the last one's code applies."""
    more = (path / "cases" / case for path in extensions(vendor))
    return [find("vendors", vendor).path / "cases" / case, *filter(Path.is_dir, more)]


def unread_files(folder: Path) -> list[Path]:
    """Return what nothing reads in a vendor's folder for a case and its ``config/``."""
    files = [*(path for path in folder.iterdir() if path.name != "config"), *folder.glob("config/*")]
    return sorted(path for path in files if not any(map(path.match, ADAPTATION_NAMES)))


def unread_plugins() -> list[str]:
    """Return what is wrong with ``ACCELMARK_PLUGINS``: missing directories, and what nothing reads in them."""
    problems = []
    for directory in plugin_directories():
        kinds = [kind for kind in get_args(Kind) if (directory / kind).is_dir()]
        if not kinds and not (directory / "claims").is_dir():
            expected = f"has none of {', '.join(f'{kind}/' for kind in get_args(Kind))}"
            problems.append(f"{directory}: {expected if directory.is_dir() else 'does not exist'}")
        for kind in kinds:
            known = {folder.path for folder in folders(kind).values()}
            for path in sorted((directory / kind).iterdir()):
                is_extension = kind == "vendors" and path.name in folders("vendors")
                if path.is_dir() and path.name not in SKIPPED and path not in known and not is_extension:
                    problems.append(f"{path}: is not read: it has no {kind[:-1]}.yaml")
    extended = [path for vendor in folders("vendors") for path in extensions(vendor)]
    others = (
        other for path in extended for other in path.iterdir() if other.name not in {*SKIPPED, "cases", "README.md"}
    )
    problems += [f"{other}: is not read: only cases/ extends a vendor" for other in sorted(others)]
    for case in (case for path in extended for case in sorted(path.glob("cases/*"))):
        if case.name.rpartition("-")[0] not in folders("cases") or not case.is_dir():
            problems.append(f"{case}: is not read: no case has this name")
        else:
            problems += [f"{file}: is not read" for file in unread_files(case)]
    return problems


def look_again() -> None:
    """Clear the cache of found folders, after one was created or installed."""
    _folders.cache_clear()


def _search(kind: Kind, plugins: str) -> Iterable[Folder]:
    package = _PACKAGE[kind]
    yield from _below(_SOURCE.joinpath(*package.split(".")), kind, package, "accelmark")
    for entry in entry_points(group=f"accelmark.{kind}"):
        origin = entry.dist.name if entry.dist else "an installed package"
        spec = importlib.util.find_spec(entry.module)
        locations = list(spec.submodule_search_locations or ()) if spec else []
        if not locations:
            what = f"the entry point {entry.name!r} names {entry.value!r}, which is not an importable folder"
            raise SpecError([Problem(origin, f"accelmark.{kind}", what)])
        yield Folder(entry.name, Path(locations[0]), entry.module, origin)
    for directory in filter(None, plugins.split(os.pathsep)):
        yield from _below(Path(directory).absolute() / kind, kind, None, directory)


def _below(directory: Path, kind: Kind, package: str | None, origin: str) -> Iterable[Folder]:
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if (path / f"{kind[:-1]}.yaml").is_file():
            yield Folder(path.name, path, f"{package}.{path.name}" if package else None, origin)
        elif kind == "trainers" and path.suffix == ".yaml":
            yield Folder(path.stem, path, None, origin)


def find(kind: Kind, name: str, where: str = "command line") -> Folder:
    """Return the folder of one plug-in; raise RequestError with the nearest name if there is none."""
    known = folders(kind)
    if name not in known:
        hints = [nearest(name, known)]
        if not closest(name, sorted(known)):
            hints += unread_plugins() if plugin_directories() else [f"{PLUGINS_VARIABLE} is not set"]
        raise RequestError(f"{where}: unknown {kind.removesuffix('s')} {name!r} ({'; '.join(hints)})")
    return known[name]


def load_spec(kind: Kind, name: str, model: type[M], where: str = "command line") -> M:
    """Read and check the YAML file of one plug-in: ``<name>/<kind>.yaml``, for a trainer also ``<name>.yaml``."""
    path = find(kind, name, where).path
    return cast("M", _load(path if path.is_file() else path / f"{kind[:-1]}.yaml", name, model))


@cache
def _load(path: Path, name: str, model: type[M]) -> M:
    values = read_yaml(path)
    spec = parse(model, values, str(path))
    if values["name"] != name:
        raise SpecError([Problem(str(path), "name", f"is {values['name']!r}, but the folder is {name!r}")])
    return spec


def load_case(name: str) -> CaseSpec:
    """Read and check ``case.yaml`` of one case, with the reference loss of a file next to it."""
    case, path = load_spec("cases", name, CaseSpec), find("cases", name).path / REFERENCE_FILE
    if case.train is None or not path.is_file():
        return case
    if case.train.reference_loss is not None:
        raise SpecError([Problem(str(path), "", "case.yaml states a reference_loss too", "remove one of the two")])
    train = case.train.model_copy(update={"reference_loss": parse(ReferenceLoss, read_yaml(path), str(path))})
    return case.model_copy(update={"train": train})


load_vendor: Final = partial(load_spec, "vendors", model=VendorSpec)
load_framework: Final = partial(load_spec, "frameworks", model=FrameworkSpec)
load_trainer: Final = partial(load_spec, "trainers", model=TrainerSpec)
load_server: Final = partial(load_spec, "servers", model=ServerSpec)


def readable(kind: Kind, load: Callable[[str], M]) -> tuple[dict[str, M], list[str]]:
    """Return all plug-ins of ``kind`` that ``load`` can read, by name, and the problems of the others."""
    specs: dict[str, M] = {}
    problems: list[str] = []
    for name in folders(kind):
        try:
            specs[name] = load(name)
        except SpecError as error:
            problems.append(str(error))
    return specs, problems


def framework_device(vendor: VendorSpec, framework: str) -> FrameworkDevice:
    """Return the vendor's device for ``framework``, from ``vendor.yaml``, else from ``framework.yaml``."""
    device = vendor.frameworks.get(framework) or load_framework(framework).devices.get(vendor.name)
    if device is None:
        what = f"declares no device for framework {framework!r} (declared: {', '.join(vendor.frameworks) or 'none'})"
        raise RequestError(f"vendor {vendor.name} {what}; add frameworks.{framework} to its vendor.yaml")
    return device


def hooks_file(framework: str) -> Path | None:
    """Return the file of a framework that lists what vendors may replace, or None if it has no hooks."""
    file = find("frameworks", framework).path / "hooks.py"
    return file if file.is_file() else None


def allowed_hooks(framework: str) -> tuple[str, ...]:
    """Return ``ALLOWED_HOOKS`` of a framework's ``hooks.py``, or nothing, without importing the framework."""
    file = hooks_file(framework)
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file is not None else ():
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ALLOWED_HOOKS" and node.value is not None:
            return tuple(ast.literal_eval(node.value))
    return ()


def frameworks_of(case: CaseSpec) -> list[str]:
    """Return the frameworks that a case can be trained in: by their files, a declared class, or ``arrays.py``."""
    folder, train = find("cases", case.name).path, case.train
    shared = (*train.arrays, *train.classes) if train is not None else ()
    return [name for name in folders("frameworks") if name in shared or (folder / f"{name}.py").is_file()]


def inference_frameworks_of(case: CaseSpec) -> list[str]:
    """Return the frameworks that a case has inference in: by its files or classes; a language model needs none."""
    folder, infer = find("cases", case.name).path, case.infer
    shared = () if infer is None else ("pytorch",) if infer.generates else (*infer.classes,)
    return [name for name in folders("frameworks") if name in shared or (folder / f"infer_{name}.py").is_file()]


def load_launch(name: str) -> FrameworkLaunch:
    """Import ``launch.py`` of one framework, which imports no framework; raise RequestError if there is none."""
    return cast("FrameworkLaunch", folder_module(find("frameworks", name), "launch"))


def folder_module(folder: Folder | FolderRef, module: str) -> ModuleType:
    """Import ``module`` of a folder, as part of its package if it has one; raise RequestError if there is none."""
    path = folder.path / f"{module}.py"
    if not path.is_file():
        others = sorted(file.stem for file in folder.path.glob("*.py"))
        raise RequestError(f"{folder.name!r} has no {path} ({nearest(module, others)})")
    if folder.package is not None:
        return importlib.import_module(f"{folder.package}.{module}")
    return file_module(f"accelmark_folder_{folder.path.parent.name}_{folder.name}_{module}", path)


def file_module(name: str, path: Path) -> ModuleType:
    """Import the file at ``path`` as module ``name``, as a package where it is an ``__init__.py``."""
    folder = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folder)
    if spec is None or spec.loader is None:
        raise RequestError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def known_engines(vendor_folder: Path | None) -> set[str]:
    """Return the names of all engines in this Python environment that a run on this vendor can use."""
    engines = engine_files() | {entry.name for entry in entry_points(group=ENGINES_ENTRY_POINTS)}
    return engines | (engine_files(vendor_folder / "engines") if vendor_folder is not None else set())


def engine_specs(vendor_folder: Path | None = None) -> dict[str, EngineSpec]:
    """Return the declared engines of AccelMark and of a vendor, whose declarations take precedence."""
    declared: dict[str, EngineSpec] = {}
    for folder in (_ENGINES, *([vendor_folder / "engines"] if vendor_folder is not None else [])):
        path = folder / _ENGINES_FILE
        entries = read_yaml(path) if path.is_file() else {}
        if unknown := sorted(set(entries) - engine_files(folder)):
            raise SpecError([Problem(str(path), unknown[0], f"there is no file {unknown[0]}.py")])
        declared |= {name: parse(EngineSpec, values, str(path)) for name, values in entries.items()}
    return declared


def engine_files(folder: Path = _ENGINES) -> set[str]:
    """Return the names of the engines in a directory, one per file; by default AccelMark's own."""
    return {file.stem for file in folder.glob("[!_]*.py")}
