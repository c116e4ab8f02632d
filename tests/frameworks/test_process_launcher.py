"""The launcher of frameworks without one of their own, with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelmark.spec.plugins.framework import LaunchRecord

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
    places = {(tmp_path / name).read_text() for name in "01"}
    (place,) = places
    assert re.fullmatch(r"127\.0\.0\.1:\d+", place)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    rank = f"import os\nif os.environ['RANK'] == '1':\n    raise SystemExit(7)\n{WAIT}"
    assert started(tmp_path, rank).wait(300) == 1
    assert record_of(tmp_path) == LaunchRecord(exit_codes={0: -signal.SIGTERM, 1: 7})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_to_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    handler = "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(130))\n"
    launcher = started(tmp_path, f"{handler}open(os.environ['RANK'], 'w')\n{WAIT}")
    deadline = time.monotonic() + 300
    while not all((tmp_path / name).exists() for name in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(number)
    assert launcher.wait(300) == 130
    assert record_of(tmp_path) == LaunchRecord(exit_codes={0: 130, 1: 130}, signal=number.name)
