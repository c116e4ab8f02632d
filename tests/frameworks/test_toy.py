"""A framework in one folder, and the launcher of frameworks without one of their own, with real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from accelmark.frameworks.paddle.launch import device_support, launch
from accelmark.results.store.bundle import KEY_VARIABLE, write_manifest
from accelmark.spec.errors import SpecError
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, find, look_again
from accelmark.spec.plugins.framework import HostPlace, LaunchRecord
from tests.frameworks import environments

TOY = Path(__file__).with_name("toy")


run_accelmark = partial(environments.run_accelmark, ACCELMARK_PLUGINS=TOY)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy") / "run"
    done = run_accelmark("train", "points:toy:CPU:1:2", "--vendor", "cpu", "--out", str(path))
    assert (path / "summary.json").is_file(), done.stdout + done.stderr
    return path


def test_two_ranks_train_to_the_target_with_telemetry_and_a_page(run: Path) -> None:
    round_dir = run / "points-toy-CPUx1x2" / "round1"
    result = json.loads((round_dir / "result.json").read_text())
    assert (result["state"], result["converged"]) == ("succeeded", True)
    assert [rank["state"] for rank in result["nodes"][0]["ranks"]] == ["succeeded", "succeeded"]
    assert result["environment"]["started"]["framework"] == "toy"
    assert (round_dir / "localhost_noderank0" / "start_toy_task.log").is_file()
    assert (round_dir / "localhost_noderank0" / "telemetry.jsonl").read_text().count("\n") > 0
    assert "points" in (run / "report.html").read_text()
    figures = result["figures"]
    for name in ("step_p50_ms", "step_p90_ms", "step_p99_ms", "throughput_core"):
        assert figures[name]["value"] is None
        assert figures[name]["reason"] == "the framework times windows of steps, not single steps"
    assert figures["throughput_train"]["value"] > 0


def test_weights_are_evaluated_and_steps_replayed_after_the_round_without_a_finding(run: Path) -> None:
    (case,) = json.loads((run / "summary.json").read_text())["cases"]
    errors = {finding["rule"] for finding in case["findings"] if finding["severity"] == "error"}
    assert errors <= {"too-short"}, "the toy case trains for less than a second"
    assert not {"reevaluation", "reevaluated-metric", "replay"} & {finding["rule"] for finding in case["findings"]}
    assert case["figures"]["reevaluation_time_s"]["mean"] > 0
    done = run_accelmark("verify", str(run), "--replay", "a reader's own text", "--json")
    found = json.loads(done.stdout)
    assert found["intact"], done.stdout
    (replayed,) = found["replayed"]
    assert (replayed["findings"], replayed["num_replayed_steps"] > 8) == ([], True)
    assert not list(run.glob("*/evaluation-round1-*"))


def test_other_weights_than_the_logged_ones_are_a_finding(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    weights = sorted((copy / "points-toy-CPUx1x2" / "round1" / "checkpoints").iterdir())[-1] / "weights.npy"
    np.save(weights, -np.load(weights))
    done = run_accelmark("evaluate", str(copy), "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    (found,) = json.loads(done.stdout)
    assert "was changed after the end of training" in found["findings"][0]["actual"]
    assert json.loads(run_accelmark("verify", str(copy), "--json").stdout)["intact"], "the run is as it ended"


@pytest.mark.heavy
def test_a_repeated_evaluation_leaves_a_signed_run_as_it_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, copy = tmp_path / "key", shutil.copytree(run, tmp_path / "run")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    monkeypatch.setenv(KEY_VARIABLE, str(key))
    write_manifest(copy)
    monkeypatch.delenv(KEY_VARIABLE)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    done = run_accelmark("evaluate", str(copy), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)[0]["findings"] == []
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    (evaluation,) = copy.glob("*/evaluation-round1")
    shutil.rmtree(evaluation)  # as of a run that ended before its evaluation
    done = run_accelmark("evaluate", str(copy))
    assert done.returncode == 0
    assert "its signature was removed, because it is no longer valid" in " ".join(done.stderr.split())
    assert evaluation.is_dir()
    verified = json.loads(run_accelmark("verify", str(copy), "--json").stdout)
    assert (verified["intact"], verified["signature"]["status"]) == (True, "unsigned")


@pytest.mark.heavy
def test_doctor_lists_the_framework() -> None:
    frameworks = json.loads(run_accelmark("doctor", "--json").stdout)["frameworks"]
    assert {"name": "toy", "module": "numpy", "version": np.__version__, "options": []} in frameworks


def test_two_frameworks_of_one_name_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "frameworks" / "pytorch"
    folder.mkdir(parents=True)
    (folder / "framework.yaml").write_text("name: pytorch\n")
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    look_again()
    with pytest.raises(SpecError, match="two frameworks have the name 'pytorch'"):
        find("frameworks", "pytorch")


LAUNCHER = [sys.executable, "-m", "accelmark.frameworks.process_launcher"]
WAIT = "import time\ntime.sleep(600)"


def started(tmp_path: Path, rank: str, *options: str, nproc: int = 2) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "ACCELMARK_NODE_DIR": str(tmp_path)}
    command = [*LAUNCHER, "--nproc", str(nproc), *options, "--", sys.executable, "-c", rank]
    return subprocess.Popen(command, env=environment, cwd=tmp_path)


def record_of(tmp_path: Path) -> LaunchRecord:
    return LaunchRecord.model_validate_json((tmp_path / "ranks.json").read_text(encoding="utf-8"))


def test_every_rank_knows_its_place(tmp_path: Path) -> None:
    write = "import os\nopen(os.environ['RANK'], 'w').write(' '.join(os.environ[name] for name in NAMES))"
    names = "NAMES = ('LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')\n"
    assert started(tmp_path, names + write, "--nnodes", "3", "--node-rank", "1").wait(300) == 0
    assert {name: (tmp_path / name).read_text() for name in ("2", "3")} == {"2": "0 6 2", "3": "1 6 2"}
    assert record_of(tmp_path) == LaunchRecord(exit_codes={2: 0, 3: 0})


def test_ranks_of_one_host_share_a_free_port(tmp_path: Path) -> None:
    write = "import os\nopen(os.environ['RANK'], 'w').write(os.environ['PLACE'])"
    assert started(tmp_path, write, "--free-port", "PLACE").wait(300) == 0
    (place,) = {(tmp_path / name).read_text() for name in "01"}
    assert re.fullmatch(r"127\.0\.0\.1:\d+", place)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    rank = f"import os\nif os.environ['RANK'] == '1':\n    raise SystemExit(7)\n{WAIT}"
    assert started(tmp_path, rank).wait(300) == 1
    assert record_of(tmp_path) == LaunchRecord(exit_codes={0: -signal.SIGTERM, 1: 7})


def running(tmp_path: Path, rank: str) -> subprocess.Popen[bytes]:
    """Return a launcher of two ranks that wait."""
    launcher = started(tmp_path, f"import os, signal\n{rank}\nopen(os.environ['RANK'], 'w')\n{WAIT}")
    deadline = time.monotonic() + 300
    while not all((tmp_path / name).exists() for name in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return launcher


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_to_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    launcher = running(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: os._exit(130))")
    launcher.send_signal(number)
    assert launcher.wait(300) == 130
    assert record_of(tmp_path) == LaunchRecord(exit_codes={0: 130, 1: 130}, signal=number.name)


def test_a_rank_that_the_launcher_kills_has_no_exit_code(tmp_path: Path) -> None:
    launcher = running(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    launcher.terminate()
    time.sleep(1)
    launcher.terminate()
    assert launcher.wait(300) == 130
    assert record_of(tmp_path) == LaunchRecord(exit_codes={0: None, 1: None}, signal="SIGTERM")


def host_place(num_ranks: int, interface: str | None = None) -> HostPlace:
    return HostPlace(
        nnodes=1, nproc=num_ranks, num_ranks=num_ranks, noderank=0, master_address="10.0.0.1", master_port=29500,
        local_address=None, interface=interface, servers=(), python="python3", rank_command=["rank", "job.json"],
    )  # fmt: skip


def test_one_rank_starts_alone_and_several_by_the_process_launcher() -> None:
    alone, several = launch(host_place(1)), launch(host_place(2, "eth0"))
    assert list(alone.command) == ["rank", "job.json"]
    assert alone.environment["WORLD_SIZE"] == "1"
    assert list(several.command)[3:6] == ["accelmark.frameworks.process_launcher", "--nproc", "2"]
    assert list(several.command)[-3:] == ["--", "rank", "job.json"]
    assert list(several.command)[-5:-3] == ["--free-port", "PADDLE_MASTER"]
    assert several.defaults["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_build_without_the_device_is_refused_with_the_package() -> None:
    support = device_support("gpu", "3.3.1")
    assert not support.works
    assert support.reason == "Paddle 3.3.1 is a build without gpu: install paddlepaddle-gpu"
    assert device_support("cpu", "3.3.1").works
