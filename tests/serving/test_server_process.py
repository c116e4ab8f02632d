"""Servers that start, die, never get healthy, leave children, or do not exist: real processes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from accelmark.serving.answers import AnswerSample, compare_answers
from accelmark.serving.load import ServedModel
from accelmark.serving.request import Endpoint, PlannedRequest, ServeError
from accelmark.serving.server_process import Cores, ServerProcess
from accelmark.spec.job import JobSpec
from accelmark.spec.log.inference import Answer, RequestRecord
from accelmark.spec.model import parse
from accelmark.spec.plugins.catalog import folders, load_server
from accelmark.spec.plugins.programs import SERVER_PLACEHOLDERS, ServerSpec, fill
from accelmark.spec.settings.serving import ServeSettings
from accelmark.spec.settings.training import Scalar

HEALTHY = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + HEALTHY
UNHEALTHY = HEALTHY.replace('"/health"', '"/never"')
DIES = "import sys; print('no free memory for the KV cache', file=sys.stderr); sys.exit(7)"

Start = Any


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a Python program as a server; all are stopped at the end."""
    started: list[ServerProcess] = []

    def run(
        program: str, only: Sequence[int] | None = None, report: Callable[[], None] = lambda: None, **more: Any
    ) -> ServerProcess:
        values = {"name": "toy", "title": "Toy server", "tried": None}
        values |= {"command": ("{python}", "-c", program, "{host}", "{port}")} | more
        spec = parse(ServerSpec, values, "toy")
        cores = tuple(os.sched_getaffinity(0)) if only is None else only
        server = ServerProcess(
            spec, tmp_path, tmp_path, device="cpu", num_devices=1, settings={}, cores=cores, report=report
        )
        started.append(server)
        return started[-1]

    yield run
    for server in started:
        server.stop()


@pytest.mark.parametrize("program", [HEALTHY, STUBBORN])
def test_a_server_and_its_children_are_gone_after_stop(
    start: Start, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelmark.serving.server_process._STOP_S", 1.0)
    server = start(program)
    assert server.wait_until_healthy(120, lambda: None) > 0
    family = psutil.Process(server._process.pid).children(recursive=True)
    assert family
    server.check()
    server.stop()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family)
    with pytest.raises(ServeError):
        server.check()


def test_a_server_that_dies_never_gets_healthy_or_does_not_exist_says_why(start: Start) -> None:
    with pytest.raises(ServeError, match=r"Toy server ended by itself with status 7: no free memory for the KV"):
        start(DIES).wait_until_healthy(120, lambda: None)
    told: list[int] = []
    with pytest.raises(ServeError, match=r"did not answer /health with 200 within 3 s.*server\.log"):
        start(UNHEALTHY).wait_until_healthy(3, lambda: told.append(1))
    assert told
    with pytest.raises(ServeError, match="no-such-server"):
        start("", command=("no-such-server", "{port}"))


def test_every_declaration_gives_a_command() -> None:
    values = {name: name for name in SERVER_PLACEHOLDERS}
    for name in folders("servers"):
        server = load_server(name)
        command = server.arguments(values, {"precision": "bf16", "threads": None})
        command += fill(server.prepare, values)
        assert {"model_dir", "host", "port"} <= set(command)
        assert not [part for part in command if "{" in part]
        assert Endpoint(f"http://host:1{server.api_path}", "m").url().endswith(f"{server.api_path}/completions")


def test_options_and_devices_become_arguments_and_null_is_left_out() -> None:
    server = load_server("vllm")
    values = dict.fromkeys(("model_dir", "host", "port"), "x") | {"num_devices": "8"}
    given: dict[str, Scalar] = {
        "precision": "fp16",
        "server_options.prefix_caching": False,
        "server_options.max_num_seqs": 64,
    }
    command = server.arguments(values, given)
    assert command[-5:] == ["--dtype", "float16", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
    assert command[command.index("8") - 1] == "--tensor-parallel-size"


def test_a_server_and_its_children_run_on_their_cores_and_their_memory_is_sampled(start: Start) -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    server = start(HEALTHY, only=(core,))
    server.wait_until_healthy(60, lambda: None)
    until_s = time.monotonic() + 30
    while (server.peak_memory_mib or 0.0) < 1 and time.monotonic() < until_s:  # the first sample is of its start
        server.check()
        time.sleep(0.1)
    family = [process := psutil.Process(server._process.pid), *process.children(recursive=True)]
    assert len(family) == 2
    assert all(each.cpu_affinity() == [core] for each in family)
    assert os.sched_getaffinity(0) == before
    assert server.peak_memory_mib is not None
    assert 1 < server.peak_memory_mib < 2000


def test_the_client_has_cores_of_its_own_where_there_are_enough() -> None:
    available = tuple(sorted(os.sched_getaffinity(0)))
    assert Cores.divided(len(available)) == (available, available)
    if len(available) > 1:
        assert Cores.divided(1) == (available[:-1], available[-1:])


@pytest.fixture(autouse=True)
def quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelmark.serving.server_process._REPORT_S", 0.01)


def test_the_conversion_of_a_large_model_is_no_silence(start: Start) -> None:
    reports: list[int] = []
    start(HEALTHY, prepare=("{python}", "-c", "import time; time.sleep(0.5)"), report=lambda: reports.append(1))
    assert len(reports) > 3


COMPARES = """
import json, pathlib, sys, time
model, device, dtype, prompts, answers = sys.argv[1:]
time.sleep(0.5)
lines = pathlib.Path(prompts).read_text().splitlines()
pathlib.Path(answers).write_text("".join(json.dumps(device) + chr(10) for _ in lines))
print(json.dumps({"cpu_s": 1.0, "wall_s": 2.0}))
"""


@pytest.mark.parametrize(("device", "num_devices", "expected"), [("cuda", 8, "auto"), ("cpu", 2, "cpu")])
def test_the_framework_compares_answers_on_all_devices_and_not_silently(
    device: str, num_devices: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "accelmark.serving.answers.module_command", lambda python, _, *rest: [python, "-c", COMPARES, *rest]
    )
    sample = AnswerSample(1, random.Random(1))
    record = RequestRecord(stage=0, number=0, prompt=0, due_s=0, end_s=1, status="ok", requested_tokens=4)
    sample.add(PlannedRequest(0, 0, "prompt", 4), record, expected)
    job = SimpleNamespace(key=SimpleNamespace(nproc=num_devices), device_type=device)
    model = SimpleNamespace(tokens=lambda text: [ord(sign) for sign in text], directory=tmp_path)
    reports: list[int] = []
    times = compare_answers(
        ServeSettings(), cast(JobSpec, job), cast(ServedModel, model), sample, tmp_path,
        lambda: reports.append(1),
    )  # fmt: skip
    assert (times is not None and times.wall_s) == 2.0
    answer = Answer.model_validate_json((tmp_path / "answers.jsonl").read_text())
    assert answer.num_agreeing == answer.num_tokens == len(expected)
    assert len(reports) > 3
