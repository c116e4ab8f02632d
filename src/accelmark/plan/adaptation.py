"""A vendor's folder for a case: its contents, and which of its configuration files apply to a key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from accelmark.plan.plan import LayerFile
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer
from accelmark.spec.log.records import AdaptationFiles
from accelmark.spec.model import read_yaml
from accelmark.spec.plugins.catalog import tree_hash
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.secret import without_userinfo

ENVIRONMENT_FILE: Final = "environment_variables.sh"
REQUIREMENTS_FILE: Final = "requirements.txt"
BUILD_FILES: Final = ("setup.py", "pyproject.toml", "setup.cfg", "MANIFEST.in", "CMakeLists.txt", "README.md")
_SCALE: Final = re.compile(r".+x\d+x\d+")


def adaptation_files(folder: Path) -> AdaptationFiles | None:
    """Return the contents of ``folder`` (``vendors/<v>/cases/<model>-<framework>``), None if it does not exist."""
    if not folder.is_dir():
        return None
    csrc = folder / "csrc"
    return AdaptationFiles(
        path=folder,
        is_extension=not (folder.parents[1] / "vendor.yaml").is_file(),
        sha256=tree_hash(folder, whole=True),
        extern={name: _lines(path, "#") for name, path in _files(folder / "extern") if path.suffix == ".py"},
        kernels={name: _lines(path, "//") for name, path in _files(csrc) if path.name not in BUILD_FILES},
        requirements=_requirements(configuration_file(folder, REQUIREMENTS_FILE)),
        has_environment=configuration_file(folder, ENVIRONMENT_FILE).is_file(),
        has_build=any((csrc / name).is_file() for name in ("setup.py", "pyproject.toml")),
    )


def requirements_file(*folders: Path | None) -> Path | None:
    """Return the first ``requirements.txt`` of ``folders``: a vendor's file replaces the case's."""
    files = (configuration_file(folder, REQUIREMENTS_FILE) for folder in folders if folder is not None)
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


def _requirements(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    # for reports only; pip reads the file itself
    return tuple(without_userinfo(line) for line in lines if line)


@final
@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of the device under test (``fp8``, ``amx_bf16``) and their sources."""

    sources: Mapping[str, str] = field(default_factory=dict)
    """Capability -> its source (``vendor.yaml, chip H100``, ``/proc/cpuinfo``)."""
    unknown: str | None = None
    """Why the list may be incomplete; null if it is complete."""


def host_capabilities(vendor: VendorSpec) -> dict[str, str]:
    """Detect capabilities from files of this host; return each with its file."""
    capabilities = {}
    for name, test in vendor.capabilities.items():
        try:
            text = test.file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if re.search(test.pattern, text):
            capabilities[name] = str(test.file)
    return capabilities


def vendor_layers(
    adaptations: Sequence[Path], vendor: str, key: CaseKey, capabilities: Capabilities, stem: str
) -> tuple[list[Layer], tuple[LayerFile, ...]]:
    """Return the vendor's layers for ``key``, weakest first, and which files were applied.

    Files are in the folder or in its ``config/``. ``<stem>.yaml`` applies at every scale,
    ``<stem>_<capability>.yaml`` where the device has the capability (several in alphabetical order),
    ``<stem>_<HW>x<nnodes>x<nproc>.yaml`` at that scale; ``stem`` is ``config`` or ``infer``. The
    folders ``adaptations``, weakest first, need not exist; files of the second and later ones are named with their
    directory. Raises SpecError if a file that applies cannot be read.
    """
    scale = f"{key.hardware}x{key.nnodes}x{key.nproc}"
    files: list[tuple[tuple[int, int], LayerFile, Path]] = []
    for place, folder in enumerate(adaptations):
        for path in sorted([*folder.glob(f"{stem}*.yaml"), *folder.glob(f"config/{stem}*.yaml")]):
            name = f"vendors/{vendor}/cases/{path.relative_to(folder.parent).as_posix()}"
            name += f" in {folder.parents[3]}" if place else ""
            suffix = path.stem.removeprefix(stem)
            if not suffix:
                files.append(((place, 0), LayerFile(file=name, applied=True, reason="applies at every scale"), path))
            elif _SCALE.fullmatch(suffix[1:]):
                file = LayerFile(file=name, applied=suffix[1:] == scale, reason=f"the scale is {scale}")
                files.append(((place, 2), file, path))
            elif suffix.startswith("_"):
                files.append(((place, 1), _capability_file(name, suffix[1:], capabilities), path))
    applied = sorted((entry for entry in files if entry[1].applied), key=lambda entry: (entry[0], entry[2]))
    return [Layer.of(file.file, read_yaml(path)) for _, file, path in applied], tuple(file for _, file, _ in files)


def _capability_file(name: str, capability: str, capabilities: Capabilities) -> LayerFile:
    source = capabilities.sources.get(capability)
    if source is not None:
        return LayerFile(file=name, applied=True, reason=f"the device has {capability} ({source})")
    known = ", ".join(sorted(capabilities.sources)) or "none"
    reason = f"the device is not known to have {capability} (known: {known})"
    if capabilities.unknown is not None:
        reason += f"; {capabilities.unknown}"
    return LayerFile(file=name, applied=False, reason=reason)
