"""Find the explanation of a figure, setting, audit rule, verdict, state, end reason or mark by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, final

from pydantic import BaseModel, TypeAdapter

from accelmark.explain.fields import documented_fields
from accelmark.results.figure_names import FIGURES, title_of
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RequestError, nearest
from accelmark.spec.model import Spec, read_yaml
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.launcher import launcher_options
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.runfile import RunSpec
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.serving import ServeSettings
from accelmark.spec.settings.training import TrainSettings

FILES_OF_SETTINGS: Final[Mapping[str, type[BaseModel]]] = {
    "setting of training": TrainSettings,
    "setting of inference": InferSettings,
    "setting of serving": ServeSettings,
    "key of a run file": RunSpec,
    "key of a cluster file": ClusterSpec,
    "key of case.yaml": CaseSpec,
    "key of vendor.yaml": VendorSpec,
}


class Term(Spec):
    """A word that AccelMark writes, explained."""

    text: str
    """What it means, as a sentence."""
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """An explanation."""

    name: str
    kind: str
    """``figure``, ``setting of training``, ``end reason``, ..."""
    text: str
    remedy: str = ""
    title: str = ""
    """The title of a figure on pages."""


@cache
def all_terms() -> dict[str, dict[str, Term]]:
    """Return kind (``audit rule``, ``verdict``, ``end reason``, ``state``, ``mark``) -> name -> explanation."""
    path = Path(__file__).with_name("terms.yaml")
    return TypeAdapter(dict[str, dict[str, Term]]).validate_python(read_yaml(path))


def settings_models() -> dict[str, type[BaseModel]]:
    """Return kind -> model of all settings and keys of files, those that launchers add to cluster files included."""
    added = {f"key of a cluster file, launcher {name}": model for name, model in launcher_options().items()}
    return {**FILES_OF_SETTINGS, **added}


def entries() -> Iterator[Entry]:
    """Yield everything that can be explained; a name may occur once in each kind."""
    for figure, info in FIGURES.items():
        unit = info.unit.format(unit="unit")
        measure = "a ratio" if unit == "ratio" else f"in {unit}" if unit else "a number"
        better = "" if info.better == "neither" else f" {info.better.capitalize()} is better."
        title = title_of(figure, "unit")
        text = f"{title}, {measure}: {info.explanation.format(unit='unit')}.{better}"
        yield Entry(figure.value, "figure", text, title=title)
    for kind, model in settings_models().items():
        for field in documented_fields(model):
            default = f" Default: {field.default}." if field.default not in ("", "-") else ""
            yield Entry(field.key, kind, f"{field.text} Type: {field.type}.{default}")
    for kind, terms in all_terms().items():
        for name, term in terms.items():
            yield Entry(name, kind, term.text, term.remedy)


def explain(name: str) -> list[Entry]:
    """Return the explanations of a name, or of a figure's title; a setting's last part is enough where no other has it.

    Upper and lower case, and blanks and underscores, need not be distinguished.

    Raises:
        RequestError: nothing has this name; suggests the nearest one.
    """
    known = list(entries())
    found = [entry for entry in known if entry.name == name]
    found = found or [entry for entry in known if entry.name.rpartition(".")[2] == name]
    if not found and name:
        found = [entry for entry in known if _plain(name) in (_plain(entry.name), _plain(entry.title))]
    if not found:
        close = nearest(_plain(name), {entry.name for entry in known})
        hint = close if close.startswith("did you") else "accelmark explain lists all names"
        raise RequestError(f"nothing is called {name!r}; {hint}")
    return found


def _plain(name: str) -> str:
    return name.lower().replace(" ", "_")
