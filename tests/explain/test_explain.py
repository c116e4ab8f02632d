"""Explanations: every name that AccelMark writes has one. Schemas accept what AccelMark writes, ships and documents."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel
from typer.testing import CliRunner

from accelmark.automl.records import TrialStatus
from accelmark.automl.search.schedule import StopReason
from accelmark.cli.main import app
from accelmark.datasets.spec import DataEntry
from accelmark.explain.entries import all_terms, entries, explain
from accelmark.explain.schemas import FILES, SCHEMA_DIRECTORY, documented_fields, schemas
from accelmark.results.schema import JobState, Mark, Verdict
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RequestError
from accelmark.spec.log.events import EndReason
from accelmark.spec.log.inference import InferEndReason, ServeEndReason
from accelmark.spec.model import parse, read_value, read_yaml
from accelmark.spec.plugins.launcher import launcher_options
from accelmark.spec.plugins.vendor import Peaks
from accelmark.spec.runfile import RunSpec
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.serving import ServeSettings
from accelmark.spec.settings.training import TrainSettings

ROOT = Path(__file__).parents[2]
WRITTEN: list[type[BaseModel]] = [
    *(model for model, _ in FILES.values()), *launcher_options().values(), TrainSettings, InferSettings, ServeSettings,
    DataEntry,
]  # fmt: skip


@pytest.mark.parametrize("model", WRITTEN)
def test_every_key_that_users_write_is_documented(model: type[BaseModel]) -> None:
    by_class = {f".{field}" for field in Peaks.model_fields}  # documented together
    fields = list(documented_fields(model))
    assert [field.key for field in fields if not field.text and not field.key.endswith(tuple(by_class))] == []


def test_every_verdict_end_reason_state_and_mark_is_explained() -> None:
    known = {(entry.kind, entry.name) for entry in entries()}
    reasons = (*get_args(EndReason), *get_args(InferEndReason), *get_args(ServeEndReason))
    expected = {("end reason", name) for name in reasons}
    expected |= {("state", name) for name in get_args(JobState)} | {("mark", name) for name in get_args(Mark)}
    expected |= {("verdict", name) for name in get_args(Verdict)}
    expected |= {("end of a trial", name) for name in get_args(TrialStatus)}
    expected |= {("end of a search", name) for name in get_args(StopReason)}
    assert {(kind, name) for kind, name in known if kind in dict(expected)} == expected


def found_severities() -> dict[str, set[str]]:
    """Return rule -> severities that the source passes to ``finding`` and ``deviation`` as texts."""
    rules: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(path.read_text())
        assigned = (node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
        texts = {ast.unparse(node.target): node.value for node in assigned if isinstance(node.value, ast.Constant)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("finding", "deviation"):
                first, rule = node.args[0], texts.get(ast.unparse(node.args[1]), node.args[1])
                if isinstance(rule, ast.Constant):
                    severities = {"error", "open"} if ast.unparse(node.func) == "deviation" else set()
                    texts_in = {str(part.value) for part in ast.walk(first) if isinstance(part, ast.Constant)}
                    severities |= texts_in & {"error", "open", "warning", "info"}
                    rules.setdefault(str(rule.value), set()).update(severities)
    return rules


def test_every_rule_of_the_audit_is_declared_with_its_severities() -> None:
    written_through_variables = {"foreign-process", "telemetry-note"}  # results/rounds/hosts.py
    declared, found = all_terms()["audit rule"], found_severities()
    assert declared.keys() == found.keys() | written_through_variables
    assert all(severities <= set(declared[rule].severity) for rule, severities in found.items())
    assert all(term.severity for term in declared.values())
    assert next(iter(all_terms())) == "verdict", "what every result has is listed first"


def test_a_name_is_found_by_its_last_part_and_a_wrong_one_suggests_the_nearest() -> None:
    assert [(entry.name, entry.kind) for entry in explain("lr")] == [("optimizer.lr", "setting of training")]
    assert [(entry.name, entry.kind) for entry in explain("calibration")] == [("train.calibration", "key of case.yaml")]
    for name, launcher in (("reconnect_s", "ssh"), ("slurm_options", "slurm")):
        assert [entry.kind for entry in explain(name)] == [f"key of a cluster file, launcher {launcher}"]
        assert json.loads((SCHEMA_DIRECTORY / "cluster.json").read_text())["properties"][name]["description"]
    assert "key of vendor.yaml" in {entry.kind for entry in explain("visible_devices_env")}
    assert explain("mfu")[0].text.startswith("MFU, a ratio: model FLOP/s per device over")
    for typed, name in (("MFU", "mfu"), ("Time to target", "time_to_target_s"), ("valid", "VALID")):
        assert [entry.name for entry in explain(typed)] == [name], "as pages write it"
    for typed, nearest in (("mfuu", "mfu"), ("VALD", "VALID"), ("optimizer.LRR", "optimizer.lr")):
        with pytest.raises(RequestError, match=f"did you mean '{nearest}'"):
            explain(typed)


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [
        ("label_smoothing", "key of a search file", "spread over all classes"),
        ("checked_imports", "key of framework.yaml", "Modules that preflight imports"),
        ("data[].sources", "key of case.yaml, data set", "tried in this order"),
        ("data[].checkpoint.of", "key of case.yaml, data set", "Owner and name"),
        ("batch_recipe", "name in mutable", "optimizer.lr, schedule.warmup_steps"),
        ("block_size", "setting of serving, server transformers", "--cb-block-size {value}. Type: any. Default: 16"),
        ("engine_options.streams", "setting of inference, engine openvino", "same time. Type: integer of at least 1."),
        ("spinning", "setting of inference, engine onnxruntime", "spin (false). Type: false | true."),
        ("disabled_pass", "setting of inference, engine xtcl", "passes of TVM that are left out. Type: any."),
    ],
)
def test_keys_of_every_file_and_options_of_servers_and_engines_are_explained(name: str, kind: str, part: str) -> None:
    (entry,) = [found for found in explain(name) if found.kind == kind]
    assert part in entry.text


def test_the_shipped_schemas_are_current() -> None:
    shipped = {path.name: path.read_text() for path in SCHEMA_DIRECTORY.iterdir()}
    assert shipped == schemas(), "run: python -m accelmark.explain.schemas"


def test_init_writes_files_that_are_valid_and_name_their_schema(tmp_path: Path) -> None:
    def error(*arguments: str) -> str:
        return str(CliRunner().invoke(app, arguments).exception)

    arguments = ["init", "a", "b", "--vendor", "nvidia", "--chip", "H100", "--devices", "8", "--into", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    run = parse(RunSpec, read_yaml(tmp_path / "run.yaml"), "run.yaml")
    cluster = parse(ClusterSpec, read_yaml(tmp_path / "cluster.yaml"), "cluster.yaml")
    assert [case.key for case in run.cases][2] == "resnet_mini:pytorch:H100:2:8"
    assert [host.address for host in cluster.hosts] == ["a", "b"]
    first = (tmp_path / "cluster.yaml").read_text().splitlines()[0]
    schema = json.loads(Path(first.partition("$schema=file://")[2]).read_text())
    assert schema["properties"]["hosts"]
    assert "use --force" in error(*arguments)
    assert "duplicate hosts: a" in error("init", "a", "a", "--vendor", "nvidia", "--force", "--into", str(tmp_path))
    run_file, cluster_file = str(tmp_path / "run.yaml"), str(tmp_path / "cluster.yaml")
    assert error("run", cluster_file).startswith(f"{cluster_file}: is a cluster file")
    assert error("preflight", run_file).startswith(f"{run_file}: is a run file")


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


FORMS = [
    ("train/settings/optimizer", {"name": "adamw"}), ("train/settings/optimizer.lr", 0.5),
    ("train/settings/parallelism", {"fsdp": 2, "tp": 2}), ("train/settings/parallelism", "fsdp=2,tp=2"),
    ("train/settings/compile", False), ("train/settings/activation_checkpointing", True),
    ("train/settings/model.width", 8),
    ("train/mutable", ["batch", "optimizer", "schedule.warmup_steps", "model.width"]),
    ("infer/configurations/fp16", True), ("infer/configurations/flops", "2*512*0.33e9"),
    ("infer/configurations/engine_options.streams", 2),
    ("serve", {"settings": {"load": {"concurrency": [1]}, "slo.ttft_ms": 5}}),
    ("data", [{"name": "x", "title": "X", "licence": "none", "checkpoint": {"of": "a/b"}}]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), FORMS)
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
