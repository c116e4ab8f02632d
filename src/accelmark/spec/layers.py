"""Configuration layers: the strongest layer wins, and every value records which layer it came from."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.model import Spec, problems_of
from accelmark.spec.parallelism import has_part
from accelmark.spec.settings.inference import RUN_TIME_KEYS, InferCaseSpec, InferSettings, Note

S = TypeVar("S", bound=BaseModel)

ALWAYS_MUTABLE: Final = ("checkpoint", "loader", "log_every_steps", "threads")
"""Settings that no case has to list: they do not change what is learnt, or mark the result where they do."""
REFINES: Final = {"zero": "deepspeed", "pipeline": "pp"}
"""Section -> the name or axis of ``parallelism`` that uses it; it may change where ``parallelism`` may."""
_OPEN_MAPPINGS: Final = ("model", "engine_options", "server_options")
"""Fields whose keys the case or the engine defines."""
_OPTIONS: Final = "engine_options."


class Provenance(Spec):
    """The layer that set a setting, and the values that it replaced, weakest first."""

    value: Any
    layer: str
    replaced: tuple[tuple[str, Any], ...] = ()
    """(layer, value) of the weaker layers."""
    forced: bool = False
    """True where an open run changed an immutable setting."""


class Layer(NamedTuple):
    """Settings from one file or from the command line, as ``{dotted key: value}``."""

    name: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, nested: Mapping[str, Any]) -> Layer:
        """Make a layer from nested mappings, as in YAML."""
        return cls(name, flatten(nested))


@dataclass(frozen=True)
class Resolved(Generic[S]):
    """Merged settings, the provenance of each (by dotted key), and notes for the user."""

    settings: S
    provenance: Mapping[str, Provenance]
    notes: tuple[Note, ...] = ()


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings, but for the value of ``parallelism``, into ``{dotted key: value}``."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and f"{prefix}{key}" != "parallelism":
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{dotted key: value}`` into nested dictionaries."""
    nested: dict[str, Any] = {}
    for dotted, value in flat.items():
        *parents, leaf = dotted.split(".")
        level = nested
        for parent in parents:
            if not isinstance(level.get(parent), dict):
                level[parent] = {}
            level = level[parent]
        level[leaf] = value
    return nested


@cache
def _fields(model: type[BaseModel], prefix: str = "") -> Mapping[str, FieldInfo]:
    """Return every dotted setting of ``model``."""
    fields: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            fields |= _fields(info.annotation, f"{prefix}{name}.")
        elif name not in _OPEN_MAPPINGS:
            fields[f"{prefix}{name}"] = info
    return fields


@cache
def setting_defaults(model: type[BaseModel]) -> Mapping[str, Any]:
    """Return every dotted setting of ``model`` with its default (None if it is required)."""
    return {
        key: None if info.is_required() else info.get_default(call_default_factory=True)
        for key, info in _fields(model).items()
    }


@cache
def _adapter(model: type[BaseModel], key: str) -> TypeAdapter[Any]:
    return TypeAdapter(_fields(model)[key].rebuild_annotation())


def may_change(key: str, mutable: Sequence[str]) -> bool:
    """Return whether ``mutable`` lists ``key``, a section that contains it, or ``parallelism``, which it refines."""
    key = "parallelism" if key.partition(".")[0] in REFINES else key
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in (*mutable, *ALWAYS_MUTABLE))


class _Merger(Generic[S]):
    """Merges values of layers, weakest first (``base``), into settings of type ``S``, and collects problems."""

    def __init__(self, model: type[S], base: str) -> None:
        self.model = model
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self.notes: list[Note] = []
        self.forced: set[str] = set()
        self._history: dict[str, list[tuple[str, Any]]] = {}
        self._layers = [base]

    def put(self, layer: str, key: str, value: Any) -> None:
        """Set ``key``, and record that ``layer`` did."""
        if layer not in self._layers:
            self._layers.append(layer)
        self.values[key] = value
        self._history.setdefault(key, []).append((layer, value))

    def typed(self, layer: str, key: str, value: Any, shown: str | None = None) -> Any:
        """Return ``value`` as the type of its field; record a problem (for key ``shown``) if it is invalid."""
        if key not in _fields(self.model):
            return value
        try:
            return _adapter(self.model, key).validate_python(value)
        except ValidationError as error:
            problems = problems_of(error, self.model, layer)
            self.problems.extend(Problem(layer, shown or key, problem.what) for problem in problems)
            return value

    def current(self, key: str) -> Any:
        """Return the value of ``key`` after the layers so far, defaults included."""
        return self.values.get(key, setting_defaults(self.model).get(key))

    def resolved(self) -> Resolved[S]:
        """Return the merged settings; raise SpecError with all problems of all layers."""
        if self.problems:
            raise SpecError(self.problems)
        try:
            settings = self.model.model_validate(nest(self.values))
        except ValidationError as error:
            problems = problems_of(error, self.model, self._layers[0])
            raise SpecError([replace(problem, where=self._blamed(problem)) for problem in problems]) from error
        dumped, provenance = flatten(settings.model_dump(mode="json")), {}
        for key, value in dumped.items():
            needed = REFINES.get(key.partition(".")[0])
            if key in self._history or needed is None or has_part(dumped["parallelism"], needed):
                *replaced, (layer, _) = self._history.get(key, [("default", None)])
                is_forced = key in self.forced
                provenance[key] = Provenance(value=value, layer=layer, replaced=tuple(replaced), forced=is_forced)
        return Resolved(settings, provenance, tuple(self.notes))

    def _blamed(self, problem: Problem) -> str:
        """Return the strongest of the layers that last set the keys named in a problem, in its section or in full."""
        named = re.findall(r"\w+(?:\.\w+)*", problem.what)
        keys = {problem.key, *named, *(f"{problem.key}.{name}" for name in named)}
        changed = [self._layers.index(self._history[key][-1][0]) for key in keys if key in self._history]
        return self._layers[max(changed, default=0)]


