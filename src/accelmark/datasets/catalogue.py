"""Every data set of every case: how it is obtained, whether it is in the cache, and which cases use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accelmark.datasets.ensure import cached_path
from accelmark.datasets.prepare.preparation import Preparation
from accelmark.datasets.spec import DatasetSpec, dataset_specs
from accelmark.spec.errors import RequestError, nearest
from accelmark.spec.plugins.catalog import folders, load_case

Obtained = Literal["cached", "fetched when needed", "prepared from archives", "by hand"]


@dataclass(frozen=True, slots=True)
class Known:
    """A data set with the cases that use it."""

    spec: DatasetSpec
    cases: tuple[str, ...]
    obtained: Obtained
    bytes: int | None
    """Size in the cache where it is there, or of the files where they are declared; None: not known."""
    path: Path | None
    """Directory in the cache, where it is there."""


def known_datasets() -> Sequence[Known]:
    """Return the data sets of all cases, by name; weights are among them. Raises SpecError for a damaged case file."""
    specs: dict[str, DatasetSpec] = {}
    users: dict[str, list[str]] = {}
    for name in sorted(folders("cases")):
        for spec in dataset_specs(load_case(name).all_data, f"cases/{name}/case.yaml"):
            # A case of inference may declare less of a data set than one of training, for example only its test split.
            if spec.name not in specs or len(spec.tree) > len(specs[spec.name].tree):
                specs[spec.name] = spec
            users.setdefault(spec.name, []).append(name)
    prepared, known = preparations(), []
    for name, spec in sorted(specs.items()):
        cases, path = tuple(users[name]), cached_path(spec)
        if spec.sources and path.is_dir():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            known.append(Known(spec, cases, "cached", size, path))
        elif spec.sources:
            known.append(Known(spec, cases, "fetched when needed", spec.bytes, None))
        else:
            obtained: Obtained = "prepared from archives" if name in prepared else "by hand"
            known.append(Known(spec, cases, obtained, spec.bytes or None, None))
    return known


def preparations() -> Mapping[str, Preparation]:
    """Return how data sets are prepared from archives, by their names."""
    from accelmark.datasets.prepare.published import PREPARATIONS

    return PREPARATIONS


def known_of(name: str) -> Known:
    """Return a data set with the cases that use it; raises RequestError where none does."""
    known = {dataset.spec.name: dataset for dataset in known_datasets()}
    if name not in known:
        raise RequestError(f"no case uses a data set {name!r} ({nearest(name, known)}); accelmark data list shows all")
    return known[name]


def preparation_of(name: str) -> tuple[DatasetSpec, Preparation]:
    """Return a data set and how it is prepared; raises RequestError with advice where that is not known."""
    spec, known = known_of(name).spec, preparations()
    if name not in known:
        how = "AccelMark fetches it when it is needed" if spec.sources else spec.how_to_get
        prepared = f"prepared are: {', '.join(sorted(known))}"
        raise RequestError(f"{name} is not prepared from archives: {how.removesuffix('.')}; {prepared}")
    return spec, known[name]
