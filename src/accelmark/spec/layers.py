"""Configuration layers: the strongest layer wins, and every value records which layer it came from."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Generic, TypeVar, final

from pydantic import BaseModel, TypeAdapter, ValidationError

from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.inference.settings import Note
from accelmark.spec.job import Provenance
from accelmark.spec.model import problems_of
from accelmark.spec.plugins.case import TrainCaseSpec
from accelmark.spec.settings import TrainSettings

S = TypeVar("S", bound=BaseModel)

ALWAYS_MUTABLE: Final = ("loader.synthetic",)
"""Settings that every layer may change; doing so marks the result."""


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one file or from the command line, as ``{dotted key: value}``."""

    name: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, nested: Mapping[str, Any]) -> Layer:
        """Make a layer from nested mappings, as YAML gives them."""
        return cls(name, flatten(nested))


@final
@dataclass(frozen=True, slots=True)
class Resolved(Generic[S]):
    """Merged settings, the provenance of each (by dotted key), and notes for the user."""

    settings: S
    provenance: Mapping[str, Provenance]
    notes: tuple[Note, ...] = ()


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into ``{dotted key: value}``."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{dotted key: value}`` into nested dictionaries."""
    nested: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, leaf = dotted.split(".")
        level = nested
        for parent in parents:
            below = level.setdefault(parent, {})
            if not isinstance(below, dict):
                below = level[parent] = {}
            level = below
        level[leaf] = value
    return nested


class LayerMerger(ABC, Generic[S]):
    """Merges layers, weakest first, into settings of type ``S``.

    A subclass decides which values a layer may set.
    """

    def __init__(self, model: type[S], base: str) -> None:
        self.model: Final = model
        self.base: Final = base
        """Name of the weakest layer, the case."""
        self.values: Final[dict[str, Any]] = {}
        self.problems: Final[list[Problem]] = []
        self.notes: Final[list[Note]] = []
        self.forced: Final[set[str]] = set()
        self._history: Final[dict[str, list[tuple[str, Any]]]] = {}
        self._layers: Final[list[str]] = [base]

    @abstractmethod
    def add(self, layer: Layer) -> None:
        """Merge a layer that is stronger than all before it."""

    def put(self, layer: str, key: str, value: Any) -> None:
        """Set ``key``, and record that ``layer`` did."""
        if layer not in self._layers:
            self._layers.append(layer)
        self.values[key] = value
        self._history.setdefault(key, []).append((layer, value))

    def typed(self, layer: str, key: str, value: Any, shown: str | None = None) -> Any:
        """Return ``value`` as the type of its field; record a problem (for key ``shown``) if it is invalid."""
        adapter = _adapters(self.model).get(key)
        if adapter is None:
            return value
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            found = problems_of(error, self.model, layer)
            self.problems.extend(Problem(layer, shown or key, each.what) for each in found)
            return value

    def current(self, key: str) -> Any:
        """Return the value of ``key`` after the layers so far, defaults included."""
        return self.values.get(key, setting_defaults(self.model).get(key))

    def resolved(self) -> Resolved[S]:
        """Return the merged settings.

        Raises:
            SpecError: with all problems of all layers.
        """
        if self.problems:
            raise SpecError(self.problems)
        try:
            settings = self.model.model_validate(nest(self.values))
        except ValidationError as error:
            found = problems_of(error, self.model, self.base)
            raise SpecError([Problem(self._blamed(each), each.key, each.what, each.hint) for each in found]) from error
        provenance = {key: self._provenance(key, value) for key, value in self._dumped(settings)}
        return Resolved(settings, provenance, tuple(self.notes))

    def _dumped(self, settings: S) -> Iterator[tuple[str, Any]]:
        yield from flatten(settings.model_dump(mode="json")).items()

    def _provenance(self, key: str, value: Any) -> Provenance:
        history = self._history.get(key, [("default", None)])
        return Provenance(value=value, layer=history[-1][0], replaced=tuple(history[:-1]), forced=key in self.forced)

    def _blamed(self, problem: Problem) -> str:
        """Return the strongest of the layers that last set the keys named in a problem."""
        keys = {problem.key} | set(re.findall(r"\w+", problem.what))
        changed = [self._layers.index(self._history[key][-1][0]) for key in keys if key in self._history]
        return self._layers[max(changed)] if changed else self.base


