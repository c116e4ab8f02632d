"""A vendor's folder for a case: its contents, and which of its configuration files apply to a key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from accelmark.plan.plan import LayerFile
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer
from accelmark.spec.log.records import AdaptationFiles
from accelmark.spec.model import read_yaml
from accelmark.spec.plugins.catalog import tree_hash
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.secret import without_userinfo

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


Capabilities = Mapping[str, str]
"""Capability of the device under test (``fp8``) -> its source (``vendor.yaml, chip H100``, ``/proc/cpuinfo``)."""


def host_capabilities(vendor: VendorSpec) -> dict[str, str]:
    """Detect capabilities from files of this host; return each with its file."""
    return {
        name: str(test.file)
        for name, test in vendor.capabilities.items()
        if test.file.is_file() and re.search(test.pattern, test.file.read_text(encoding="utf-8", errors="replace"))
    }


def vendor_layers(
    adaptations: Sequence[Path], vendor: str, key: CaseKey, capabilities: Capabilities, stem: str
) -> tuple[list[Layer], tuple[LayerFile, ...]]:
    """Return the vendor's layers for ``key``, weakest first, and which files were applied.

    Files are in the folders ``adaptations``, weakest first, or in their ``config/``. ``<stem>.yaml`` (``stem`` is
    ``config``, ``infer`` or ``serve``) applies at every scale, ``<stem>_<capability>.yaml`` where the device has the
    capability, ``<stem>_<HW>x<nnodes>x<nproc>.yaml`` at that scale. Raises SpecError if a file that applies cannot be
    read.
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
                reason = f"the device is not known to have {named} (known: {known})"
                reason = f"the device has {named} ({capabilities[named]})" if applied else reason
            name = f"vendors/{vendor}/cases/{path.relative_to(folder.parent).as_posix()}"
            name += f" in {folder.parents[3]}" if place else ""
            files.append(((place, strength), LayerFile(file=name, applied=applied, reason=reason), path))
    used = sorted((entry for entry in files if entry[1].applied), key=lambda entry: (entry[0], entry[2]))
    return [Layer.of(file.file, read_yaml(path)) for _, file, path in used], tuple(file for _, file, _ in files)
