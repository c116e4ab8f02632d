"""The base class of every specification, and the conversion of validation errors to sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from accelmark.spec.errors import Problem, SpecError, nearest

M = TypeVar("M", bound=BaseModel)

_PLAINLY: Final = dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a mapping of keys") | {
    "tuple_type": "must be a list"
}
"""pydantic's error types -> messages in the terms of YAML."""


class Spec(BaseModel):
    """Base model: frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def parse(model: type[M], values: Mapping[str, Any], where: str) -> M:
    """Validate ``values`` as ``model``.

    Raises:
        SpecError: with every problem at once, each naming ``where`` and its dotted key.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise SpecError(problems_of(error, model, where)) from error


def problems_of(error: ValidationError, model: type[BaseModel], where: str) -> list[Problem]:
    """Convert pydantic's errors to sentences; for an unknown key, suggest the nearest known name."""
    items = error.errors()
    return [_problem(item, model, where) for item in items if not _follows(item, items)]


def _follows(item: Any, items: Iterable[Any]) -> bool:
    """Return whether a list is too short only because an entry in it is invalid."""
    loc = item["loc"]
    inside = (other["loc"] for other in items)
    return item["type"] == "too_short" and any(place[: len(loc)] == loc and len(place) > len(loc) for place in inside)


def _problem(item: Any, model: type[BaseModel], where: str) -> Problem:
    # For a union, pydantic inserts the tried type into the location: "[cluster]", "lax-or-strict[…]".
    loc: tuple[int | str, ...] = tuple(part for part in item["loc"] if "[" not in str(part))
    key = ".".join(str(part) for part in loc)
    if item["type"] == "extra_forbidden":
        return Problem(where, key, "unknown key", nearest(str(loc[-1]), _names_at(model, loc[:-1])))
    if item["type"] == "missing":
        return Problem(where, key, "is missing")
    if item["type"] == "too_short":
        return Problem(where, key, f"needs at least {item['ctx']['min_length']} of them")
    sentence = _PLAINLY.get(item["type"]) or item["msg"].removeprefix("Value error, ")
    sentence = sentence[:1].lower() + sentence[1:]
    found = item.get("input")
    if isinstance(found, str | int | float | bool | None):
        sentence = f"{sentence}, found {found!r}"
    return Problem(where, key, sentence)


def _names_at(model: type[BaseModel], loc: Iterable[int | str]) -> set[str]:
    current = [model]
    for part in loc:
        inner: list[type[BaseModel]] = []
        for candidate in current:
            field = candidate.model_fields.get(str(part))
            inner.extend(_models_in(field.annotation) if field is not None else [])
        current = inner or current
    return {info.alias or name for candidate in current for name, info in candidate.model_fields.items()}


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
