"""Servers that start, die, never get healthy, leave children, or do not exist: real processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from accelmark.serving.server_process import NeverHealthyError, ServerDiedError, ServerMissingError, ServerProcess
from accelmark.spec.errors import SpecError
from accelmark.spec.model import parse
from accelmark.spec.plugins.catalog import folders, load_server
from accelmark.spec.plugins.server import ServerSpec
from accelmark.spec.settings import Scalar

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

    def run(program: str, **more: Any) -> ServerProcess:
        values = {"name": "toy", "title": "Toy server", "tried": None}
        values |= {"command": ("{python}", "-c", program, "{host}", "{port}")} | more
        spec = parse(ServerSpec, values, "toy")
        started.append(ServerProcess(spec, tmp_path, tmp_path, device="cpu", num_devices=1, settings={}))
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
    with pytest.raises(ServerDiedError):
        server.check()


def test_a_server_that_dies_says_why(start: Start) -> None:
    with pytest.raises(ServerDiedError, match=r"Toy server ended by itself with status 7: no free memory for the KV"):
        start(DIES).wait_until_healthy(120, lambda: None)


def test_a_server_that_never_gets_healthy_is_given_up(start: Start) -> None:
    told: list[int] = []
    server = start(UNHEALTHY)
    with pytest.raises(NeverHealthyError, match=r"did not answer /health with 200 within 3 s.*server\.log"):
        server.wait_until_healthy(3, lambda: told.append(1))
    assert told


def test_a_program_that_does_not_exist_is_named(start: Start) -> None:
    with pytest.raises(ServerMissingError, match="no-such-server"):
        start("", command=("no-such-server", "{port}"))


def test_every_declaration_gives_a_command() -> None:
    values = {name: name for name in ("python", "model_dir", "host", "port", "device", "num_devices", "node_dir")}
    for name in folders("servers"):
        server = load_server(name)
        command = server.arguments(values, {"precision": "bf16", "threads": None})
        assert {"model_dir", "host", "port"} <= set(command)
        assert not [part for part in command if "{" in part]


def test_options_become_arguments_and_null_is_left_out() -> None:
    server = load_server("vllm")
    values = dict.fromkeys(("model_dir", "host", "port", "num_devices"), "x")
    given: dict[str, Scalar] = {
        "precision": "fp16",
        "server_options.prefix_caching": False,
        "server_options.max_num_seqs": 64,
    }
    command = server.arguments(values, given)
    assert command[-5:] == ["--dtype", "float16", "--max-num-seqs", "64", "--no-enable-prefix-caching"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"command": ["{pyton}"]}, "unknown placeholder {pyton}"),
        ({"flags": {"precison": ["--dtype"]}}, "flags names 'precison'"),
        ({"options": {"blocks": 1}}, "no entry for the option 'blocks'"),
    ],
)
def test_a_wrong_declaration_names_what_is_wrong(change: dict[str, Any], what: str) -> None:
    values = {"name": "toy", "title": "Toy", "tried": None, "command": [sys.executable]} | change
    with pytest.raises(SpecError) as caught:
        parse(ServerSpec, values, "server.yaml")
    assert what in str(caught.value)
