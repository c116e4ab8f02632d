"""Keys and JSON schemas of the files that users write: ``python -m accelmark.explain.schemas`` writes the schemas."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from accelmark.automl.config import AutomlConfig
from accelmark.datasets.spec import Checkpoint, DatasetSpec
from accelmark.results.schema import json_schema as results_schema
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.model import models_in
from accelmark.spec.plugins.case import MUTABLE_GROUPS, CaseSpec, TrainCaseSpec
from accelmark.spec.plugins.catalog import folders
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.plugins.launcher import launcher_options
from accelmark.spec.plugins.programs import TrainerSpec
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.runfile import CaseRequest, RunSpec
from accelmark.spec.settings.inference import InferCaseSpec, InferSettings
from accelmark.spec.settings.serving import ServeCaseSpec, ServeSettings
from accelmark.spec.settings.training import TrainSettings

FILES: Final[Mapping[str, tuple[type[BaseModel], str]]] = {
    "run": (RunSpec, "Run file"),
    "cluster": (ClusterSpec, "Cluster file"),
    "case": (CaseSpec, "case.yaml"),
    "vendor": (VendorSpec, "vendor.yaml"),
    "framework": (FrameworkSpec, "framework.yaml"),
    "trainer": (TrainerSpec, "trainer.yaml"),
    "search": (AutomlConfig, "Search file"),
}


def schemas() -> dict[str, str]:
    """Return file name -> JSON schema of every kind of file, and of results."""
    made = {"result.json": results_schema()}
    for kind, (model, title) in FILES.items():
        schema = json_schema(model)
        parts = schema.setdefault("$defs", {})
        for changed in (CaseRequest, ClusterSpec, CaseSpec, TrainCaseSpec, InferCaseSpec, ServeCaseSpec):
            part = schema if changed is model else parts.get(changed.__name__)
            if part is not None:
                _complete(changed, part["properties"], part, parts)
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema | {"title": f"AccelMark: {title}"}
        made[f"{kind}.json"] = json.dumps(schema, indent=1) + "\n"
    return made


def _settings(model: type[BaseModel], parts: dict[str, Any]) -> dict[str, str]:
    """Add the schema of a layer's settings to ``parts``, with nested and dotted keys; return a reference to it."""
    part = json_schema(model)
    parts.update(part.pop("$defs", {}))
    part.pop("required", None)
    here, patterns = part["properties"], {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            section = _settings(field.annotation, parts)["$ref"]
            keys = parts[field.annotation.__name__]["properties"]
            here |= {f"{name}.{key}": {"$ref": f"{section}/properties/{key}"} for key in keys}
        elif "additionalProperties" in here[name]:
            patterns[rf"^{name}\."] = here[name]["additionalProperties"]
    if model is InferSettings:
        text = "FlagPerf's name: true is the precision fp16, false fp32."
        here["fp16"] = {"type": "boolean", "description": text}
    parts[model.__name__] = part | {"patternProperties": patterns}
    return {"$ref": f"#/$defs/{model.__name__}"}


_SIDES: Final[Mapping[type[BaseModel], tuple[str, type[BaseModel]]]] = {
    TrainCaseSpec: ("settings", TrainSettings),
    InferCaseSpec: ("configurations", InferSettings),
    ServeCaseSpec: ("settings", ServeSettings),
}
"""Side of a case -> the field with its settings, and their model."""


def _complete(model: type[BaseModel], properties: dict[str, Any], part: dict[str, Any], parts: dict[str, Any]) -> None:
    """Add to the schema that pydantic writes for a model what the model accepts as any mapping."""
    if model is CaseRequest:
        properties["settings"].pop("additionalProperties")
        part["allOf"] = [
            {
                "if": {"properties": {"task": {"const": task}}, "required": [] if task == "train" else ["task"]},
                "then": {"properties": {"settings": _settings(settings, parts)}},
            }
            for task, settings in (("train", TrainSettings), ("infer", InferSettings), ("serve", ServeSettings))
        ]
    elif model is ClusterSpec:
        # Settings of launchers; with one of the launchers that are known here, other keys are errors.
        for options in launcher_options().values():
            properties |= json_schema(options)["properties"]
        known = {"enum": list(folders("launchers"))}
        properties["launcher"]["anyOf"] = [known, {"type": properties["launcher"].pop("type")}]
        part["if"] = {"properties": {"launcher": known}}
        part["then"] = {"properties": dict.fromkeys(properties, True), "additionalProperties": False}
    elif model is CaseSpec:
        dataset = json_schema(DatasetSpec)
        parts.update(dataset.pop("$defs"))
        dataset["properties"]["checkpoint"] = json_schema(Checkpoint)
        parts[DatasetSpec.__name__] = dataset
        properties["data"]["items"] = {"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/{DatasetSpec.__name__}"}]}
    else:
        name, settings = _SIDES[model]
        del properties[name]["additionalProperties"], properties[name]["type"]
        properties[name] |= _settings(settings, parts)
    if model is TrainCaseSpec:
        names = parts[TrainSettings.__name__]["properties"].keys() - {"model"}
        of_the_case = {"type": "string", "pattern": r"^model(\.|$)"}
        properties["mutable"]["items"] = {"anyOf": [{"enum": sorted({*MUTABLE_GROUPS, *names})}, of_the_case]}


def schema_line(kind: str) -> str:
    """Return the comment that tells an editor's YAML language server which schema a file has."""
    return f"# yaml-language-server: $schema={(SCHEMA_DIRECTORY / f'{kind}.json').as_uri()}"


SCHEMA_DIRECTORY: Final = Path(__file__).parents[1] / "schemas"
_ROLE: Final = re.compile(r":\w+:`(?:\w+\.)*(\w+)`")
"""A reference in a documentation string: users know its last name."""


class DocumentedField(NamedTuple):
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
        if issubclass(base, BaseModel) and base is not BaseModel:
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


def documented_fields(model: type[BaseModel], prefix: str = "") -> Iterator[DocumentedField]:
    """Yield the fields of a model and of the models in them, with dotted keys; ``[]`` marks entries of lists."""
    texts, properties = field_texts(model), model.model_json_schema()["properties"]
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
            yield from dict.fromkeys(documented for part in parts for documented in documented_fields(part, inside))
        else:
            yield DocumentedField(key, _type_name(properties[name]), default, texts.get(name, ""))


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model, with the fields' documentation strings as descriptions."""
    schema = model.model_json_schema()
    parts = schema.get("$defs", {}) | {model.__name__: schema}
    waiting, seen = [model], {model}
    while waiting:
        part = waiting.pop()
        properties = parts.get(part.__name__, {}).get("properties", {})
        for key, text in field_texts(part).items():
            if key in properties:
                properties[key]["description"] = text
        new = {inner for field in part.model_fields.values() for inner in models_in(field.annotation)} - seen
        seen |= new
        waiting += new
    return schema


def as_yaml(value: Any) -> str:
    """Return a default as users write it in YAML."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _type_name(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_type_name(part) for part in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type") or ("const" in schema and repr(schema["const"])) or "any"
    return f"list of {_type_name(schema['items'])}" if kind == "array" and "items" in schema else str(kind)


if __name__ == "__main__":
    for name, text in schemas().items():
        (SCHEMA_DIRECTORY / name).write_text(text, encoding="utf-8")
