"""The pages about a first chip are followed to the letter, in their order."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs" / page
    for page in (
        "start/first-chip.md",
        *(f"how-to/{name}.md" for name in ("adapt-a-case", "add-a-kernel", "add-an-engine")),
    )
]
_STEP = re.compile(r"^`(\S+)`:\n\n```\w+\n(.*?)```|^    ((?:accelmark|chmod) [^\n]*)$", re.DOTALL | re.MULTILINE)
_THE_REAL_THING = "accelmark train resnet_mini --vendor acme"
"""Takes minutes; what it does is seen in the tests of the case and of an installed vendor."""


class Bench:
    """Where the page is followed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.said: dict[str, str] = {}
        """Command -> what it printed the last time."""
        self.codes: list[tuple[str, int]] = []

    def type(self, line: str) -> None:
        words = shlex.split(line)
        if words[0] == "accelmark":
            words = [sys.executable, "-c", "from accelmark.cli import main; main()", *words[1:]]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "src"), "ACCELMARK_PLUGINS": str(self.root),
            "ACCELMARK_CACHE": str(self.root / "cache"), "PATH": f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
        }  # fmt: skip
        done = subprocess.run(
            words, cwd=self.root, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        self.said[line] = done.stdout + done.stderr
        self.codes.append((line, done.returncode))

    def result(self, out: str) -> dict[str, Any]:
        (path,) = (self.root / out).glob("*/round1/result.json")
        return dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    for file, content, command in _STEP.findall("\n".join(page.read_text(encoding="utf-8") for page in PAGES)):
        if file:
            (bench.root / file).parent.mkdir(parents=True, exist_ok=True)
            (bench.root / file).write_text(content)
        elif command != _THE_REAL_THING:
            bench.type(command)
    return bench


pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]  # fifteen commands, four of which train or infer


def test_every_documented_command_works(bench: Bench) -> None:
    unexpected = [
        (line, bench.said[line])
        for line, code in bench.codes
        # Made-up data gives figures of speed only: such a run ends INVALID, with exit code 1.
        if code != 0 and not (code == 1 and ("--synthetic" in line or line.startswith("accelmark verify")))
    ]
    assert unexpected == []
    assert len(bench.codes) >= 15


def test_the_test_chip_is_detected_and_read(bench: Bench) -> None:
    assert re.search(r"acme\s+cpu\s+AcmeX1\s+acme-smi", bench.said["accelmark vendors"])
    assert "acme 0: AcmeX1" in bench.said["accelmark doctor"]
    logged = (bench.root / "logs" / "acme_monitor.log").read_text()
    assert re.search(r"41C 1(1[89]|2[0-4])W 512MiB 16384MiB 7%", logged), logged
    assert "reads 1 device of this machine: AcmeX1" in bench.said["accelmark check vendor acme"]
    assert bench.result("plain")["figures"]["device_utilisation"]["value"] == pytest.approx(0.07)


def test_the_kernel_is_built_and_trains_as_the_standard_optimizer_does(bench: Bench) -> None:
    plain, adapted = bench.result("plain"), bench.result("adapted")
    assert (plain["state"], adapted["state"]) == ("succeeded", "succeeded")
    assert plain["environment"]["started"]["optimizer_class"] == "SGD"
    assert adapted["environment"]["started"]["optimizer_class"] == "AcmeSGD"
    plain_losses, losses = ([point["value"] for point in result["curves"]["loss"]] for result in (plain, adapted))
    assert len(losses) == 4
    assert losses == pytest.approx(plain_losses, rel=1e-3)
    assert re.search(rf"Final loss\s+{plain_losses[-1]:.4g}", bench.said["accelmark compare plain adapted"])


def test_verify_shows_the_adaptation_cost_and_only_edited_data_against_the_run(bench: Bench) -> None:
    said = bench.said["accelmark verify adapted"]
    for shown in ("log_every_steps", "create_optimizer", "momentum.cpp", "ACME_MODE", "__init__.py"):
        assert shown in said
    errors = {line.split("[")[-1] for line in said.splitlines() if line.strip().startswith("error")}
    assert errors == {"synthetic-data]"}
    assert "no file was changed" in bench.said["accelmark verify adapted.bundle"]


def test_the_documented_engine_infers_and_is_recorded(bench: Bench) -> None:
    result = bench.result("engine")
    assert result["state"] == "succeeded"
    summary = json.loads((bench.root / "engine" / "summary.json").read_text())
    assert summary["cases"][0]["adaptation"]["engines"] == {"engines/acme.py": 18}
