"""Laying a vendor's, a run file's and the command line's changes over the configurations of an inference case."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from pydantic import TypeAdapter, ValidationError

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.inference import RUN_TIME_KEYS, InferCaseSpec, InferSettings, Note
from accelmark.spec.job import Provenance
from accelmark.spec.launcher import option_names
from accelmark.spec.layers import Layer, nest
from accelmark.spec.model import problems_of

_OPTIONS: Final = "engine_options."
_FP16: Final = {True: "fp16", False: "fp32"}
_FIELDS: Final = InferSettings.model_fields


def reserved_keys() -> frozenset[str]:
    """Return the names that no configuration may use: the run-time ones and those of a cluster file."""
    return RUN_TIME_KEYS | frozenset(ClusterSpec.model_fields) | option_names()


@final
@dataclass(frozen=True, slots=True)
class ResolvedInference:
    """Settings after layering, each with its provenance, and what a person should know about them."""

    settings: InferSettings
    provenance: Mapping[str, Provenance]
    notes: tuple[Note, ...]


@final
class _Stack:
    """Values as they stand after some layers, their history, and all that was found on the way."""

    def __init__(self, case: InferCaseSpec, where: str) -> None:
        self.parameters = case.parameters
        self.values: dict[str, Any] = {}
        self.history: dict[str, list[tuple[str, Any]]] = {}
        self.problems: list[Problem] = []
        self.notes: list[Note] = []
        self.layers: list[str] = []
        self.where = where
        for key in sorted(set(case.parameters) & (set(_FIELDS) | reserved_keys())):
            what = "is a name of the configurations or of the framework's own"
            self.problems.append(Problem(where, f"parameters.{key}", what, "rename the parameter"))
        for key, value in self.read(Layer.of(where, case.configurations), "configurations.").items():
            self.put(where, key, value)

    def put(self, layer: str, key: str, value: Any) -> None:
        self.values[key] = value
        if layer not in self.layers:
            self.layers.append(layer)
        self.history.setdefault(key, []).append((layer, value))

    def current(self, key: str) -> Any:
        """Return the value of ``key`` so far, defaults included."""
        if key in self.values or key not in _FIELDS:
            return self.values.get(key)
        return _FIELDS[key].get_default(call_default_factory=True) if not _FIELDS[key].is_required() else None

    def blamed(self, problem: Problem) -> str:
        """Return the layer that a problem comes from: of the settings it is about or names, the last one changed."""
        keys = {problem.key} | set(re.findall(r"\w+", problem.what))
        changed = [self.layers.index(self.history[key][-1][0]) for key in keys if key in self.history]
        return self.layers[max(changed)] if changed else self.where

    def read(self, layer: Layer, prefix: str = "") -> dict[str, Any]:
        """Return a layer's values by their names in the settings, those that are not allowed left out."""
        values = dict(layer.values)
        if "fp16" in values:
            fp16 = values.pop("fp16")
            if not isinstance(fp16, bool):
                self.problems.append(Problem(layer.name, f"{prefix}fp16", f"must be true or false, found {fp16!r}"))
            elif "precision" in values:
                what = "stands beside precision, which says the same"
                self.problems.append(Problem(layer.name, f"{prefix}fp16", what, "keep one of them"))
            else:
                values["precision"] = _FP16[fp16]
        return {key: self._typed(layer.name, f"{prefix}{key}", key, value) for key, value in values.items()}

    def refuse(self, layer: str, keys: Mapping[str, Any]) -> set[str]:
        """Note a problem for each key that no layer may set, and return those keys."""
        refused: set[str] = set()
        for key in keys:
            name = key.removeprefix(_OPTIONS).removeprefix("parameters.")
            if name in self.parameters:
                what, hint = "is a parameter of the case, which nothing may override", "take it out"
            elif name in reserved_keys():
                what, hint = "is a name that the framework sets itself", "rename or remove it"
            else:
                continue
            self.problems.append(Problem(layer, key, what, hint))
            refused.add(key)
        return refused

    def _typed(self, layer: str, shown: str, key: str, value: Any) -> Any:
        """Return ``value`` as its field reads it, so that ``4.0e9`` and ``4000000000`` are the same."""
        field = _FIELDS.get(key)
        if field is None:
            return value
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(field.rebuild_annotation())
            return adapter.validate_python(value)
        except ValidationError as error:
            self.problems += [Problem(layer, shown, each.what) for each in problems_of(error, InferSettings, layer)]
            return value