@cache
def setting_defaults(model: type[BaseModel], prefix: str = "") -> Mapping[str, Any]:
    """Return every dotted setting of ``model`` with its default (None if it is required)."""
    defaults: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            defaults.update(setting_defaults(info.annotation, f"{prefix}{name}."))
        elif name not in _OPEN_MAPPINGS:
            required = info.is_required()
            defaults[f"{prefix}{name}"] = None if required else info.get_default(call_default_factory=True)
    return defaults


_OPEN_MAPPINGS: Final = ("model", "engine_options")
"""Fields whose keys the case or the engine defines."""


@cache
def _adapters(model: type[BaseModel], prefix: str = "") -> Mapping[str, TypeAdapter[Any]]:
    adapters: dict[str, TypeAdapter[Any]] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            adapters.update(_adapters(info.annotation, f"{prefix}{name}."))
        elif name not in _OPEN_MAPPINGS:
            adapters[f"{prefix}{name}"] = TypeAdapter(info.rebuild_annotation())
    return adapters


def may_change(key: str, mutable: Sequence[str]) -> bool:
    """Return whether ``mutable`` lists ``key`` or a section that contains it."""
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in (*mutable, *ALWAYS_MUTABLE))


def unknown_mutable(train: TrainCaseSpec, where: str) -> list[Problem]:
    """Return one problem for each entry of ``mutable`` that is neither a setting nor a section of settings."""
    known = {*setting_defaults(TrainSettings), *flatten(train.settings)}
    sections = {key.rpartition(".")[0] for key in known} - {""}
    return [
        Problem(where, "train.mutable", f"names {entry!r}, which is no setting", nearest(entry, known | sections))
        for entry in train.mutable
        if not any(key == entry or key.startswith(f"{entry}.") for key in known)
    ]


@final
class TrainingMerger(LayerMerger[TrainSettings]):
    """Merges training settings: layers may change only what the case lists as mutable, unless the run is open."""

    def __init__(self, base: Layer, *, mutable: Sequence[str], is_open: bool) -> None:
        super().__init__(TrainSettings, base.name)
        self._base_values: Final = base.values
        self._mutable: Final = mutable
        self._open: Final = is_open
        for key, value in base.values.items():
            self.put(base.name, key, self.typed(base.name, key, value))

    def add(self, layer: Layer) -> None:
        """Merge a layer; values that it may not set become problems."""
        defaults = setting_defaults(TrainSettings)
        for key, given in layer.values.items():
            if key not in defaults and key not in self._base_values:
                self.problems.append(
                    Problem(layer.name, key, "unknown setting", nearest(key, {*defaults, *self.values}))
                )
                continue
            before = len(self.problems)
            self._check_case_type(layer.name, key, given)
            value = self.typed(layer.name, key, given)
            if len(self.problems) > before:
                continue
            if not may_change(key, self._mutable) and value != self.current(key):
                if not self._open:
                    listed = ", ".join(self._mutable) or "nothing"
                    hint = f"the case fixes it; may change: {listed}; or declare the run open"
                    self.problems.append(Problem(layer.name, key, "is not mutable", hint))
                    continue
                self.forced.add(key)
            self.put(layer.name, key, value)

    def _check_case_type(self, layer: str, key: str, value: Any) -> None:
        """Check a parameter of the case (``model.*``) against the type of its value in ``case.yaml``."""
        if not key.startswith("model.") or self._base_values[key] is None:
            return
        expected = type(self._base_values[key])
        if type(value) is not expected and not (expected is float and type(value) is int):
            self.problems.append(Problem(layer, key, f"must be {expected.__name__}, found {value!r}"))


def resolve(base: Layer, over: Sequence[Layer], *, mutable: Sequence[str], is_open: bool) -> Resolved[TrainSettings]:
    """Merge ``over`` (weakest first) into a case's own training settings.

    Raises:
        SpecError: with all problems of all layers: unknown keys, wrong types, and (unless ``is_open``) changes to
            settings that are not mutable.
    """
    merger = TrainingMerger(base, mutable=mutable, is_open=is_open)
    for layer in over:
        merger.add(layer)
    return merger.resolved()
