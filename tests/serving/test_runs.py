"""Whole runs: verb, agent, client and audit with servers of letters and of models; and benchmarks."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from tests.serving.benchmark_data import accelmark, write_gsm8k, write_small_llama

TOY = Path(__file__).with_name("toy_server.py")
Summary = dict[str, Any]


@pytest.fixture(autouse=True)
def toy_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plugins/servers/toy"
    folder.mkdir(parents=True)
    declaration = {
        "name": "toy",
        "title": "Toy server",
        "tried": None,
        "command": ["{python}", str(TOY), "{host}", "{port}", "--devices={num_devices}"],
        "flags": {"server_options.mode": ["{value}"]},
        "options": {"mode": "letters"},
    }
    (folder / "server.yaml").write_text(json.dumps(declaration))
    monkeypatch.setenv("ACCELMARK_PLUGINS", str(tmp_path / "plugins"))


def serve(tmp_path: Path, *arguments: str, key: str = "llama_mini") -> tuple[int, Summary, str]:
    """Run ``accelmark serve``; return the exit code, the case's result and the output."""
    return accelmark(tmp_path, "serve", key, *arguments)


def left_over(tmp_path: Path) -> list[str]:
    """Return the working directories of processes that a run left."""
    places = [process.info["cwd"] or "" for process in psutil.process_iter(["cwd"])]
    return [place for place in places if place.startswith(str(tmp_path / "run"))]


def test_an_endpoint_that_refuses_connections_is_found_before_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, case, output = serve(tmp_path, "--endpoint", url, "--model", "m")
    words = " ".join(output.replace("│", " ").split())
    assert (code, case) == (1, {})
    assert f"{url} cannot be reached: Connection refused" in words
    assert "check --endpoint, and that the server runs" in words
    assert not (tmp_path / "run").exists(), "nothing was started"


def toy(mode: str) -> list[str]:
    few = ["--concurrency", "2", "--set", "load.max_requests=12", "--set", "load.warmup_requests=0", "--duration", "60"]
    return ["--server", "toy", "--set", f"server_options.mode={mode}", *few]


@pytest.mark.heavy
def test_a_server_that_answers_nonsense_is_measured_and_invalid(tmp_path: Path) -> None:
    code, case, output = serve(tmp_path, *toy("letters"), key="llama_mini:pytorch:CPU:1:2")
    assert (code, case["state"], case["verdict"]) == (1, "succeeded", "INVALID"), output
    assert case["figures"]["answer_agreement"]["mean"] < 0.5
    rate = case["figures"]["output_tokens_per_second"]["mean"]
    assert case["figures"]["output_tokens_per_second_per_device"]["mean"] == pytest.approx(rate / 2)
    (started,) = tmp_path.glob("run/*/round1/result.json")
    assert "--devices=2" in json.loads(started.read_text())["environment"]["started"]["command"]
    records = [json.loads(line) for path in tmp_path.rglob("requests.jsonl") for line in path.read_text().splitlines()]
    assert len(records) == 12
    assert all(record["output_tokens"] == record["usage_output"] == 32 for record in records)
    assert len({record["prompt"] for record in records}) == 12
    assert not left_over(tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("mode", "state", "rule", "what"),
    [
        ("short", "succeeded", "answer-length", "16"),
        ("refuses", "succeeded", "request-errors", "http error"),
        ("lies", "succeeded", "token-count", "usage"),
        ("stalls", "succeeded", "request-errors", "timed out"),
        ("drops", "succeeded", "request-errors", "dropped"),
        ("garbles", "succeeded", "request-errors", "malformed"),
        ("dies", "failed", "rounds-incomplete", "ended by itself with status 9"),
        ("starts", "failed", "rounds-incomplete", "did not answer /health with 200 within 3 s"),
    ],
)
def test_what_a_server_does_wrong_is_in_the_result(tmp_path: Path, mode: str, state: str, rule: str, what: str) -> None:
    limits = ["--set", "request_timeout_s=3", "--set", f"start_timeout_s={3 if mode == 'starts' else 60}"]
    code, case, output = serve(tmp_path, *toy(mode), *limits)
    assert (code, case["state"], case["verdict"] == "VALID") == (1, state, False), output
    told = [found for found in case["findings"] if found["rule"] == rule]
    assert what in json.dumps(told), json.dumps(case, indent=1)
    assert not left_over(tmp_path)