def resolve_inference(
    case: InferCaseSpec, where: str, *, vendor: Layer | None = None, over: Sequence[Layer] = ()
) -> ResolvedInference:
    """Lay a vendor's overrides and then ``over`` (weakest first) on a case's configurations.

    A vendor's key that is none of the configurations is a warning and goes to the engine as an option; a value it
    changes is noted with old and new; one it repeats is an error. ``over`` (a run file, the command line) may repeat a
    value, but not invent a key outside ``engine_options``.

    Args:
        case: the inference side of ``case.yaml``.
        where: the name of that file, for errors and provenance.
        vendor: the vendor's overrides for this case, if it has any.
        over: further layers, weakest first.

    Raises:
        SpecError: with all problems of all layers.
    """
    stack = _Stack(case, where)
    if vendor is not None:
        _lay_vendor(stack, vendor)
    for layer in over:
        _lay_request(stack, layer)
    stack.problems += _contradictions(over)
    settings = _check(stack)
    if settings is None or stack.problems:
        raise SpecError(stack.problems)
    return ResolvedInference(settings, _provenance(settings, stack), tuple(stack.notes))


def _lay_vendor(stack: _Stack, layer: Layer) -> None:
    values = stack.read(layer)
    for key in stack.refuse(layer.name, values):
        del values[key]
    for key, value in values.items():
        known = key in _FIELDS or key.startswith(_OPTIONS)
        if not known:
            what = f"is none of the configurations ({nearest(key, _FIELDS)}); it goes to the engine as an option"
            stack.notes.append(Note(severity="warning", where=layer.name, key=key, what=what))
            stack.put(layer.name, f"{_OPTIONS}{key}", value)
            continue
        old = stack.current(key)
        if type(old) is type(value) and old == value:
            what = f"overrides nothing: it is {value!r} already"
            stack.problems.append(Problem(layer.name, key, what, "take it out"))
            continue
        stack.notes.append(Note(severity="info", where=layer.name, key=key, what=f"changed from {old!r} to {value!r}"))
        stack.put(layer.name, key, value)


def _lay_request(stack: _Stack, layer: Layer) -> None:
    values = stack.read(layer)
    for key in stack.refuse(layer.name, values):
        del values[key]
    for key, value in values.items():
        if key in _FIELDS or key.startswith(_OPTIONS):
            stack.put(layer.name, key, value)
        else:
            stack.problems.append(Problem(layer.name, key, "unknown setting", nearest(key, _FIELDS)))


def _contradictions(over: Sequence[Layer]) -> Iterator[Problem]:
    """Yield a problem where one place says two precisions, as a command line with an option and a setting can."""
    said: dict[str, dict[str, Any]] = {}
    for layer in over:
        here = said.setdefault(layer.name, {})
        if "fp16" in layer.values and "precision" in layer.values:
            continue  # found as the layer is read
        here |= {key: value for key, value in layer.values.items() if key in ("fp16", "precision")}
    for name, here in said.items():
        if isinstance(here.get("fp16"), bool) and "precision" in here and here["precision"] != _FP16[here["fp16"]]:
            what = f"is {str(here['fp16']).lower()}, beside precision {here['precision']}"
            yield Problem(name, "fp16", what, "keep one of them")


def _check(stack: _Stack) -> InferSettings | None:
    known = {key: value for key, value in stack.values.items() if key in _FIELDS or key.startswith(_OPTIONS)}
    for key in stack.values.keys() - known.keys():
        layer = stack.history[key][-1][0]
        stack.problems.append(Problem(layer, f"configurations.{key}", "unknown key", nearest(key, _FIELDS)))
    if stack.problems:
        return None
    try:
        return InferSettings.model_validate(nest(known))
    except ValidationError as error:
        for problem in problems_of(error, InferSettings, stack.where):
            stack.problems.append(Problem(stack.blamed(problem), problem.key, problem.what))
        return None


def _provenance(settings: InferSettings, stack: _Stack) -> dict[str, Provenance]:
    resolved: dict[str, Any] = {}
    for key, value in settings.model_dump(mode="json").items():
        if key == "engine_options":
            resolved.update({f"{_OPTIONS}{name}": option for name, option in value.items()})
        else:
            resolved[key] = value
    found: dict[str, Provenance] = {}
    for key, value in resolved.items():
        history = stack.history.get(key, [("default", None)])
        found[key] = Provenance(value=value, layer=history[-1][0], replaced=tuple(history[:-1]))
    return found
