"""Each rule about inference, on the record of a real inference process in which one thing was changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accelmark.results.schema import CaseResult
from accelmark.spec.job import InferJob, JobSpec, NodeExit, RankExit
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.settings.inference import InferSettings
from tests.audit.adversary.attack import add_event, edit_events
from tests.audit.test_rules import judged
from tests.made_run import change_json

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "infer" / "tiny"
ROUND = Path("tiny") / "round1"
LOG = ROUND / "here_noderank0" / "rank0.out.log"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose one round a real process of its own carried out."""
    root = tmp_path_factory.mktemp("inference")
    run = root / "run"
    node = run / ROUND / "here_noderank0"
    node.mkdir(parents=True)
    job_file = run / ROUND / "job.json"
    settings = InferSettings(
        compiler="onnxruntime", inference_duration_s=0, batch_size=4, log_freq=5, warmup_batches=1, threads=1
    )
    infer = InferJob(
        unit="image", metric="top1", tolerance=0.02, reference=None, settings=settings, parameters={"items": 100}
    )
    job = JobSpec(
        key=CaseKey(model="tiny", framework="pytorch", hardware="cpu"), round=1, case_version=1, vendor="none",
        case=FolderRef(name="tiny", path=TINY, sha256="0"), device_type="cpu", framework_module=None,
        collective_backend="gloo", data_dirs={}, checkpoint_dir=root, work=infer,
    )  # fmt: skip
    job_file.write_text(job.model_dump_json())
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "ACCELMARK_NODE_DIR": str(node)}
    command = [sys.executable, "-m", "accelmark.infer", str(job_file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (run / LOG).read_text() + done.stderr
    rank = RankExit(rank=0, local_rank=0, state="succeeded", exit_code=0)
    ended = NodeExit(host="here", noderank=0, state="succeeded", reason=None, started_at="2026-11-21T00:00:00Z",
                     duration_s=1, ranks=(rank,))  # fmt: skip
    (node / "exit.json").write_text(ended.model_dump_json())
    sample: dict[str, Any] = {"host": {"cpu": 0.5, "load1": 0.1}, "devices": [{"index": 0, "utilisation": 0.5}]}
    header = {"schema_version": 1, "vendor": "none", "interval_s": 1.0, "devices": [{"index": 0}], "reasons": {}}
    lines: list[dict[str, Any]] = [{"header": header}]
    lines += [*({"t": float(t), "wall": float(t)} | sample for t in range(2)), {"footer": {}}]
    (node / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "source.json").write_text(json.dumps({"kind": "wheel", "version": "0", "sha256": "00"}))
    (run / "plan.json").write_text(json.dumps({"schema_version": 1, "name": "x", "vendor": "none", "jobs": []}))
    return run


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def change_step(run: Path, step: str, **details: Any) -> None:
    def change(value: dict[str, Any]) -> None:
        if value["step"] == step:
            value["details"] |= details

    edit_events(run / LOG, "STAGE_END", change)


def change_event(run: Path, name: str, phase: str | None = None, **values: Any) -> None:
    """Change values of an event, functions by the event's value."""

    def change(value: dict[str, Any]) -> None:
        if value.get("phase") == phase:
            value |= {key: new(value) if callable(new) else new for key, new in values.items()}

    edit_events(run / LOG, name, change)


def change_infer(run: Path, **values: Any) -> None:
    path = run / ROUND / "job.json"
    told = json.loads(path.read_text())
    settings = values.pop("settings", {})
    told["work"] |= values
    told["work"]["settings"] |= settings
    path.write_text(json.dumps(told))


SCENARIO: dict[str, Any] = {
    "scenario": "offline", "valid": True, "functional": False, "figure": 100.0, "figure_name": "samples_per_second",
    "latencies_ms": {}, "log_dir": "loadgen/offline",
}  # fmt: skip


def rules(case: CaseResult, severity: str) -> set[str]:
    return {finding.rule for finding in case.findings if finding.severity == severity}


def test_a_run_by_the_rules_leaves_hashes_of_its_model_and_engine_and_no_error(run: Path) -> None:
    case = judged(run)
    assert rules(case, "error") == set()
    assert case.verdict == "VALID"
    text = (run / LOG).read_text()
    for name in ("parameter_hash", "module_hash", "weights_hash", "onnx_sha256"):
        assert f'"{name}": "' in text
    assert "engine-source" not in rules(case, "warning")


@pytest.mark.parametrize("details", [{"engine_given_sha256": "ab" * 32}, {"onnx_sha256": "ab" * 32}])
def test_a_given_file_is_recorded_with_its_hash(run: Path, details: dict[str, str]) -> None:
    change_step(run, "export", onnx_sha256=None)
    change_step(run, "compile", **details)
    case = judged(run)
    assert case.verdict == "VALID"
    assert any("abababababab" in warning for warning in case.warnings)


@pytest.mark.parametrize(
    ("declared", "told", "severity"),
    [("bf16", "float16:10", "error"), ("fp16", "float32:10", "warning"), ("int8", "int8:8 float32:2", None),
     ("int8", "float32:10", "warning"), ("bf16", "bfloat16:10", None)],
)  # fmt: skip
def test_the_graph_decides_on_a_declared_precision(run: Path, declared: str, told: str, severity: str | None) -> None:
    change_step(run, "compile", graph_types=told)
    change_infer(run, settings={"precision": declared})
    found = {finding.severity for finding in judged(run).findings if finding.rule == "precision"}
    assert found == ({severity} if severity else set())


@pytest.mark.parametrize(("error", "severities"), [(0.005, set()), (0.017, {"open"})])
def test_types_that_only_an_outside_engine_states_need_answers_that_confirm_them(
    run: Path, error: float, severities: set[str]
) -> None:
    change_step(run, "compile", graph_types="bfloat16:10", engine_code="engines/fast.py")
    change_infer(run, settings={"precision": "bf16"})
    change_event(run, "ANSWER_CHECK", median_error=error)
    assert {finding.severity for finding in judged(run).findings if finding.rule == "precision"} == severities


compiled = partial(change_step, step="compile")
answered = partial(change_event, name="ANSWER_CHECK")
measured = partial(change_event, name="EVALUATE", phase="inference")


@pytest.mark.parametrize(
    ("change", "severity", "rule", "words"),
    [
        (partial(compiled, onnx_sha256="ab" * 32), "error", "engine-source", "was compiled from a file with hash"),
        (partial(compiled, graph_types="float16:10"), "error", "precision", "computes in float16"),
        (partial(compiled, graph_types="float32:9 bfloat16:1"), "error", "precision", "bfloat16"),
        (partial(compiled, graph_types="int8:4 float32:6"), "error", "precision", "int8"),
        (partial(compiled, graph_types=None), "open", "precision", "cannot be read"),
        (partial(answered, median_error=0.002), "error", "inference-accuracy", "median error"),
        (partial(answered, worst_error=1.0), "error", "inference-accuracy", "largest error"),
        (partial(answered, worst_error=None), "error", "inference-accuracy", "largest error"),
        (partial(answered, top1_agreement=0.98), "error", "inference-accuracy", "framework's largest value in 98.00"),
        (partial(answered, sensitivity=0.01), "error", "inference-accuracy", "may be looked up"),
        (partial(answered, num_items=0), "open", "answers", "were not compared"),
        (partial(measured, metrics={"top1": None}), "error", "accuracy-missed", ""),
    ],
)
def test_a_changed_record_of_engine_or_answers_is_found(
    run: Path, change: Callable[[Path], None], severity: str, rule: str, words: str
) -> None:
    change(run)
    case = judged(run)
    assert case.verdict == ("INVALID" if severity == "error" else "OPEN")
    assert rules(case, severity) == {rule}
    assert any(words in reason for reason in case.reasons), case.reasons


def test_time_outside_of_the_calls_is_reported(run: Path) -> None:
    change_event(run, "FORWARD", "inference", crossing_ms=lambda value: 0.5 * sum(value["latency_ms"]))
    assert "time-outside-engine" in rules(judged(run), "warning")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"figure": 2e9}, "implausible-utilisation"),
        ({"accuracy_answers": {"worst_error": 1.0}}, "answers"),
        ({"performance_answers": {"worst_error": 1.0}}, "answers"),
        ({"repeat_check": {"suspicious": True, "speedup": 3.0}}, "answer-cache"),
        ({}, None),
    ],
)
def test_answers_and_speed_of_a_scenario_are_judged(run: Path, change: dict[str, Any], rule: str | None) -> None:
    chip = {"name": "cpu", "device_name": "x", "peaks": {"fp32": 0.5}, "source": "made up for tests"}
    change_infer(run, settings={"scenarios": ["offline"], "flops": 1000.0})
    change_json(run / ROUND / "job.json", chip=chip)
    answers = {"num_items": 100, "median_error": 1e-7, "worst_error": 1e-6, "top1_agreement": 1.0}
    check = {"fresh_ms": 1, "same_ms": 1, "speedup": 1.0, "limit": 1.1, "suspicious": False, "num_batches": 12}
    said = SCENARIO | {"crossing_us": 50.0, "repeat_check": check}
    said |= {"accuracy_answers": answers, "performance_answers": answers}
    for name, value in change.items():
        said[name] = said[name] | value if isinstance(value, dict) else value
    add_event(run / LOG, "SCENARIO", said)
    assert rules(judged(run), "error") == ({rule} if rule else set())


