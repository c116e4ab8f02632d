"""Plans of inference and of serving, and the search for the best settings: what it tries, and in which order."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelmark.plan import tuning
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.plan.request import Detected
from accelmark.plan.tuning import Budget, settings_of, tuned_plan, with_trial, with_tuned_rounds
from accelmark.spec.errors import SpecError
from accelmark.spec.job import ServeJob
from accelmark.spec.plugins.catalog import EngineSpec, engine_specs
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.tuning import Choice, identity, next_trial
from tests.plan.plans import plan_of, with_inference

_MORE = """\
  data: [pictures]
  optional_data: [more]
  weights: toy/model.safetensors
  parameters: {side: 8}
data:
  - {name: pictures, title: P, licence: none, tree: [{path: val}]}
  - {name: more, title: M, licence: none, tree: [{path: val}]}
"""


@pytest.fixture
def toy(plugins: Path) -> Path:
    """The toy case with an inference side."""
    return with_inference(plugins, _MORE)


def _settings(planned: PlannedJob) -> InferSettings:
    return InferSettings.model_validate(planned.job.work.model_dump()["settings"])


def _on_cpu(case: str, *capabilities: str, **settings: str) -> PlannedJob:
    found = Detected("cpu", "CPU", None, None, capabilities=dict.fromkeys(capabilities, "/proc/cpuinfo"))
    request = {"task": "infer", "key": case, "settings": settings}
    return plan_of({"vendor": "cpu", "cases": [request]}, found).jobs[0]


@pytest.mark.parametrize(
    ("case", "lower"), [("resnet_mini", "bf16"), ("minilm", "bf16"), ("efficientnet_lite0", "fp32")]
)
def test_the_default_engine_and_precision_of_a_mini_case_follow_from_the_cpu(case: str, lower: str) -> None:
    def chosen(*capabilities: str) -> tuple[str | None, str]:
        settings = _settings(_on_cpu(case, *capabilities))
        return settings.compiler, settings.precision

    assert chosen() == ("onnxruntime", "fp32")
    assert chosen("avx2") == ("openvino", "fp32")
    assert chosen("avx2", "avx512_bf16") == ("openvino", lower)
    assert chosen("avx2", "avx512_bf16", "amx_bf16", "amx_int8") == ("openvino", lower)


@pytest.mark.parametrize(
    ("device_type", "options", "package"),
    [("cuda", {}, "onnxruntime-gpu"), ("cpu", {}, "onnxruntime"), ("cuda", {"providers": "CPU"}, "onnxruntime")],
)
def test_an_engine_needs_the_build_for_the_device(device_type: str, options: dict[str, object], package: str) -> None:
    needs = engine_specs()["onnxruntime"].requires_on(device_type, options)
    assert [one.partition(">=")[0] for one in needs if one.startswith("onnxruntime")] == [package]


def test_a_run_that_chooses_another_engine_gets_no_precision_in_which_that_one_does_not_compute() -> None:
    capabilities = ("avx2", "avx512_bf16")
    job = _on_cpu("resnet_mini", *capabilities, compiler="onnxruntime")
    assert _settings(job).precision == "fp32"
    assert "onnxruntime does not compute in bf16" in [file.reason for file in job.layer_files if not file.applied]
    assert _settings(_on_cpu("resnet_mini", *capabilities, compiler="inductor")).precision == "bf16"
    with pytest.raises(SpecError, match=r"run.yaml: precision: onnxruntime does not compute in bf16 .*fp32 or fp16"):
        _on_cpu("resnet_mini", *capabilities, compiler="onnxruntime", precision="bf16")


def _plan(request: dict[str, Any], command_line: dict[str, Any] | None = None, where: str = "run.yaml") -> Plan:
    run = {"vendor": "acme", "cases": [{"task": "infer", "key": "toy", **request}]}
    return plan_of(run, Detected("acme", "X1", None, 1), command_line=command_line, where=where)


def test_an_inference_job_runs_one_process_of_the_infer_package_with_data_or_synthetic(toy: Path) -> None:
    (planned,) = _plan({}).jobs
    assert planned.nodes[0].command[-2:] == ("accelmark.infer", "job.json")
    assert _settings(planned).flops == 6
    assert planned.job.work.model_dump()["parameters"] == {"side": 8}
    assert planned.job.data_dirs == {"pictures": Path("/data/pictures")}
    (synthetic,) = _plan({}, command_line={"loader.synthetic": True}).jobs
    assert (_settings(synthetic).synthetic, synthetic.job.data_dirs) == (True, {})


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"compiler": "onnxruntime", "engine_options": {"graph_level": "foo"}}, "engine_options.graph_level"),
        ({"compiler": "onnxruntime", "engine_options": {"streams": 0}}, "engine_options.streams"),
        ({"compiler": "inductor", "exist_compiler_path": "a.pt2"}, "exist_compiler_path"),
        ({"compiler": "tensorrt"}, "compiler"),
        ({"compiler": "openvino", "exist_compiler_path": "/a.blob"}, "exist_compiler_path"),
        ({"compiler": "eager", "exist_onnx_path": "word", "no_validation": True}, "no_validation"),
        ({"compiler": "openvino", "exist_onnx_path": "a.onnx", "no_validation": True}, "exist_onnx_path"),
        ({"compiler": "openvino", "generate_batches": [1]}, "compiler"),
    ],
)
def test_what_the_engine_does_not_support_is_refused(toy: Path, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(SpecError) as caught:
        _plan({"settings": settings})
    assert [(problem.where, problem.key) for problem in caught.value.problems] == [("run.yaml", key)]


def test_relative_files_of_a_run_file_and_of_the_command_line_are_found_from_the_ranks_directory(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here/a.blob", "there/b.blob", "there/b.onnx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "here")

    def files(given: str, settings: dict[str, Any], command_line: dict[str, Any]) -> list[str | None]:
        settings = {"compiler": "openvino", "no_validation": True, "exist_onnx_path": "word"} | settings
        (planned,) = _plan({"settings": settings}, command_line=command_line, where=given).jobs
        found = _settings(planned)
        assert planned.job.provenance["exist_compiler_path"].value == found.exist_compiler_path
        return [found.exist_compiler_path, found.exist_onnx_path]

    run_file = str(tmp_path / "there" / "run.yaml")
    in_file = {"exist_compiler_path": "b.blob", "exist_onnx_path": "b.onnx"}
    there = [str(tmp_path / "there" / name) for name in ("b.blob", "b.onnx")]
    assert files(run_file, in_file, {}) == there
    here = str(tmp_path / "here" / "a.blob")
    assert files(run_file, in_file, {"exist_compiler_path": "a.blob"}) == [here, there[1]]
    assert files("command line", {"exist_compiler_path": "a.blob"}, {}) == [here, "word"]
    with pytest.raises(SpecError, match=r"there/a\.blob does not exist"):
        files(run_file, {"exist_compiler_path": "a.blob"}, {})
    with pytest.raises(SpecError, match=r"'a\.blob' is not an ONNX file"):
        _plan({"settings": {"compiler": "openvino", "exist_onnx_path": "a.blob"}}, where=run_file)


def test_an_engine_of_the_vendors_folder_is_known_and_one_that_nobody_has_refused(toy: Path) -> None:
    (toy / "vendors" / "acme" / "engines").mkdir()
    (toy / "vendors" / "acme" / "engines" / "acmert.py").touch()
    assert not any("engine" in told for told in _plan({"settings": {"compiler": "acmert"}}).warnings)
    with pytest.raises(SpecError, match=r"unknown engine 'openvin' \(did you mean 'openvino'\?\)"):
        _plan({"settings": {"compiler": "openvin"}})


def test_weights_and_optional_data_are_taken_where_the_named_directory_holds_them(toy: Path, tmp_path: Path) -> None:
    named = tmp_path / "named"
    (named / "toy").mkdir(parents=True)
    (named / "more").mkdir()
    (named / "toy" / "model.safetensors").write_bytes(b"")
    plan = _plan({"data": str(named)})
    assert plan.jobs[0].job.data_dirs["weights"] == named / "toy" / "model.safetensors"
    assert "more" in plan.jobs[0].job.data_dirs
    assert not plan.warnings


def test_a_case_whose_only_data_is_not_named_is_refused_unless_it_is_synthetic(toy: Path, tmp_path: Path) -> None:
    case = toy / "cases" / "toy" / "case.yaml"
    case.write_text(case.read_text(encoding="utf-8").replace("  data: [pictures]\n", ""), encoding="utf-8")
    with pytest.raises(SpecError, match=r"no data: no more/.*--data DIRECTORY.*--synthetic"):
        _plan({})
    with pytest.raises(SpecError, match=f"no data: {tmp_path} has no more/"):
        _plan({"data": str(tmp_path)})
    assert _plan({}, command_line={"synthetic": True}).jobs


def test_a_vendors_file_changes_settings_and_gives_the_engine_options(toy: Path) -> None:
    folder = toy / "vendors" / "acme" / "cases" / "toy-pytorch"
    folder.mkdir(parents=True)
    (folder / "infer.yaml").write_text("batch_size: 16\nacme_cache: /tmp/x\n")
    plan = _plan({})
    settings = _settings(plan.jobs[0])
    assert settings.batch_size == 16
    assert settings.engine_options == {"acme_cache": "/tmp/x"}
    assert any("acme_cache" in warning or "none of the configurations" in warning for warning in plan.warnings)


ENDPOINT = {"server": None, "endpoint": "http://10.0.0.7:8000", "served_model": "llama"}


def plan(settings: dict[str, Any] | None = None, key: str = "llama_mini", task: str = "serve", **more: Any) -> Plan:
    return plan_of({"vendor": "cpu", "cases": [{"key": key, "task": task, "settings": settings or {}}]} | more)


def served(settings: dict[str, Any], key: str = "llama_mini", **more: Any) -> tuple[PlannedJob, ServeJob]:
    (planned,) = plan(settings, key, **more).jobs
    assert isinstance(planned.job.work, ServeJob)
    return planned, planned.job.work


def problems(settings: dict[str, Any], key: str = "llama_mini", **more: Any) -> str:
    with pytest.raises(SpecError) as caught:
        plan(settings, key, **more)
    return str(caught.value)


def test_a_server_is_planned_as_one_process_with_its_options_and_their_layers() -> None:
    planned, work = served({"server_options.num_blocks": 64})
    assert work.server is not None
    assert (work.server.name, planned.job.num_ranks) == ("transformers", 1)
    assert work.settings.server_options["num_blocks"] == 64
    assert planned.job.provenance["server_options.num_blocks"].layer == "run.yaml"
    assert planned.job.provenance["server_options.block_size"].layer == "servers/transformers/server.yaml"
    assert {"accelmark serve", "server transformers"} <= {need.needed_by for need in planned.requires}
    assert list(planned.job.data_dirs) == ["shakespeare"]


def test_an_endpoint_starts_no_server_and_is_warned_about() -> None:
    assert served(ENDPOINT)[1].server is None
    assert "-serve-endpoint-" in served(ENDPOINT | {"server": "transformers"})[0].directory
    assert any("OPEN at best" in warning for warning in plan(ENDPOINT).warnings)


def test_different_loads_have_directories_of_their_own() -> None:
    loads: list[dict[str, Any]] = [{"load.concurrency": [2]}, {"load.concurrency": [4]}, {"load.duration_s": 5}]
    assert len({plan(settings).jobs[0].directory for settings in loads}) == len(loads)


def test_a_preset_of_the_slo_is_a_layer_of_its_own_and_named_limits_replace_it() -> None:
    planned, work = served({"slo.preset": "llama3_1_8b_interactive", "slo.ttft_ms": 250, "scenarios": ["server"]})
    assert (work.settings.slo.ttft_ms, work.settings.slo.tpot_ms, work.settings.slo.share) == (250, 30, 0.99)
    assert planned.job.provenance["slo.ttft_ms"].layer == "run.yaml"
    assert planned.job.provenance["slo.tpot_ms"].layer == "MLPerf's limits (llama3_1_8b_interactive)"
    assert "scenarios" in {need.needed_by for need in plan({"scenarios": ["offline"]}).jobs[0].requires}


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"slo.preset": "llama_3_1_8b"}, "there is no preset 'llama_3_1_8b' (did you mean 'llama3_1_8b'?"),
        ({"scenarios": ["server"]}, "run.yaml: scenarios: server needs slo.ttft_ms and slo.tpot_ms"),
        ({"server": "vlm"}, "unknown server 'vlm' (did you mean 'vllm'?"),
        ({"server": None}, "names neither a server nor an endpoint"),
        ({**ENDPOINT, "served_model": None}, "--model NAME"),
        ({**ENDPOINT, "endpoint": "10.0.0.7:8000"}, "is not a URL"),
        ({"precision": "int8"}, "transformers serve has no int8"),
        ({"server_options.num_block": 64}, "server_options.num_block: unknown setting"),
        ({"load.arrival": "poisson"}, "run.yaml: load: arrival poisson needs load.rates (--rate)"),
        ({"load.arrival": "trace"}, "run.yaml: load: arrival trace needs load.trace, a file"),
        ({"load.search": True}, "run.yaml: load.search needs a limit"),
        ({"load.concurrency": [0]}, "load.concurrency"),
        ({"prompts.input.mean": 8}, "prompts.input.mean: is not mutable"),
        ({"load.arrival": "trace", "load.trace": "/no/such/trace.jsonl"}, "/no/such/trace.jsonl is not a file"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(settings: dict[str, Any], what: str) -> None:
    found = problems(settings)
    assert what in found
    assert not found.endswith(f", found {settings.get('slo.preset')!r}")


@pytest.mark.parametrize(("settings", "task"), [({"server": "vllm"}, "serve"), ({}, "infer")])
def test_the_devices_of_a_key_are_those_of_one_rank(settings: dict[str, Any], task: str) -> None:
    (planned,) = plan(settings, "llama_mini:pytorch:CPU:1:8", task=task).jobs
    assert (planned.job.key.nproc, planned.job.num_ranks) == (8, 1)


@pytest.mark.parametrize(
    ("settings", "key", "what"),
    [
        ({"compiler": "openvino"}, "llama_mini:pytorch:CPU:1:2", "openvino computes on one device, the key requests 2"),
        ({"compiler": "inductor"}, "llama_mini:pytorch:CPU:1:2", "(engines of several devices: eager)"),
        ({}, "llama_mini:pytorch:CPU:2:2", "requests 2 hosts; inference runs on one"),
        ({}, "resnet_mini:pytorch:CPU:1:2", "only language models are split over several devices"),
    ],
)
def test_what_cannot_be_split_over_devices_is_refused_with_what_can(
    settings: dict[str, Any], key: str, what: str
) -> None:
    assert what in problems(settings, key, task="infer")


def test_a_vendor_sets_options_and_environment_of_a_server_and_settings_of_a_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor, fork = tmp_path / "vendors/acme", tmp_path / "servers/vllm_acme"
    case = vendor / "cases/llama_mini-pytorch"
    for folder in (vendor / "servers", case, fork):
        folder.mkdir(parents=True)
    (vendor / "vendor.yaml").write_text(
        "name: acme\ntitle: Acme\nvisible_devices_env: null\ntelemetry: {detect: {always: true}}\nchips: []\n"
        "frameworks: {pytorch: {device_type: cpu, collective_backend: gloo}}\n"
    )
    (fork / "server.yaml").write_text(
        "name: vllm_acme\ntitle: vLLM for Acme\ntried: null\nhealth: /ping\n"
        'command: [vllm-acme, "{model_dir}", --port, "{port}", --cards, "{num_devices}"]\n'
        "flags: {server_options.blocks: [--blocks, '{value}']}\noptions: {blocks: 8}\nenvironment: {A: '1', B: '1'}\n"
    )
    monkeypatch.setenv("ACCELMARK_PLUGINS", str(tmp_path))
    adaptation = "options: {blocks: 64}\nenvironment: {B: '2'}\nrequires: [acme-rt]\n"
    (vendor / "servers/vllm_acme.yaml").write_text(adaptation)
    (case / "serve.yaml").write_text("precision: bf16\nload: {concurrency: [2]}\n")
    (case / "serve_X1x1x8.yaml").write_text("load: {concurrency: [64]}\n")
    planned, work = served({"server": "vllm_acme"}, "llama_mini:pytorch:X1:1:8", vendor="acme")
    assert work.server is not None
    assert work.server.environment == {"A": "1", "B": "2"}
    assert work.server.requires == ("acme-rt",)
    assert (work.settings.precision, work.settings.load.concurrency) == ("bf16", (64,))
    options = planned.job.provenance["server_options.blocks"]
    assert (options.value, options.layer) == (64, "vendors/acme/servers/vllm_acme.yaml")
    assert options.replaced == (("servers/vllm_acme/server.yaml", 8),)
    assert planned.job.provenance["precision"].layer == "vendors/acme/cases/llama_mini-pytorch/serve.yaml"
    values = dict.fromkeys(("python", "model_dir", "host", "port", "device", "node_dir", "precision"), "x")
    command = work.server.arguments(values | {"num_devices": str(planned.job.key.nproc)}, {})
    assert command[:6] == ["vllm-acme", "x", "--port", "x", "--cards", "8"]
    named, _ = served({"server": "vllm_acme", "server_options.blocks": 9}, "llama_mini:pytorch:X1", vendor="acme")
    assert named.job.provenance["server_options.blocks"].layer == "run.yaml"


SHIPPED = InferSettings(batch_size=8, compiler="slow")
CHOICES = (
    Choice(
        values=tuple({"compiler": name, "precision": p} for name in ("slow", "quick") for p in ("fp32", "int8")),
        once=True,
    ),
    Choice(values=({"engine_options.streams": None}, {"engine_options.streams": 2}), engine="quick"),
    Choice(values=tuple({"batch_size": size} for size in (2, 4, 8, 16, 32)), ordered=True),
)


def searched(speed: Any, choices: tuple[Choice, ...] = CHOICES) -> tuple[list[InferSettings], InferSettings]:
    """Search to the end; returns the trials in their order, and the best settings."""
    tried: list[InferSettings] = [SHIPPED]
    scores = {identity(SHIPPED): speed(SHIPPED)}
    while (found := next_trial(SHIPPED, choices, scores)) is not None:
        assert identity(found) not in scores, "no settings are tried twice"
        tried.append(found)
        scores[identity(found)] = speed(found)
    return tried[1:], max(tried, key=lambda settings: scores[identity(settings)])


def test_the_search_finds_the_best_of_each_setting_and_keeps_options_with_their_engine() -> None:
    def speed(settings: InferSettings) -> float:
        value = {"slow": 0.0, "quick": 1.0}[settings.compiler or ""] + (0.5 if settings.precision == "int8" else 0)
        value += 0.3 * bool(settings.engine_options)
        return value + math.log(settings.batch_size) * (1 if settings.batch_size <= 16 else -1)

    tried, best = searched(speed)
    assert (best.compiler, best.precision, best.batch_size) == ("quick", "int8", 16)
    assert best.engine_options == {"streams": 2}
    assert len(tried) == 3 + 1 + 2 + 1, "three others of engine and precision, streams, batch 16 and 32, no streams"
    assert all(not settings.engine_options for settings in tried if settings.compiler == "slow")


def test_a_failed_trial_does_not_end_the_search_and_a_gain_within_noise_is_none() -> None:
    def speed(settings: InferSettings) -> float:
        if settings.precision == "int8":
            return -math.inf
        return math.log(1.005) if settings.compiler == "quick" else 0.0

    tried, best = searched(speed, CHOICES[:1])
    assert [(each.compiler, each.precision) for each in tried] == [
        ("slow", "int8"),
        ("quick", "fp32"),
        ("quick", "int8"),
    ]
    assert best.compiler == "quick", "the best trial, though the search did not go on from it"


@given(st.lists(st.floats(-3, 3), min_size=64, max_size=64), st.integers(0, 30))
def test_an_interrupted_search_continues_as_it_would_have(values: list[float], ended: int) -> None:
    numbers = itertools.count()
    known: dict[str, float] = {}

    def speed(settings: InferSettings) -> float:
        name = identity(settings)
        known[name] = known.get(name, values[next(numbers) % len(values)])
        return known[name]

    tried, _ = searched(speed)
    scores = {identity(settings): speed(settings) for settings in (SHIPPED, *tried[:ended])}
    found = next_trial(SHIPPED, CHOICES, scores)
    assert found == (tried[ended] if ended < len(tried) else None)


ENGINES = {
    "eager": EngineSpec(title="E", module="json", precisions=("fp32", "bf16", "int8"), generates=True),
    "other": EngineSpec(title="O", module="json", precisions=("fp32",), tunes={"engine_options.streams": (None, 2)}),
    "absent": EngineSpec(title="A", module="none", requires=("no-such-package>=1",), precisions=("fp32",)),
}


def planned(plugins: Any, *capabilities: str, **command_line: Any) -> Plan:
    with_inference(plugins)
    run = {"vendor": "acme", "cases": [{"task": "infer", "key": "toy"}]}
    plan = plan_of(run, Detected("acme", "X2", None, 1), command_line=command_line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "engine_specs", lambda _: ENGINES)
        patch.setattr("os.sched_getaffinity", lambda _: range(4))
        return tuned_plan(plan, dict.fromkeys(capabilities, "/proc/cpuinfo"), Budget(600, None))


def tried_values(plan: Plan) -> list[list[tuple[Any, ...]]]:
    assert plan.tuning is not None
    return [[tuple(each.values()) for each in choice.values] for choice in plan.tuning.choices]


def test_installed_engines_precisions_of_the_device_and_settings_that_were_not_given_are_tried(plugins: Any) -> None:
    assert tried_values(planned(plugins)) == [
        [("eager", "fp32"), ("eager", "int8"), ("other", "fp32")],
        [(None,), (2,)],
        [(1,), (2,), (4,), (8,), (16,)],
        [(None,), (2,)],
    ]
    assert ("eager", "bf16") in tried_values(planned(plugins, "amx_bf16"))[0]
    given = planned(plugins, compiler="eager", batch_size=4, threads=4)
    assert tried_values(given) == [[("eager", "fp32"), ("eager", "int8")]]
    latency = planned(plugins, optimize_for="latency")
    assert latency.tuning is not None
    assert (latency.tuning.figure, latency.tuning.better) == ("latency_p50_ms", "lower")
    assert len(latency.tuning.choices) == 2, "engine and precision, threads: a smaller batch answers sooner by itself"


def test_rounds_as_shipped_begin_the_search_and_take_turns_with_tuned_ones_at_its_end(plugins: Any) -> None:
    plan = planned(plugins)
    assert [(job.job.role, job.job.round, job.job.key.repeat) for job in plan.jobs] == [
        ("as shipped", number, 3) for number in (1, 2, 3)
    ]
    assert plan.timeout_s == 600
    better = settings_of(plan.jobs[0]).model_copy(update={"batch_size": 8, "engine_options": {"streams": 2}})
    plan = with_trial(with_trial(plan, settings_of(plan.jobs[0]).model_copy(update={"batch_size": 2})), better)
    assert [job.job.role for job in plan.jobs] == ["as shipped", "trial", "trial", "as shipped", "as shipped"]
    assert [settings_of(job).batch_size for job in plan.jobs[1:3]] == [2, 8]
    plan = with_tuned_rounds(plan, better)
    assert [(job.job.role, job.job.round) for job in plan.jobs[3:]] == [
        ("tuned", 1), ("as shipped", 2), ("tuned", 2), ("as shipped", 3), ("tuned", 3)
    ]  # fmt: skip
    assert len({job.directory for job in plan.jobs}) == len(plan.jobs)
    tuned = plan.jobs[3].job
    assert tuned.provenance["batch_size"].layer == "tuning"
    assert tuned.provenance["batch_size"].replaced == (("cases/toy/case.yaml", 4),)
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert tuning.vendor_values(plan.jobs[0].job, tuned) == {"batch_size": 8, "engine_options.streams": 2}
