"""Input and output of a planner: the request for one key and the planned work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from accelmark.plan.layering import Capabilities, vendor_layers
from accelmark.plan.plan import LayerFile
from accelmark.spec.job import Work
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, Provenance
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import Folder
from accelmark.spec.runfile import CaseRequest

DataDirs = Callable[[CaseSpec, Path | None], Mapping[str, Path]]
"""(case, data directory of the user or None) -> {data set name: its directory, existing or to be fetched}."""


@final
@dataclass(frozen=True, slots=True)
class KeyRequest:
    """One key of a run with all inputs of its planning."""

    key: CaseKey
    request: CaseRequest
    folder: Folder
    case: CaseSpec
    vendor: str
    vendor_folder: Path
    capabilities: Capabilities
    is_open: bool
    where: str
    """The run file, or ``command line``, for errors."""
    command_line: Mapping[str, Any]
    data_dirs: DataDirs

    @property
    def adaptation(self) -> Path:
        """The vendor's folder for the case; it need not exist."""
        return self.vendor_folder / "cases" / f"{self.key.model}-{self.key.framework}"

    @property
    def case_file(self) -> str:
        """Name of the case's file in errors and provenance."""
        return f"cases/{self.folder.name}/case.yaml"

    def vendor_layers(self, stem: str) -> tuple[list[Layer], tuple[LayerFile, ...]]:
        """Return the vendor's layers from its files ``<stem>*.yaml``, and which of the files apply."""
        return vendor_layers(self.adaptation, self.vendor, self.key, self.capabilities, stem)


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


Planner = Callable[[KeyRequest], PlannedWork]
"""Plans one kind of work. Raises SpecError with all problems of the key."""
