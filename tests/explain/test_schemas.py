"""Schemas accept every file that AccelMark ships or documents, and show the mistakes that AccelMark refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from accelmark.explain.schemas import FILES, SCHEMA_DIRECTORY
from accelmark.spec.model import read_value, read_yaml
from accelmark.spec.runfile import RunSpec

ROOT = Path(__file__).parents[2]
PACKAGE = SCHEMA_DIRECTORY.parent
PLACES = {"run": "suites/*.yaml", "search": "searches/*.yaml"}
SHIPPED = [
    (kind, path)
    for kind in FILES
    for path in sorted(PACKAGE.glob(PLACES.get(kind, f"**/{kind}.yaml")))
    if "templates" not in path.parts
]
KINDS = "|".join(FILES)
NAMED = re.compile(rf"# ({KINDS})\.yaml\b|`(?:[^`]*/)?({KINDS})\.yaml`:$")
FENCED = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    (?!accelmark )\S.*\n(?:^ {4,}(?!accelmark )\S.*\n)*)", re.MULTILINE)


def examples() -> Iterator[tuple[str, str, str]]:
    """Yield (place, kind, text) of the YAML examples in docs that name their kind, before them or in a comment."""
    for page in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"):
        text = page.read_text()
        blocks = [(text[: match.start()].rstrip(), match[1]) for match in FENCED.finditer(text)]
        blocks += [("", match[0]) for match in INDENTED.finditer(text)]
        for before, block in blocks:
            first = block.lstrip().partition("\n")[0]
            if named := NAMED.match(first if first.startswith("# ") else before.rpartition("\n")[2]):
                yield f"{page.relative_to(ROOT)}: {first}", named[1] or named[2], block


EXAMPLES = list(examples())


def errors(kind: str, given: Any) -> list[str]:
    """Return what the schema of a kind of file finds wrong."""
    schema = json.loads((SCHEMA_DIRECTORY / f"{kind}.json").read_text())
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(given)]


@pytest.mark.parametrize(("kind", "path"), SHIPPED, ids=lambda given: str(given).removeprefix(f"{PACKAGE}/"))
def test_shipped_files_are_valid(kind: str, path: Path) -> None:
    assert errors(kind, read_yaml(path)) == []


@pytest.mark.parametrize(("place", "kind", "text"), EXAMPLES, ids=[place for place, _, _ in EXAMPLES])
def test_examples_in_docs_are_valid(place: str, kind: str, text: str) -> None:
    assert errors(kind, read_value(text, place)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train/settings/optimizer", {"name": "adamw"}),
        ("train/settings/optimizer.lr", 0.5),
        ("train/settings/parallelism", {"fsdp": 2, "tp": 2}),
        ("train/settings/parallelism", "fsdp=2,tp=2"),
        ("train/settings/compile", False),
        ("train/settings/activation_checkpointing", True),
        ("train/settings/model.width", 8),
        ("train/mutable", ["batch", "optimizer", "schedule.warmup_steps", "model.width"]),
        ("infer/configurations/fp16", True),
        ("infer/configurations/flops", "2*512*0.33e9"),
        ("infer/configurations/engine_options.streams", 2),
        ("serve", {"settings": {"load": {"concurrency": [1]}, "slo.ttft_ms": 5}}),
        ("data", [{"name": "x", "title": "X", "licence": "none", "checkpoint": {"of": "a/b"}}]),
    ],
)
def test_all_forms_of_settings_and_data_are_valid(key: str, value: Any) -> None:
    case = section = read_yaml(PACKAGE / "cases" / "resnet_mini" / "case.yaml")
    *parents, last = key.split("/")
    for parent in parents:
        section = section[parent]
    section[last] = value
    assert errors("case", case) == []


@pytest.mark.parametrize(
    ("case", "is_valid"),
    [
        ("resnet_mini", True),
        ({"key": "resnet_mini", "settings": {"optimizer.lr": 1, "end": {"max_steps": 3}}}, True),
        ({"key": "resnet_mini", "settings": {"compiler": "openvino"}}, False),
        ({"key": "resnet_mini", "task": "infer", "settings": {"compiler": "openvino", "fp16": True}}, True),
        ({"key": "resnet_mini", "task": "infer", "settings": {"optimizer.lr": 1}}, False),
        ({"key": "llama_mini", "task": "serve", "settings": {"slo": {"ttft_ms": 9}, "server_options.a": 1}}, True),
        ({"key": "llama_mini", "task": "serve", "settings": {"slo": {"ttft": 9}}}, False),
    ],
)
def test_settings_of_a_run_file_are_those_of_the_task(case: Any, is_valid: bool) -> None:
    RunSpec.model_validate({"cases": [case]})
    assert (errors("run", {"cases": [case]}) == []) is is_valid