def resolve(
    model: type[S],
    base: Layer,
    over: Sequence[Layer],
    *,
    mutable: Sequence[str],
    is_open: bool,
    defaults: Layer | None = None,
    fixed_by: str = "",
) -> Resolved[S]:
    """Merge ``over`` (weakest first) into a case's own settings of type ``model``.

    ``defaults`` is weaker than the case and declares further settings (the options of a server). ``fixed_by``: what
    states ``mutable``; empty: the case. Raises SpecError with all problems of all layers.
    """
    merger = _Merger(model, base.name)
    declared = {*setting_defaults(model), *(defaults.values if defaults is not None else ())}
    weakest = [base] if defaults is None else [defaults, base]
    for layer in weakest:
        for key, value in layer.values.items():
            if key not in declared and key.partition(".")[0] not in _OPEN_MAPPINGS:
                merger.problems.append(Problem(layer.name, key, "unknown setting", nearest(key, declared)))
            merger.put(layer.name, key, merger.typed(layer.name, key, value))
    known = declared | base.values.keys()
    for layer in over:
        for key, given in layer.values.items():
            if key not in known:
                merger.problems.append(Problem(layer.name, key, "unknown setting", nearest(key, known)))
                continue
            own = base.values.get(key) if key.startswith("model.") else None
            if own is not None and type(given) is not type(own) and (type(own), type(given)) != (float, int):
                what = f"must be {type(own).__name__}, found {given!r}"
                merger.problems.append(Problem(layer.name, key, what))
                continue
            num_problems = len(merger.problems)
            value = merger.typed(layer.name, key, given)
            if len(merger.problems) > num_problems:
                continue
            if not may_change(key, mutable) and value != merger.current(key):
                if not is_open:
                    allowed = ", ".join(mutable) or "nothing"
                    hint = f"{fixed_by or base.name} fixes it; may change: {allowed}; or declare the run open (--open)"
                    fixed = merger.current(key)
                    what = f"is not mutable: it is {'not set' if fixed is None else repr(fixed)}, not {value!r}"
                    merger.problems.append(Problem(layer.name, key, what, hint))
                    continue
                merger.forced.add(key)
            merger.put(layer.name, key, value)
    return merger.resolved()


def resolve_inference(
    case: InferCaseSpec,
    where: str,
    *,
    vendor: Sequence[Layer] = (),
    over: Sequence[Layer] = (),
    reserved: Collection[str] = (),
) -> Resolved[InferSettings]:
    """Merge a vendor's layers and then ``over`` (both weakest first) into a case's configurations.

    Unknown keys of the vendor become options of the engine. No layer may set the ``reserved`` names, those of cluster
    files and ``RUN_TIME_KEYS``. Raises SpecError with all problems of all layers; ``where`` names ``case.yaml``.
    """
    merger = _Merger(InferSettings, where)
    known, names = InferSettings.model_fields, {*RUN_TIME_KEYS, *ClusterSpec.model_fields, *reserved}
    for key in sorted(case.parameters.keys() & (known.keys() | names)):
        what = "is a name of the configurations or of the framework's own"
        merger.problems.append(Problem(where, f"parameters.{key}", what, "rename the parameter"))
    base = Layer.of(where, case.configurations)
    for layer in (base, *vendor, *over):
        prefix, is_vendor, values = "configurations." if layer is base else "", layer in vendor, dict(layer.values)
        if "fp16" in values:
            fp16 = values.pop("fp16")
            if not isinstance(fp16, bool) or "precision" in values:
                what = f"must be true or false, and without precision, found {fp16!r}"
                merger.problems.append(Problem(layer.name, f"{prefix}fp16", what))
            else:
                values["precision"] = "fp16" if fp16 else "fp32"
        for key, given in values.items():
            name = key.removeprefix(_OPTIONS).removeprefix("parameters.")
            if layer is not base and name in case.parameters:
                what = "is a parameter of the case and cannot be overridden"
                merger.problems.append(Problem(layer.name, key, what, "remove the setting"))
                continue
            if layer is not base and name in names:
                what = "is a name that the framework sets itself"
                merger.problems.append(Problem(layer.name, key, what, "rename or remove it"))
                continue
            value, old = merger.typed(layer.name, key, given, f"{prefix}{key}"), merger.current(key)
            if key not in known and not key.startswith(_OPTIONS):
                hint = nearest(key, known)
                if not is_vendor:
                    hint = f"options of engines start with {_OPTIONS!r}; {hint}"
                    merger.problems.append(Problem(layer.name, f"{prefix}{key}", "unknown setting", hint))
                    continue
                what = f"is none of the configurations ({hint}); it goes to the engine as an option"
                merger.notes.append(Note(severity="warning", where=layer.name, key=key, what=what))
                key = f"{_OPTIONS}{key}"
            elif is_vendor and type(old) is type(value) and old == value:
                what = f"has no effect: it is already {value!r}"
                merger.problems.append(Problem(layer.name, key, what, "remove the setting"))
                continue
            elif is_vendor:
                what = f"changed from {old!r} to {value!r}"
                merger.notes.append(Note(severity="info", where=layer.name, key=key, what=what))
            merger.put(layer.name, key, value)
    return merger.resolved()
