"""Layered configuration: the strongest layer wins, and every value remembers where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pydantic import BaseModel, ValidationError

from accelmark.spec.case import TrainCaseSpec
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.job import Provenance
from accelmark.spec.model import problems_of
from accelmark.spec.settings import TrainSettings

ALWAYS_MUTABLE: Final = ("loader.synthetic",)
"""Settings any layer may change because they mark the run instead of bending it."""


@final
@dataclass(frozen=True, slots=True)
class Layer:
    """Settings that one file (or the command line) gives, as ``{dotted key: value}``."""

    name: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, nested: Mapping[str, Any]) -> Layer:
        """Make a layer from nested mappings, as YAML gives them."""
        return cls(name, flatten(nested))


@final
@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings after layering, each with its provenance (dotted key -> layer)."""

    settings: TrainSettings
    provenance: Mapping[str, Provenance]


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


def may_change(key: str, mutable: Sequence[str]) -> bool:
    """Tell whether ``mutable`` allows ``key``: it names the key itself or a section above it."""
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in (*mutable, *ALWAYS_MUTABLE))


def unknown_mutable(train: TrainCaseSpec, where: str) -> list[Problem]:
    """Return one problem for each entry of ``mutable`` that is neither a setting nor a section of some."""
    known = {*driver_defaults(), *flatten(train.settings)}
    sections = {key.rpartition(".")[0] for key in known} - {""}
    return [
        Problem(where, "train.mutable", f"names {entry!r}, which is no setting", nearest(entry, known | sections))
        for entry in train.mutable
        if not any(key == entry or key.startswith(f"{entry}.") for key in known)
    ]


def resolve(base: Layer, over: Sequence[Layer], *, mutable: Sequence[str], is_open: bool) -> Resolved:
    """Lay ``over`` (weakest first) on a case's own settings.

    Raises:
        SpecError: with all problems of all layers: unknown keys, wrong types, and changes to what the case does not
            list as mutable (unless ``is_open``), each naming its layer.
    """
    problems: list[Problem] = []
    values = dict(base.values)
    history: dict[str, list[tuple[str, Any]]] = {key: [(base.name, value)] for key, value in values.items()}
    forced: set[str] = set()
    defaults = driver_defaults()
    known = set(defaults) | set(values)
    for layer in over:
        for key, value in layer.values.items():
            if key not in known:
                problems.append(Problem(layer.name, key, "unknown setting", nearest(key, known)))
                continue
            problem = _type_problem(layer.name, key, value, base.values)
            if problem is not None:
                problems.append(problem)
                continue
            if not may_change(key, mutable) and value != values.get(key, defaults.get(key)):
                if not is_open:
                    hint = f"the case fixes it; may change: {', '.join(mutable) or 'nothing'}; or declare the run open"
                    problems.append(Problem(layer.name, key, "is not mutable", hint))
                    continue
                forced.add(key)
            values[key] = value
            history.setdefault(key, []).append((layer.name, value))
    settings = _check(values, history, problems)
    if settings is None:
        raise SpecError(problems)
    return Resolved(settings, _provenance(settings, history, forced))


def _check(
    values: Mapping[str, Any], history: Mapping[str, list[tuple[str, Any]]], problems: list[Problem]
) -> TrainSettings | None:
    settings: TrainSettings | None = None
    try:
        settings = TrainSettings.model_validate(nest(values))
    except ValidationError as error:
        for problem in problems_of(error, TrainSettings, "settings"):
            layers = history.get(problem.key)
            layer = layers[-1][0] if layers else next(iter(history.values()))[0][0]
            problems.append(Problem(layer, problem.key, problem.what, problem.hint))
    return None if problems else settings


def _type_problem(layer: str, key: str, value: Any, base: Mapping[str, Any]) -> Problem | None:
    """Check a case's own numbers, typed by ``case.yaml``; the driver's are typed by pydantic."""
    if not key.startswith("model.") or base[key] is None:
        return None
    expected = type(base[key])
    if expected is float and type(value) is int:
        return None
    if type(value) is expected:
        return None
    return Problem(layer, key, f"must be {expected.__name__}, found {value!r}")


def _provenance(
    settings: TrainSettings, history: Mapping[str, list[tuple[str, Any]]], forced: set[str]
) -> dict[str, Provenance]:
    resolved = flatten(settings.model_dump(mode="json"))
    default = ("default", None)
    return {
        key: Provenance(
            value=value,
            layer=history.get(key, [default])[-1][0],
            replaced=tuple(history.get(key, [default])[:-1]),
            forced=key in forced,
        )
        for key, value in resolved.items()
    }


def driver_defaults(model: type[BaseModel] = TrainSettings, prefix: str = "") -> dict[str, Any]:
    """Return every dotted setting of the driver with its default (None where it has to be given)."""
    defaults: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            defaults.update(driver_defaults(info.annotation, f"{prefix}{name}."))
        elif name != "model":
            defaults[f"{prefix}{name}"] = None if info.is_required() else info.default
    return defaults
