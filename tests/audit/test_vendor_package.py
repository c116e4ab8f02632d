"""A vendor installed as a package of its own: MADE UP, its device is the CPU; carried out for real, then audited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit.adversary.bench import ROOT, TOOL, VENDOR

pytestmark = pytest.mark.adversary

EXTERN = """
import madeup_kernels
from accelmark.frameworks.pytorch.hooks import Hooks

class Extern(Hooks):
    def backward(self, loss, scaler):
        assert madeup_kernels.FAST
        super().backward(loss, scaler)
"""

SETUP = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "madeup-kernels"
version = "0.1"
[tool.setuptools]
py-modules = ["madeup_kernels"]
"""

CASE_YAML = """
name: tiny
version: 1
title: Tiny
description: Made up for tests.
licence: Apache-2.0
size: mini
train:
  unit: sample
  target: {metric: accuracy, direction: at_least, value: 0.5, why: made up for tests}
  mutable: [log_every_steps]
  settings:
    batch_size: 16
    eval_batch_size: 32
    log_every_steps: 4
    threads: 1
    end: {max_steps: 12}
    optimizer: {lr: 0.05}
    model: {samples: 512, eval_samples: 101, features: 8, width: 16, dropout: 0.0, sleep_ms: 150, fault: "",
            fault_at: 0, fault_rank: 0}
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The vendor's package, installed by pip into a directory of its own, and a case beside it."""
    root = tmp_path_factory.mktemp("bench")
    package = root / "source" / "madeup"
    adaptation = package / "cases" / "tiny-pytorch"
    (adaptation / "extern").mkdir(parents=True)
    (adaptation / "csrc").mkdir()
    (package / "__init__.py").write_text('"""A made-up vendor."""\n')
    (root / "acme-smi").write_text(TOOL)
    (root / "acme-smi").chmod(0o755)
    vendor = VENDOR.replace("name: acme", "name: madeup").replace("{{directory}}", str(root))
    (package / "vendor.yaml").write_text(vendor)
    (adaptation / "config.yaml").write_text("log_every_steps: 6\n")
    (adaptation / "environment_variables.sh").write_text("MADEUP_MODE=fast\nRANK=7\nMADEUP_TOKEN=hidden\n")
    (adaptation / "extern" / "__init__.py").write_text(EXTERN)
    (adaptation / "csrc" / "pyproject.toml").write_text(SETUP)
    (adaptation / "csrc" / "madeup_kernels.py").write_text("import os\n\nFAST = os.environ['MADEUP_MODE'] == 'fast'\n")
    (root / "source" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "madeup-vendor"\nversion = "1.0"\n'
        '[project.entry-points."accelmark.vendors"]\nmadeup = "madeup"\n'
        '[tool.setuptools]\npackages = ["madeup"]\n'
        '[tool.setuptools.package-data]\nmadeup = ["**/*"]\n'
    )
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(root / "site"), str(root / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Packages from PYTHONPATH make a run OPEN.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "venv")], check=True)
    (own,) = root.glob("venv/lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (own / "shared.pth").write_text("\n".join([str(ROOT / "src"), str(root / "site"), *shared]) + "\n")
    case = root / "plugins" / "cases" / "tiny"
    case.mkdir(parents=True)
    (case / "case.yaml").write_text(CASE_YAML)
    (case / "pytorch.py").write_text((ROOT / "tests/train/tiny/pytorch.py").read_text())
    return root


def accelmark(bench: Path, *arguments: str, expect: int = 0) -> str:
    environment = os.environ | {"ACCELMARK_PLUGINS": str(bench / "plugins"), "OMP_WAIT_POLICY": "PASSIVE"}
    program = [str(bench / "venv" / "bin" / "python"), "-c", "from accelmark.cli import main; main()", *arguments]
    done = subprocess.run(program, cwd=bench, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.heavy
def test_the_adaptation_of_an_installed_vendor_is_applied_and_counted(bench: Path) -> None:
    accelmark(bench, "train", "tiny", "--vendor", "madeup", "--out", "good")
    (case,) = json.loads((bench / "good" / "summary.json").read_text())["cases"]
    assert (case["verdict"], case["state"]) == ("VALID", "succeeded")
    cost = case["adaptation"]
    assert [key["key"] for key in cost["keys"]] == ["log_every_steps"]
    assert [hook["name"] for hook in cost["hooks"]] == ["backward"]
    assert cost["extern"] == {"__init__.py": 6}
    assert cost["kernels"] == {"madeup_kernels.py": 2}
    assert cost["environment"] == ["MADEUP_MODE", "MADEUP_TOKEN"]
    (record,) = (bench / "good").glob("*/round1/*/adaptation.json")
    told = json.loads(record.read_text())
    assert told["installed"] == ["madeup-kernels==0.1"]
    assert told["environment"] == {"MADEUP_MODE": "fast", "MADEUP_TOKEN": "(left out)"}
    assert told["ignored"] == ["RANK"]
    assert "VALID" in accelmark(bench, "verify", "good")


def test_a_failing_script_fails_the_round_with_its_last_lines(bench: Path) -> None:
    script = bench / "site" / "madeup" / "cases" / "tiny-pytorch" / "environment_variables.sh"
    kept = script.read_text()
    script.write_text("echo no driver of ours here >&2\nreturn 3\n")
    try:
        said = accelmark(bench, "train", "tiny", "--vendor", "madeup", "--out", "broken", expect=1)
    finally:
        script.write_text(kept)
    assert "no driver of ours here" in said