def test_an_engine_whose_accuracy_was_not_compared_is_invalid_or_open_without_a_validation(run: Path) -> None:
    change_event(run, "EVALUATE", "validation", metrics={})
    assert rules(judged(run), "error") == {"accuracy-missed"}
    change_infer(run, settings={"no_validation": True, "exist_onnx_path": "given.onnx"})
    assert (rules(judged(run), "error"), rules(judged(run), "open") >= {"accuracy-missed"}) == (set(), True)
    change_infer(run, reference={"value": 0.9, "within": 1.0, "source": "made up for tests"})
    assert rules(judged(run), "error") == set()


@pytest.mark.parametrize(
    ("scenario", "severity", "rule"),
    [
        ({"valid": False}, "error", "loadgen-invalid"),
        ({"figure": None, "reason": "no rate held"}, "warning", "loadgen-invalid"),
        ({"functional": True}, "warning", "loadgen-too-short"),
        ({}, None, None),
    ],
)
def test_loadgens_result_of_a_scenario_counts(
    run: Path, scenario: dict[str, Any], severity: str | None, rule: str | None
) -> None:
    change_infer(run, settings={"scenarios": ["offline"]})
    add_event(run / LOG, "SCENARIO", SCENARIO | scenario)
    case = judged(run)
    found = {finding.rule: finding.severity for finding in case.findings if finding.rule.startswith("loadgen")}
    assert found == ({rule: severity} if rule is not None else {})


