from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.spec.errors import SpecError
from accelmark.spec.job import ServeJob
from tests.plan.plans import plan_of

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
