"""Read the documentation strings of a specification's fields, and write its JSON schema with them."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final, get_args

from pydantic import BaseModel

SCHEMA_DIRECTORY: Final = Path(__file__).parents[1] / "schemas"
_ROLE: Final = re.compile(r":\w+:`(?:\w+\.)*(\w+)`")
"""A reference in a documentation string: its last name is what users know."""


@final
@dataclass(frozen=True, slots=True)
class DocumentedField:
    """A key of a file, as users write it."""

    key: str
    """Dotted: ``optimizer.lr``."""
    type: str
    default: str
    """As in YAML; empty where the key is required."""
    text: str


@cache
def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Return field -> the string that follows it in the source, base classes included."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        for pair in pairwise(_classes(inspect.getfile(base))[base.__name__].body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = _ROLE.sub(r"`\1`", " ".join(text.split()))
    return texts


@cache
def _classes(file: str) -> dict[str, ast.ClassDef]:
    """Return name -> class of a source file, which is parsed once for all its models."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a type annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def documented_fields(model: type[BaseModel], prefix: str = "") -> Iterator[DocumentedField]:
    """Yield the fields of a model and of the models in them, with dotted keys; ``[]`` marks entries of lists."""
    texts, properties = field_texts(model), _properties(model)
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        parts = models_in(field.annotation)
        default = "" if field.is_required() else as_yaml(field.get_default(call_default_factory=True))
        if parts:
            text = texts.get(name) or (inspect.getdoc(parts[0]) or "").partition("\n")[0]
            is_list = "tuple" in str(field.annotation)
            kind = "list of mappings" if is_list else "mapping"
            yield DocumentedField(key, kind, "" if field.is_required() else "-", text)
            inside = f"{key}[]." if is_list else f"{key}."
            # Of several models that a value may have, some share fields.
            yield from dict.fromkeys(found for part in parts for found in documented_fields(part, inside))
        else:
            yield DocumentedField(key, _type_name(properties[name]), default, texts.get(name, ""))


@cache
def _properties(model: type[BaseModel]) -> dict[str, Any]:
    return dict(model.model_json_schema()["properties"])


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model, with the fields' documentation strings as descriptions."""
    schema = model.model_json_schema()
    found = {model.__name__: model}
    waiting = [model]
    while waiting:
        for field in waiting.pop().model_fields.values():
            new = [part for part in models_in(field.annotation) if part.__name__ not in found]
            found |= {part.__name__: part for part in new}
            waiting += new
    for name, part in [(model.__name__, schema), *schema.get("$defs", {}).items()]:
        if name not in found:
            continue
        for key, text in field_texts(found[name]).items():
            if key in part.get("properties", {}):
                part["properties"][key]["description"] = text
    return schema


def as_yaml(value: Any) -> str:
    """Return a default as users write it in YAML."""
    if value is None:
        return "null"
    return json.dumps(value, default=str) if not isinstance(value, str) else value


def _type_name(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type_name(part) for part in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type") or ("const" in schema and repr(schema["const"])) or "any"
    return f"list of {_type_name(schema['items'])}" if kind == "array" and "items" in schema else str(kind)