@pytest.mark.parametrize(("share", "verdict"), [(0.005, "VALID"), (0.05, "OPEN")])
def test_an_engine_that_leaves_time_out_has_to_be_looked_at(run: Path, share: float, verdict: str) -> None:
    def left_out(value: dict[str, Any]) -> list[float]:
        return [ms * share / (1 - share) for ms in value["latency_ms"]]

    change_event(run, "FORWARD", "inference", not_inference_ms=left_out)
    case = judged(run)
    assert case.verdict == verdict
    assert ("declared-time" in rules(case, "open")) == (verdict == "OPEN")
    assert any("declares 5.0\u202f% of its calls' time" in reason for reason in case.reasons) == (verdict == "OPEN")


def test_rounds_with_different_models_are_found(run: Path) -> None:
    second = run / "tiny" / "round2"
    shutil.copytree(run / ROUND, second)
    change_json(second / "job.json", round=2)
    assert "model-mismatch" not in rules(judged(run), "error")
    change_step(run, "create", weights_hash="ab" * 32)
    case = judged(run)
    assert "model-mismatch" in rules(case, "error")
    assert any("the model's weights have hash" in reason for reason in case.reasons)


def test_settings_fixed_by_the_case_may_not_differ(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plugins" / "cases" / "tiny"
    folder.mkdir(parents=True)
    (folder / "infer_pytorch.py").write_bytes((TINY / "infer_pytorch.py").read_bytes())
    (folder / "case.yaml").write_text(
        "name: tiny\nversion: 1\ntitle: Tiny\ndescription: Made up for tests.\nlicence: Apache-2.0\nsize: mini\n"
        "infer: {unit: image, metric: top1, tolerance: 0.02, tolerance_why: made up, parameters: {items: 100},\n"
        "        configurations: {batch_size: 4}}\n"
    )
    monkeypatch.setenv("ACCELMARK_PLUGINS", str(tmp_path / "plugins"))
    assert rules(judged(run), "error") == set()
    change_infer(run, settings={"flops": 1e12})
    assert rules(judged(run), "open") >= {"flops"}
    change_infer(run, tolerance=0.5, parameters={"items": 50})
    assert rules(judged(run), "error") == {"target", "settings-changed"}


def test_a_short_pass_and_a_skipped_cache_check_are_reported(run: Path) -> None:
    assert "too-short" in rules(judged(run), "warning")
    change_infer(run, settings={"repeat_check": False})
    assert "answer-cache" in rules(judged(run), "open")


def test_a_vendors_own_engine_is_recorded_and_counted_as_adaptation_cost(run: Path) -> None:
    change_step(run, "compile", engine_code="engines/fast.py", engine_code_lines=40, engine_code_sha256="cd" * 32)
    case = judged(run)
    assert any("engines/fast.py, 40 lines" in str(finding) for finding in case.findings)
    assert case.adaptation is not None
    assert case.adaptation.engines == {"engines/fast.py": 40}
