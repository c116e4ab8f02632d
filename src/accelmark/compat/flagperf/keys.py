"""Convert the keys of ``CASES`` to entries of a run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from accelmark.compat.flagperf.coverage import Task, equivalent
from accelmark.compat.flagperf.inference import data_directory
from accelmark.compat.flagperf.parse import TABLES, Given, Values, text
from accelmark.datasets.spec import dataset_specs
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.key import CaseKey, is_version
from accelmark.spec.plugins.catalog import find, folders, load_case, load_framework
from accelmark.spec.plugins.launcher import load_launcher
from accelmark.spec.plugins.requirements import installed_version


@final
@dataclass(slots=True)
class Entry:
    """A key of ``CASES``, and the entry of the run file that it becomes."""

    origin: Given
    written: str
    """The key as FlagPerf has it."""
    key: str
    """The key with AccelMark's names."""
    task: Task
    data: str | None
    differs: str
    """Differences from the written key, and notes on its data."""
    needed: Mapping[str, Any]
    """Settings that are part of the framework's name."""
    settings: dict[str, Given] = field(default_factory=dict)
    """Dotted settings of its configuration files."""

    @property
    def case(self) -> str:
        """Name of the case."""
        return self.key.partition(":")[0]

    def values(self) -> Values:
        """Return the entry without settings, as the run file has it."""
        task = {"task": self.task} if self.task != "train" else {}
        return {"key": self.key, **task, **({"data": self.data} if self.data else {})}

    def left(self, why: str) -> Problem:
        """Return the problem that reports what became of the key."""
        return self.origin.left(f"{self.written}: {why}")


def entries_of(cases: Sequence[Given], cluster: ClusterSpec, left_over: list[Problem]) -> list[Entry]:
    """Return an entry for each key of ``cases``; list wrong and repeated ones.

    Raises SpecError if CASES is not a dictionary.
    """
    listed: dict[tuple[str, str], Entry] = {}
    for item in cases:
        table = item.read(_table)
        if not table:
            left_over.append(item.left("names no case"))
        for written, data in table.items():
            entry = _entry(item, written, data, cluster)
            model = equivalent(written.partition(":")[0], entry.task)
            if model is not None and model.case is None:
                left_over.append(entry.left(f"no case carries it: {model.note}"))
                continue
            try:
                # An inference key names no chip; it is detected at run time.
                slug = CaseKey.parse(entry.key, hardware="any").slug
            except SpecError as error:
                left_over.append(entry.left("; ".join(problem.what for problem in error.problems)))
                continue
            before = listed.setdefault((entry.task, slug), entry)
            if before is not entry and before.values() != entry.values():
                left_over.append(
                    entry.left(f"is given twice, also as {before.written} with {before.data or 'no data'}")
                )
    return list(listed.values())


def _table(value: Any) -> dict[str, str | None]:
    if not isinstance(value, Mapping):
        raise TypeError("is not a table of keys and data directories")
    return {text(key): text(data) if data is not None else None for key, data in value.items()}


def _entry(origin: Given, written: str, data: str | None, cluster: ClusterSpec) -> Entry:
    task: Task = "infer" if written.count(":") == 1 else "train"  # an inference key has two parts
    key, settings, notes = converted_key(written, task, cluster)
    case = key.partition(":")[0]
    if data and case in folders("cases"):
        if task == "infer":
            data, moved = data_directory(data, case)
            notes.append(moved)
        else:
            notes += _layout(case, data)
    return Entry(origin, written, key, task, data, "; ".join(filter(None, notes)), settings)


def _layout(case: str, data: str) -> Iterator[str]:
    """Yield the required content of a training case's data directory."""
    for spec in dataset_specs(load_case(case).data, f"cases/{case}/case.yaml"):
        parts = [part.path for part in spec.tree or spec.files]
        yield f"data {data} must contain {', '.join(parts[:4])} ({spec.title}), or it is not read"


def converted_key(written: str, task: Task, cluster: ClusterSpec) -> tuple[str, Mapping[str, Any], list[str]]:
    """Return a key with AccelMark's names, the settings that the framework's name means, and notes.

    A framework version is kept only where an image or this machine has it.
    """
    model, *parts = written.strip().split(":")
    covered = equivalent(model, task)
    name = model if covered is None or covered.case is None else covered.case
    notes = [covered.note] if covered is not None and name != model else []
    settings: Mapping[str, Any] = {}
    if parts:
        framework, _, version = parts[0].partition("_")
        if (own := TABLES["frameworks"].get(framework)) is not None:
            notes.append(own["why"])
            framework, settings = own["name"], own.get("settings", {})
        elif version:
            lacking = _lacking(framework, version, cluster)
            framework, notes = (framework, [*notes, lacking]) if lacking else (parts[0], notes)
        parts[0] = framework
    return ":".join([name, *parts]), settings, notes


def _lacking(framework: str, version: str, cluster: ClusterSpec) -> str:
    """Return the available versions, where a key's version has no image and is not installed on this machine."""
    if cluster.container is not None and cluster.vendor is not None:
        folder = find("vendors", cluster.vendor).path / "images"
        if (folder / f"{framework}_{version}" / "Dockerfile").is_file():
            return ""
        images = sorted(path.parent.name for path in folder.glob("*/Dockerfile"))
        return f"no image of {framework} {version}; vendor {cluster.vendor} has images {', '.join(images) or '(none)'}"
    if not load_launcher(cluster.launcher).is_localhost:
        return f"the hosts' own {framework} is used instead of {version}; name a version in the key to require it"
    names = load_framework(framework).distributions if framework in folders("frameworks") else ()
    installed = next(filter(None, map(installed_version, names)), None)
    if installed is not None and is_version(installed, version):
        return ""
    return f"{framework} {version} is not installed here, but {installed or 'no version'} is, which is used instead"
