"""A vendor's directory in FlagPerf becomes a vendor's folder; the tree is made up for this test, in its layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from accelmark.cli.checks import vendor_checks
from accelmark.cli.main import app
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, look_again

TREE = {
    "README.md": "# Acme\n",
    "acme_monitor.py": "print('a monitor')\n",
    "docker_image/pytorch_1.13/Dockerfile": "FROM acme:1\n",
    "docker_image/pytorch_1.13/pytorch_1.13_install.sh": "#!/bin/bash\n",
    "bert-pytorch/README.md": "# BERT on Acme\n",
    "bert-pytorch/config/config_X1x1x8.py": "from config_common import *\ntrain_batch_size = 6\nseed = 5\n",
    "bert-pytorch/config/config_common.py": "vendor = 'acme'\nlearning_rate = 1e-4\n",
    "bert-pytorch/config/environment_variables.sh": "export ACME_FAST=1\n",
    "bert-pytorch/config/requirements.txt": "",
    "bert-pytorch/csrc/setup.py": "from setuptools import setup\nsetup()\n",
    "bert-pytorch/extern/converter.py": "def convert_model(model):\n    return model\n\n\ndef fused():\n    pass\n",
    "bert-pytorch/extern/layers.py": "class Layer:\n    pass\n",
    "bert-pytorch/config/config_X4x4x8.py": "train_batch_size = 4\n",
    "bert-pytorch/extern/.gitkeep": "",
    "longformer-pytorch/config/config_X1x1x8.py": "train_batch_size = 6\n",
    "unknown-pytorch/config/config_X1x1x8.py": "train_batch_size = 6\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / "training" / "acme" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "training" / "acme" / "bert-pytorch" / "csrc" / "lib.so").write_bytes(b"\xff\xfe\x00")
    return tmp_path / "training" / "acme"


def test_a_vendors_directory_becomes_a_folder_that_its_check_reads(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "vendors" / "acme"
    done = CliRunner().invoke(app, ["import", "flagperf", str(tree), "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    case = out / "cases" / "bert-pytorch"
    assert {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} == {
        "README.md", "vendor.yaml", "acme_monitor.py", "images/pytorch_1.13/Dockerfile",
        "images/pytorch_1.13/pytorch_1.13_install.sh",
        *(f"cases/bert-pytorch/{name}" for name in ("README.md", "csrc/setup.py")),
        *(f"cases/bert-pytorch/port/{name}.py" for name in ("converter", "layers")),
        *(f"cases/bert-pytorch/config/{name}" for name in ("config.yaml", "config_X1x1x8.yaml", "config_X4x4x8.yaml")),
        *(f"cases/bert-pytorch/config/{name}" for name in ("environment_variables.sh", "requirements.txt")),
    }  # fmt: skip
    assert yaml.safe_load((case / "config" / "config.yaml").read_text()) == {"optimizer": {"lr": 1e-4}}
    assert yaml.safe_load((case / "config" / "config_X1x1x8.yaml").read_text()) == {"batch_size": 6}
    listed = " ".join(done.output.split())
    for said in (
        "seed: seed: is not mutable: it is 1, not 5",
        "converter.py: port it by hand to methods of class Extern in extern/__init__.py: convert_model",
        "layers.py: has no function with the name of a hook",
        "lib.so: is not UTF-8 text",
        "longformer-pytorch: no case carries it: not written yet",
        "unknown-pytorch: FlagPerf has no model of that name",
        "vendor.yaml: add its chips",
    ):
        assert said in listed, said
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    look_again()
    checks = list(vendor_checks("acme", run=False))
    assert [check.what for check in checks if check.state == "missing"] == []
    assert any("cases/bert-pytorch/port is not read" in check.what for check in checks if check.state == "advice")
