"""Read YAML as data and check it: the base class of every specification, and validation errors as sentences."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from typing_extensions import Self

from accelmark.spec.errors import Problem, SpecError, nearest, sentence_of

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # a PyYAML built without libyaml
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

M = TypeVar("M", bound=BaseModel)

_EXPONENT: Final = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


class Spec(BaseModel):
    """Base model: frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def stored(cls, path: Path) -> Self | None:
        """Read a JSON file that AccelMark wrote; None where it is missing or damaged."""
        with contextlib.suppress(OSError, ValidationError):
            return cls.model_validate_json(path.read_bytes())
        return None


class FiniteSpec(Spec, allow_inf_nan=False):
    """What a user writes: its numbers are finite, as it is handed to ranks as JSON."""


def parse(model: type[M], values: Mapping[str, Any], where: str, also: Iterable[Problem] = ()) -> M:
    """Validate ``values`` as ``model``; raise SpecError with every problem, each with its key in ``where``."""
    try:
        parsed = model.model_validate(values)
    except ValidationError as error:
        raise SpecError([*problems_of(error, model, where), *also]) from error
    if problems := list(also):
        raise SpecError(problems)
    return parsed


def json_objects(lines: Iterable[bytes | str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in lines; others are skipped, such as the incomplete line of a killed writer."""
    for line in lines:
        with contextlib.suppress(ValueError):
            if isinstance(loaded := from_json(line), dict):
                yield loaded


def problems_of(error: ValidationError, model: type[BaseModel], where: str) -> list[Problem]:
    """Convert pydantic's errors to sentences; for an unknown key, suggest the nearest known name."""
    items = error.errors()
    # Where every entry of a list is invalid, pydantic also reports the list as too short.
    invalid = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
    return [_problem(item, model, where) for item in items if item["type"] != "too_short" or item["loc"] not in invalid]


def _problem(item: Any, model: type[BaseModel], where: str) -> Problem:
    # For a union, pydantic inserts the tried type into the location: "[cluster]", "lax-or-strict[…]".
    loc, _ = _located(model, [part for part in item["loc"] if "[" not in str(part)])
    key = ".".join(str(part) for part in loc)
    sentence, given = sentence_of(item), item.get("input")
    if item["type"] == "extra_forbidden":
        _, reached = _located(model, loc[:-1])
        return Problem(
            where, key, sentence, nearest(str(loc[-1]), {name for part in reached for name in part.model_fields})
        )
    if item["type"] == "too_short":
        return Problem(where, key, f"needs at least {item['ctx']['min_length']} of them")
    is_named = item["type"] == "missing" or (isinstance(given, str) and repr(given) in sentence)
    if isinstance(given, (str, int, float, bool, type(None))) and not is_named:
        sentence = f"{sentence}, found {given!r}"
    return Problem(where, key, sentence.replace("\\\\", "\\"))  # a regular expression as the file has it


def _located(model: type[BaseModel], loc: Iterable[int | str]) -> tuple[list[int | str], list[type[BaseModel]]]:
    """Return the location without the tags of unions, which no file has, and the models that it leads to."""
    keys: list[int | str] = []
    current = [model]
    for part in loc:
        tagged = [
            candidate
            for candidate in current
            if len(current) > 1 and any(part in get_args(field.annotation) for field in candidate.model_fields.values())
        ]
        if tagged and not any(str(part) in candidate.model_fields for candidate in current):
            current = tagged
            continue
        keys.append(part)
        fields = (candidate.model_fields.get(str(part)) for candidate in current)
        current = [inner for field in fields if field for inner in models_in(field.annotation)] or current
    return keys, current


def models_in(annotation: object) -> list[type[BaseModel]]:
    """Return the models that a type annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


class _Loader(_SafeLoader):
    """The safe loader, except that ``1e-3`` is a number and a duplicate key is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if str(key_node.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key_node.value!r}", key_node.start_mark
                )
            seen.add(str(key_node.value))
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver("!exponent", _EXPONENT, list("-+0123456789"))
_Loader.add_constructor("!exponent", lambda _, node: float(node.value))


def read_value(text: str, where: str) -> Any:
    """Read one YAML value (``0.1``, ``true``, ``[1, 2]``); raise SpecError, naming ``where``, if it is not YAML."""
    try:
        return _load(text)
    except yaml.YAMLError as error:
        raise SpecError([Problem(where, "", f"{text!r} is not a YAML value")]) from error


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("nests too deeply") from error
    finally:
        loader.dispose()


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; raise SpecError if the file cannot be read, is not YAML or is not a mapping."""
    return load_yaml(read_text(path), path)


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text; raise SpecError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise SpecError([Problem(str(path), "", "is not UTF-8 text")]) from error


def load_yaml(text: str, path: Path) -> dict[str, Any]:
    """Return the YAML mapping that a file has as its text; raise SpecError as :func:`read_yaml` does."""
    try:
        loaded = _load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error)
        raise SpecError([Problem(str(path), place, f"is not valid YAML: {what}")]) from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SpecError([Problem(str(path), "", f"must be a mapping, found {type(loaded).__name__}")])
    return {str(key): value for key, value in loaded.items()}
