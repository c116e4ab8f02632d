"""The pages about a first chip and about adding a case are followed to the letter, in their order."""

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
pytestmark = pytest.mark.timeout(900)  # fifteen commands; four train or infer
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
            "PYTHONPATH": str(ROOT / "src"),
            "ACCELMARK_PLUGINS": str(self.root),
            "ACCELMARK_CACHE": str(self.root / "cache"),
            "PATH": f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        done = subprocess.run(
            words, cwd=self.root, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        self.said[line] = done.stdout + done.stderr
        self.codes.append((line, done.returncode))

    def result(self, out: str) -> dict[str, Any]:
        (path,) = (self.root / out).glob("*/round1/result.json")
        return dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def chip(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    for file, content, command in _STEP.findall("\n".join(page.read_text(encoding="utf-8") for page in PAGES)):
        if file:
            (bench.root / file).parent.mkdir(parents=True, exist_ok=True)
            (bench.root / file).write_text(content)
        elif command != _THE_REAL_THING:
            bench.type(command)
    return bench


@pytest.mark.heavy
def test_every_documented_command_works(chip: Bench) -> None:
    unexpected = [
        (line, chip.said[line])
        for line, code in chip.codes
        # Made-up data gives figures of speed only: such a run ends INVALID, with exit code 1.
        if code != 0 and not (code == 1 and ("--synthetic" in line or line.startswith("accelmark verify")))
    ]
    assert unexpected == []
    assert len(chip.codes) >= 15


@pytest.mark.heavy
def test_the_test_chip_is_detected_and_read(chip: Bench) -> None:
    assert re.search(r"acme\s+cpu\s+AcmeX1\s+acme-smi", chip.said["accelmark vendors"])
    assert "acme 0: AcmeX1" in chip.said["accelmark doctor"]
    logged = (chip.root / "logs" / "acme_monitor.log").read_text()
    assert re.search(r"41C 1(1[89]|2[0-4])W 512MiB 16384MiB 7%", logged), logged
    assert "reads 1 device of this machine: AcmeX1" in chip.said["accelmark check vendor acme"]
    assert chip.result("plain")["figures"]["device_utilisation"]["value"] == pytest.approx(0.07)


@pytest.mark.heavy
def test_the_kernel_is_built_and_trains_as_the_standard_optimizer_does(chip: Bench) -> None:
    plain, adapted = chip.result("plain"), chip.result("adapted")
    assert (plain["state"], adapted["state"]) == ("succeeded", "succeeded")
    assert plain["environment"]["started"]["optimizer_class"] == "SGD"
    assert adapted["environment"]["started"]["optimizer_class"] == "AcmeSGD"
    plain_losses, losses = ([point["value"] for point in result["curves"]["loss"]] for result in (plain, adapted))
    assert len(losses) == 4
    assert losses == pytest.approx(plain_losses, rel=1e-3)
    assert re.search(rf"Final loss\s+{plain_losses[-1]:.4g}", chip.said["accelmark compare plain adapted"])


@pytest.mark.heavy
def test_verify_shows_the_adaptation_cost_and_only_edited_data_against_the_run(chip: Bench) -> None:
    said = chip.said["accelmark verify adapted"]
    for shown in ("log_every_steps", "create_optimizer", "momentum.cpp", "ACME_MODE", "__init__.py"):
        assert shown in said
    errors = {line.split("[")[-1] for line in said.splitlines() if line.strip().startswith("error")}
    assert errors == {"synthetic-data]"}
    assert "no file was changed" in chip.said["accelmark verify adapted.bundle"]


@pytest.mark.heavy
def test_the_documented_engine_infers_and_is_recorded(chip: Bench) -> None:
    result = chip.result("engine")
    assert result["state"] == "succeeded"
    summary = json.loads((chip.root / "engine" / "summary.json").read_text())
    assert summary["cases"][0]["adaptation"]["engines"] == {"engines/acme.py": 18}


ADD, INFER, REFERENCE = (
    ROOT / "docs" / page for page in ("how-to/add-a-case.md", "how-to/add-inference.md", "reference/case-files.md")
)
_FILE = re.compile(r"^`(\S+)`:\n\n```\w+\n(.*?)```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file of the page, where the page says, and the data made."""
    root = tmp_path_factory.mktemp("bench")
    files = _FILE.findall(ADD.read_text(encoding="utf-8"))
    assert [name for name, _ in files] == ["cases/spirals/case.yaml", "cases/spirals/pytorch.py", "make_spirals.py"]
    made = accelmark(root, "new", "case", "spirals")
    assert made.returncode == 0, made.stderr
    checked = accelmark(root, "check", "case", "spirals")
    assert "spirals trains three steps on synthetic data" in checked.stdout, checked.stdout + checked.stderr
    for name, content in files:
        (root / name).write_text(content, encoding="utf-8")
    subprocess.run([sys.executable, str(root / "make_spirals.py"), str(root / "data" / "spirals")], check=True)
    return root


def accelmark(bench: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a person would, in ``bench``."""
    variables = {"PYTHONPATH": str(ROOT / "src"), "ACCELMARK_PLUGINS": str(bench), "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        [sys.executable, "-c", "from accelmark.cli import main; main()", *arguments],
        cwd=bench, env=os.environ | variables, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip


def result_of(bench: Path, out: str) -> dict[str, Any]:
    (path,) = (bench / out).glob("*/round1/result.json")
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


@pytest.mark.heavy
def test_the_case_is_checked_and_listed(bench: Path) -> None:
    told = accelmark(bench, "check", "case", "spirals", "--no-run")
    assert told.returncode == 0
    assert "case.yaml describes Three spirals, version 1" in told.stdout
    assert "pytorch.py has class Case" in told.stdout
    rows = {row["name"]: row for row in json.loads(accelmark(bench, "cases", "--json").stdout)}
    assert (rows["spirals"]["target"], rows["spirals"]["frameworks"]) == ("accuracy ≥ 0.95", ["pytorch"])


@pytest.mark.heavy
def test_training_reaches_the_target(bench: Path) -> None:
    ended = accelmark(bench, "train", "spirals", "--data", "data/spirals", "--out", "real")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = result_of(bench, "real")
    assert result["converged"] is True
    assert set(result["marks"]) - {"busy_machine"} == {"made_up_data"}
    assert not [finding for finding in result["findings"] if "flops" in finding["rule"]]


@pytest.mark.heavy
def test_inference_is_added_to_the_case(bench: Path) -> None:
    text = INFER.read_text(encoding="utf-8")
    section = re.search(r"^```yaml\n(infer:\n.*?)```", text, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert accelmark(bench, "train", "spirals", "--data", "data/spirals", "--out", "trained").returncode == 0
    described = bench / "cases" / "spirals" / "case.yaml"
    described.write_text(described.read_text(encoding="utf-8") + section[1], encoding="utf-8")
    ((name, content),) = _FILE.findall(text)
    (bench / name).write_text(content, encoding="utf-8")
    saved = ["trained/spirals-pytorch-CPUx1x1/round1", "cases/spirals/infer"]
    subprocess.run([sys.executable, "-m", "accelmark.infer.weights", *saved], check=True, cwd=bench)
    checked = accelmark(bench, "check", "case", "spirals")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    short = ("--set", "inference_duration_s=0")
    ended = accelmark(bench, "infer", "spirals", "--data", "data/spirals", "--out", "inferred", *short)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verified = accelmark(bench, "verify", "trained")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "[case-changed]" not in re.sub(r"^ *info.*$", "", verified.stdout, flags=re.MULTILINE)


@pytest.mark.heavy
def test_synthetic_data_trains_on_two_ranks(bench: Path) -> None:
    synthetic = ["train", "spirals", "--synthetic", "--open", "--set", "end.max_steps=20", "--out", "fast"]
    accelmark(bench, *synthetic)
    result = result_of(bench, "fast")
    assert result["state"] == "succeeded"
    assert {"open", "synthetic"} <= set(result["marks"])
    ended = accelmark(bench, "train", "spirals:pytorch:CPU:1:2", "--data", "data/spirals", "--out", "two")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert result_of(bench, "two")["converged"] is True


def test_every_documented_setting_and_file_exists() -> None:
    from accelmark.spec.layers import setting_defaults
    from accelmark.spec.settings.training import TrainSettings

    text = REFERENCE.read_text(encoding="utf-8")
    settings = setting_defaults(TrainSettings)
    known = {*settings, *(key.split(".")[0] for key in settings), "model"}
    table = text[text.index("| Setting | Meaning |") : text.index("What is not under `mutable`")]
    named = [name for row in table.splitlines()[2:] if row for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert set(named) <= known
    for link in re.findall(r"\]\((\.\./[^)#]+)", text):
        assert (REFERENCE.parent / link).exists(), link