@pytest.mark.heavy
def test_a_server_that_answers_known_prompts_from_a_cache_is_invalid(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{number % 12} Once upon a time", "output_tokens": 16}) for number in range(36)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    few = ["--server", "toy", "--set", "server_options.mode=caches", "--concurrency", "2", "--duration", "60"]
    few += ["--set", "load.max_requests=36", "--set", "load.warmup_requests=0"]
    few += ["--open", "--set", "prompts.source=jsonl", "--set", f"prompts.file={tmp_path / 'prompts.jsonl'}"]
    code, case, output = serve(tmp_path, *few)
    assert (code, case["state"], case["verdict"]) == (1, "succeeded", "INVALID"), output
    found = {(finding["severity"], finding["rule"]) for finding in case["findings"]}
    assert ("error", "result-cache") in found, case["findings"]


@pytest.mark.heavy
def test_a_vendors_options_reach_its_server_which_states_the_time_in_its_queue(tmp_path: Path) -> None:
    vendor = tmp_path / "plugins/vendors/acme"
    (vendor / "servers").mkdir(parents=True)
    (vendor / "vendor.yaml").write_text(
        "name: acme\ntitle: Acme\nvisible_devices_env: null\ntelemetry: {detect: {always: true}}\nchips: []\n"
        "frameworks: {pytorch: {device_type: cpu, collective_backend: gloo}}\n"
    )
    (vendor / "servers/toy.yaml").write_text("options: {mode: queued}\nenvironment: {ACME_GRAPHS: '1'}\n")
    few = ["--concurrency", "2", "--set", "load.max_requests=12", "--set", "load.warmup_requests=0"]
    code, case, output = serve(tmp_path, "--server", "toy", "--vendor", "acme", *few)
    assert (code, case["state"]) == (1, "succeeded"), output  # its answers are not the model's
    records = [json.loads(line) for path in tmp_path.rglob("requests.jsonl") for line in path.read_text().splitlines()]
    assert sorted(record["queue_s"] for record in records) == [pytest.approx(0.01 * n) for n in range(1, 13)]
    (round_file,) = tmp_path.glob("run/*/round1/result.json")
    (stage,) = json.loads(round_file.read_text())["serving"]["stages"]
    assert 10 <= stage["latencies"]["server_queue"]["quantiles"]["p50"]["value"] <= 120


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("server", "figure", "least"),
    [([], "ttft_p50_ms", 0), (["--server", "llama_cpp"], "peak_device_memory_mib", 10)],
    ids=["transformers", "llama_cpp"],
)
def test_a_small_llama_is_served_as_the_framework_answers(
    tmp_path: Path, server: list[str], figure: str, least: float
) -> None:
    if server:
        pytest.importorskip("llama_cpp", reason="make test-servers")
        pytest.importorskip("gguf")
    load = ["--concurrency", "1", "--concurrency", "4", "--duration", "8"]
    code, case, output = serve(tmp_path, *server, *load)
    assert case.get("state") == "succeeded", output
    assert code == 0, output
    assert case["figures"]["answer_agreement"]["mean"] > 0.9
    assert case["figures"][figure]["mean"] > least
    assert not [found for found in case["findings"] if found["severity"] == "error"]


def test_a_benchmark_without_its_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    code, _, output = accelmark(tmp_path, "serve", "llama_mini", "--set", "benchmarks=[mmlu]", "--dry-run")
    assert code == 2, output
    assert "no data of mmlu: mmlu/ is needed below --data" in output
    assert "git clone https://huggingface.co/datasets/cais/mmlu mmlu" in output


@pytest.mark.heavy
def test_gsm8k_is_measured_by_the_harness_through_transformers(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_gsm8k(data / "gsm8k", 6)
    write_small_llama(data / "llama3_1_8b")
    (plays,) = dataset_specs(("shakespeare",), "here")
    (data / "shakespeare").symlink_to(ensure(plays))
    few = ["--server", "transformers", "--data", str(data), "--concurrency", "2", "--duration", "2", "--open"]
    few += ["--set", "benchmarks=[gsm8k]", "--set", "precision=fp32", "--set", "prompts.input.mean=32"]
    _, _, output = accelmark(tmp_path, "serve", "llama3_1_8b", *few, "--set", "prompts.output.mean=8")
    result = [json.loads(file.read_text()) for file in (tmp_path / "run").rglob("result.json")]
    logs = "".join(file.read_text(errors="replace")[-3000:] for file in (tmp_path / "run").rglob("harness.log"))
    assert len(result) == 1, output + logs
    assert result[0]["state"] == "succeeded", output + logs
    (score,) = result[0]["serving"]["scores"]
    assert (score["task"], score["num_questions"]) == ("gsm8k", 6)
    assert score["value"] == pytest.approx(2 / 6)
