"""Read a YAML file as data, without the pitfalls of YAML 1.1."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from accelmark.spec.errors import Problem, SpecError

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # a PyYAML built without libyaml
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

_MAX_NESTING: Final = 100
_EXPONENT: Final = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")


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


def _construct_exponent(loader: _Loader, node: Any) -> float:
    return float(loader.construct_scalar(node))


_Loader.add_implicit_resolver("!exponent", _EXPONENT, list("-+0123456789"))
_Loader.add_constructor("!exponent", _construct_exponent)


def read_value(text: str, where: str) -> Any:
    """Read one YAML value (``0.1``, ``1e-3``, ``true``, ``[1, 2]``).

    Raises:
        SpecError: it is not YAML; ``where`` is named.
    """
    try:
        return _load(text)
    except yaml.YAMLError as error:
        raise SpecError([Problem(where, "", f"{text!r} is not a YAML value")]) from error


def _load(text: str) -> Any:
    depth = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_NESTING:  # the loader is recursive
            mark: Any = event.start_mark
            raise yaml.MarkedYAMLError(problem=f"nests deeper than {_MAX_NESTING} levels", problem_mark=mark)
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping from ``path``.

    Raises:
        SpecError: the file cannot be read, is not YAML (line and column are named) or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise SpecError([Problem(str(path), "", "is not UTF-8 text")]) from error
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
