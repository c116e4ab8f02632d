from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.report.view import RunIndex, is_loopback, listen, make_app, read_or_create_token, server_for
from accelmark.results.store.bundle import SUFFIX, write_bundle
from accelmark.spec.errors import RequestError
from tests.made_run import measured_run, perflog
from tests.results.test_sources import RECORDED
from tests.run.fakes import make_plan


@contextmanager
def serving(directory: Path, token: str | None = None) -> Iterator[int]:
    """Serve a directory; yield the port."""
    server = server_for(make_app(RunIndex(directory), "127.0.0.1", token))
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


class Asked:
    """One reply."""

    def __init__(self, port: int, path: str, method: str = "GET", body: str | None = None, **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        reply = connection.getresponse()
        self.status, self.headers = reply.status, reply.headers
        self.text = reply.read().decode()
        connection.close()


TOKEN = "a-token-of-enough-letters-1234567890"  # noqa: S105 - made up for tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served") / "runs"
    root.mkdir()
    measured_run(root / "base", rounds=2)
    measured_run(root / "team" / "fast", rounds=2, step_ms=5.0)
    measured_run(root / "two", rounds=1, nproc=2)
    measured_run(root / "<i>bold", rounds=1, model="<b>x</b>")
    (root / "torn").mkdir()
    (root / "torn" / "summary.json").write_text("{")
    outside = measured_run(root.parent / "outside", rounds=1)
    (root / "link").symlink_to(outside)
    return root


@pytest.fixture(scope="module")
def port(runs: Path) -> Iterator[int]:
    with serving(runs) as found:
        yield found


def test_the_list_shows_every_run_names_the_bad_one_and_is_filtered(port: int, runs: Path) -> None:
    page = Asked(port, "/")
    assert page.status == 200
    for name in ("/run/base", "/run/team/fast", "/run/two"):
        assert f'href="{name}"' in page.text
    assert "torn/summary.json: is not JSON" in page.text
    for text in (str(runs), "<i>bold", "<b>x</b>"):
        assert text not in page.text
    filtered = Asked(port, "/?scale=1x2").text
    assert ("/run/two" in filtered, "/run/base" in filtered) == (True, False)
    assert "No result matches the filter" in Asked(port, "/?q=nothing-is-called-so").text


def test_a_run_has_its_page_and_compares(port: int) -> None:
    page = Asked(port, "/run/team/fast")
    assert page.status == 200
    assert "Benchmark report" in page.text
    compared = Asked(port, "/compare?run=base&run=team/fast")
    assert compared.status == 200
    assert "effect better" in compared.text
    refused = Asked(port, "/compare?run=base&run=two")
    assert refused.status == 400
    assert "not comparable" in refused.text
    assert "even if not comparable" in refused.text
    assert "--" not in refused.text.partition("<main")[2]
    assert Asked(port, "/compare?run=base&run=two&across=1").status == 200
    assert "Not comparable; compared all the same" in Asked(port, "/compare?run=base&run=two&force=1").text
    assert Asked(port, "/compare?run=base").status == 400
    assert Asked(port, "/compare?run=base&run=gone").status == 404


def test_scaling_trend_and_the_table_for_programs(port: int) -> None:
    assert '<div class="chart">' in Asked(port, "/scaling").text
    trend = Asked(port, "/trend?figure=mfu")
    assert trend.status == 200
    assert "MFU" in trend.text
    told = json.loads(Asked(port, "/results.json").text)
    assert {row["path"] for row in told["results"]} == {"base", "team/fast", "two", "<i>bold"}


@pytest.mark.parametrize(
    "path",
    ["/run/../outside", "/run/%2e%2e/outside", "/run/link", "/run//etc/passwd", "/static/../page.html", "/run/",
     "/static/page.html", "/nothing", "/run/base/../../outside", "/run/torn"],
)  # fmt: skip
def test_files_outside_the_runs_are_not_served(port: int, path: str) -> None:
    assert Asked(port, path).status == 404


def test_nothing_can_be_changed_and_another_name_for_this_machine_is_refused(port: int) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert Asked(port, "/run/base", method).status in {405, 501}
    assert Asked(port, "/", Host="evil.example").status == 421
    assert Asked(port, "/", Host="localhost:8710").status == 200


def test_pages_allow_no_foreign_content(port: int) -> None:
    for path in ("/", "/scaling", "/compare?run=base&run=team/fast", "/run/base"):
        page = Asked(port, path)
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        own = re.sub(r"<script>.*?</script>", "", page.text, flags=re.DOTALL)
        assert re.findall(r"""(?:src|href)=["']https?:""", own) == []
    assert "unsafe-inline" not in Asked(port, "/").headers["Content-Security-Policy"]


def test_a_token_is_asked_for_and_never_shown(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(runs, TOKEN) as guarded:
        for path in ("/", "/run/base", "/results.json", "/live", "/metrics"):
            asked = Asked(guarded, path)
            assert asked.status == 401
            assert "base" not in re.sub(r"<[^>]*>", "", asked.text)
        assert Asked(guarded, "/", Authorization=f"Bearer {TOKEN}").status == 200
        assert Asked(guarded, "/", Authorization=f"Bearer {TOKEN}x").status == 401
        assert Asked(guarded, "/", Authorization="Bearer é").status == 401
        assert Asked(guarded, f"/?token={TOKEN}").status == 401
        wrong = Asked(guarded, "/sign-in", "POST", "token=wrong")
        assert wrong.status == 403
        right = Asked(guarded, "/sign-in", "POST", f"token={TOKEN}")
        assert right.status == 303
        cookie = right.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert Asked(guarded, "/", Cookie=cookie.partition(";")[0]).status == 200
        assert Asked(guarded, "/sign-in", "POST", "x" * 5000).status == 413
    assert TOKEN not in "".join(capfd.readouterr())


def test_beyond_this_machine_a_token_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--token-file"):
        CliRunner().invoke(app, ["view", str(tmp_path), "--host", "0.0.0.0"], catch_exceptions=False)  # noqa: S104
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "example.org")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_the_tokens_file_is_made_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = read_or_create_token(file)
    assert len(token) >= 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert read_or_create_token(file) == token
    file.chmod(0o644)
    with pytest.raises(RequestError, match="other users can read"):
        read_or_create_token(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(RequestError, match="20 to 256"):
        read_or_create_token(file)


def running(root: Path) -> Path:
    """A run in progress, as its coordinator and rank 0 would have left it by now: GENERATED."""
    run = root / "running"
    run.mkdir(parents=True)
    plan = make_plan(("steps=5",))
    (run / "plan.json").write_text(plan.model_dump_json())
    job = plan.jobs[0]
    events = [{"at": "2026-11-21T10:00:00.000Z", "kind": "state", "job": job.directory, "state": "running"}]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    place = run / job.directory / "localhost_noderank0"
    place.mkdir(parents=True)
    window = {
        "global_steps": 5, "num_trained_samples": 40, "wall_ms": 1000.0, "loss": 1.25, "epoch": 0, "losses": [1.25],
        "learning_rate": None, "step_ms": [200.0], "data_wait_ms": [0.0],
    }  # fmt: skip
    (place / "rank0.out.log").write_text(perflog("TRAIN_START", {}, 0, 0) + perflog("STEP_END", window, 1, 0))
    sample = {"t": 1.0, "wall": time.time(), "host": {"cpu": 0.5}, "devices": [{"index": 0, "power_w": 250.0}]}
    (place / "telemetry.jsonl").write_text(json.dumps({"header": {}}) + "\n" + json.dumps(sample) + "\n")
    return run


def test_a_run_in_progress_shows_its_progress(tmp_path: Path) -> None:
    running(tmp_path / "runs")
    with serving(tmp_path / "runs") as found:
        page = Asked(found, "/live")
        assert "loss <b>1.250</b>" in page.text
        assert "step <b>5" in page.text
        assert "running" in page.text
        assert "the report appears here" in Asked(found, "/run/running").text.lower()
        metrics = Asked(found, "/metrics").text
    assert 'accelmark_device_power_watts{case="toy0-pytorch-X1x1x1",device="0",node=' in metrics
    assert metrics.count("# TYPE accelmark_host_cpu_ratio gauge") == 1


def test_bundles_and_searches_are_listed_shown_and_compared(tmp_path: Path) -> None:
    measured_run(tmp_path / "runs" / "run", rounds=2)
    other = measured_run(tmp_path / "elsewhere", rounds=2, windows=4)
    write_bundle(other, tmp_path / "runs" / f"packed{SUFFIX}")
    write_bundle(tmp_path / "runs" / "run", tmp_path / "runs" / f"copy{SUFFIX}")
    shutil.copytree(RECORDED, tmp_path / "runs" / "search")
    with serving(tmp_path / "runs") as found:
        text = Asked(found, "/").text
        assert f'href="/run/packed{SUFFIX}"' in text
        assert f'href="/run/copy{SUFFIX}"' not in text
        assert "automl-fashion-mnist:pytorch" in text
        assert "Benchmark report" in Asked(found, f"/run/packed{SUFFIX}").text
        assert Asked(found, f"/compare?run=run&run=packed{SUFFIX}").status == 200


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_the_server_after_its_open_responses(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-c", "from accelmark.cli import main; main()", "view", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        port = int(address.rpartition(":")[2].strip("/"))
        assert Asked(port, "/").status == 200
        server.send_signal(number)
        _, errors = server.communicate(timeout=300)
    assert server.returncode == code
    assert errors == ""
