"""Scaffolded folders and the files of `accelmark init` pass their own checks; what is wrong with one is named.

A vendor's folder with a stand-in accelerator is checked with planted faults.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.checks import Check, case_checks, vendor_checks
from accelmark.cli.folders import new_folder
from accelmark.cli.kit import FAULTS, check_kit, kit_environment
from accelmark.cli.main import app
from accelmark.cli.runs import read_run_file
from accelmark.plan.request import Detected
from accelmark.spec.cluster import environment_python
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, RequestError
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
from tests.cli.test_main import accelmark

HEALTHY = '"W": 1.0'
COMPUTES = """
import torch, standin_device
images = torch.randn(4, 3, 8, 8)
on_device = images.to("standin")
norms = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3).to("standin")
assert torch.equal(norms[0](images), norms[1](on_device).cpu())
assert torch.equal(norms[0].running_mean, norms[1].running_mean.cpu())
assert torch.equal(images.bfloat16().mean((2, 3)), on_device.bfloat16().mean((2, 3)).cpu())
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    monkeypatch.setenv("ACCELMARK_STATE", str(tmp_path / "state"))
    return tmp_path


def missing(checks: Iterable[Check]) -> str:
    return " ".join(f"{check.what} {check.do}" for check in checks if check.state == "missing")


def test_a_new_vendor_passes_its_checks(bench: Path) -> None:
    folder = new_folder("vendors", "acme1", bench)
    assert (folder / "cases" / "resnet_mini-pytorch" / "extern" / "__init__.py").is_file()
    assert missing(vendor_checks("acme1")) == ""


def test_a_new_case_passes_its_checks_and_trains(bench: Path) -> None:
    new_folder("cases", "line", bench)
    checks = list(case_checks("line", run=True))
    assert missing(checks) == ""
    assert [check.what for check in checks][-4:] == [
        "line trains three steps on synthetic data",
        "line: no audit rule was broken in three steps on synthetic data; "
        "data, target, speed and replay were not tried",
        "line: evaluation returns accuracy",
        "line: inference returns accuracy",
    ]


def test_problems_of_a_vendor_folder_are_reported_with_what_to_do(bench: Path) -> None:
    folder = new_folder("vendors", "acme2", bench)
    adaptation = folder / "cases" / "resnet_mini-pytorch"
    (adaptation / "config.yaml").write_text("log_every_step: 5\noptimizer: {name: adamw}\n")
    (adaptation / "csrc").mkdir()
    (adaptation / "extern" / "__init__.py").write_text("class Extern:\n    def metrics(self): ...\n")
    (folder / "README.md").unlink()
    (folder / "cases" / "llama_mini").mkdir()
    checks = list(vendor_checks("acme2"))
    assert not any("replaces nothing" in check.what for check in checks)
    told = missing(checks)
    assert "log_every_step: unknown setting did you mean 'log_every_steps'?" in told
    assert "optimizer.name: is not mutable" in told
    assert "csrc cannot be built" in told
    assert "'metrics', which is not a hook" in told
    assert "no README.md" in told
    assert "cases/llama_mini: names no framework name the folder <model>-<framework>" in told


def test_an_unknown_vendor_is_reported_with_what_is_wrong_with_the_plugins(
    bench: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench / "vendors" / "acme3").mkdir(parents=True)
    for plugins, expected in (
        (str(bench), f"{bench}/vendors/acme3: is not read: it has no vendor.yaml)"),
        (str(bench / "vendors"), f"{bench}/vendors: has none of cases/"),
        ("/missing", "/missing: does not exist)"),
        ("", "ACCELMARK_PLUGINS is not set)"),
    ):
        monkeypatch.setenv(PLUGINS_VARIABLE, plugins)
        with pytest.raises(RequestError, match=re.escape(expected)):
            list(vendor_checks("acme3"))


def test_engines_servers_and_devices_of_a_vendor_are_checked_without_a_run(bench: Path) -> None:
    folder = new_folder("vendors", "acme11", bench)
    assert missing(vendor_checks("cpu")) == "", "also of cases without training"
    checks = list(vendor_checks("acme11"))
    assert missing(checks) == ""
    assert (checks[-1].what, checks[-1].do) == (
        "not tried: reading its devices, training on them",
        "accelmark check vendor acme11",
    )
    (folder / "cases" / "llama_mini-pytorch").mkdir()
    (folder / "cases" / "resnet_mini-jax").mkdir()
    for file, text in {
        "engines/fast.py": "class Engine:\n    def\n",
        "engines/engines.yaml": "fast: {title: Fast, modul: fast}\n",
        "servers/vllm.yaml": "options: {kv_cache_dtyp: fp8}\n",
        "servers/vlm.yaml": "options: {}\n",
        "cases/llama_mini-pytorch/serve.yaml": "server: vllm\nserver_options: {kv_cache_dtype: fp8}\n",
        "cases/llama_mini-pytorch/serve_fp8.yaml": "server_options: {any: 1}\nload: {concurency: [4]}\n",
        "cases/llama_mini-pytorch/serve_X1x1x1.yaml": "server: vlm\n",
    }.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    checks = list(vendor_checks("acme11"))
    said = missing(checks)
    for expected in (
        "engines/fast.py:2: invalid syntax",
        "engines/engines.yaml: modul: ",
        "servers/vllm.yaml: server_options.kv_cache_dtyp: unknown setting did you mean ",
        "servers/vlm.yaml: unknown server 'vlm' (did you mean 'vllm'?)",
        "serve_fp8.yaml: load.concurency: unknown setting did you mean 'load.concurrency'?",
        "serve_X1x1x1.yaml: unknown server 'vlm'",
        "cases/resnet_mini-jax: vendor acme11 declares no device for framework 'jax' (declared: pytorch) "
        "add frameworks.jax to its vendor.yaml",
    ):
        assert expected in said
    assert "cases/llama_mini-pytorch/serve.yaml: 2 settings, all mutable" in [check.what for check in checks]


@pytest.mark.parametrize(
    ("part", "by", "expected"),
    [
        ("sample\n  metric: accuracy", "sample\n  metric: acuracy", "infer.metric is 'acuracy', which metrics()"),
        ("parameters: {width: 16}", "parameters: {wide: 16}", "KeyError: 'width'"),
    ],
)
def test_inference_of_a_case_is_checked_without_a_run(bench: Path, part: str, by: str, expected: str) -> None:
    file = new_folder("cases", "line12", bench) / "case.yaml"
    text = file.read_text()
    assert part in text
    text = text.replace(part, by)
    file.write_text(text[: text.index("train:")] + text[text.index("infer:") :])
    assert expected in missing(case_checks("line12", run=True))


def test_wrong_settings_and_sources_of_a_case_are_found_without_a_training(bench: Path) -> None:
    new_folder("cases", "line8", bench)
    assert missing(case_checks("line8", run=False)) == ""
    wrong = {
        "line9": ("optimizer: {name: sgd, lr: 0.5}", "optimizer: {name: sgdx, learning_rate: 0.5}"),
        "line11": ("optimizer: {name: sgd, lr: 0.5}", "optimizer: {name: adamw, lr: 0.5, momentum: 0.9}"),
        "line10": ("data: []", "data: [{name: points, sources: [{url: 'no address'}]}, fashion-mnst]"),
    }
    said = {}
    for name, (part, by) in wrong.items():
        file = new_folder("cases", name, bench) / "case.yaml"
        file.write_text(file.read_text().replace(part, by))
        said[name] = missing(case_checks(name, run=False))
    assert "case.yaml: train.settings.optimizer.learning_rate: unknown setting" in said["line9"]
    assert "case.yaml: train.settings.optimizer.name: " in said["line9"]
    expected = "case.yaml: train.settings.optimizer.momentum: has no effect with the optimizer adamw"
    assert expected in said["line11"]
    assert "case.yaml: data.0.sources" in said["line10"]
    assert "did you mean 'fashion" in said["line10"]


@pytest.mark.heavy
def test_another_optimizer_of_a_vendor_is_found_by_its_trial(bench: Path) -> None:
    new_folder("cases", "line6", bench)
    folder = new_folder("vendors", "acme7", bench)
    (folder / "cases" / "resnet_mini-pytorch").rename(folder / "cases" / "line6-pytorch")
    (folder / "cases" / "line6-pytorch" / "extern" / "__init__.py").write_text(
        "import torch\nfrom accelmark.frameworks.pytorch.hooks import Hooks\n\n\nclass Extern(Hooks):\n"
        "    def create_optimizer(self, model):\n        return torch.optim.RMSprop(model.parameters(), lr=0.5)\n"
    )
    assert "[replayed-update]" in missing(vendor_checks("acme7", run=True))


def test_init_writes_the_number_of_ranks_and_the_vendor_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--vendor", "cpu", "--devices", "2", "--into", str(tmp_path)]
    assert CliRunner().invoke(app, ["init", *arguments]).exit_code == 0
    request = read_run_file(tmp_path / "run.yaml")
    assert request.vendor == "cpu"
    assert [case.key for case in request.cases][:2] == ["resnet_mini:pytorch:CPU:1:1", "resnet_mini:pytorch:CPU:1:2"]
    for module in ("folders", "runs"):
        name = f"accelmark.cli.{module}.detect_devices"
        monkeypatch.setattr(name, lambda vendor: Detected("nvidia", "H100", None, 1))
    more = CliRunner().invoke(app, ["init", *arguments[2:], "--force"])
    assert "requests 2 devices a host, this one has 1" in str(more.exception)


@pytest.mark.heavy
def test_frameworks_of_a_new_case_are_compared_on_one_rank_and_two_and_the_record_has_its_scope(bench: Path) -> None:
    new_folder("cases", "dots", bench)
    words = ("--frameworks", "pytorch", "--synthetic", "--steps", "3", "--set", "precision=fp32", "--vendor", "cpu")
    variables = {"ACCELMARK_CACHE": str(bench / "cache"), "OMP_NUM_THREADS": "1"}
    done = accelmark("check", "case", "dots", *words, "--json", **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    (check,) = json.loads(done.stdout)
    assert check["equivalent"]
    (job,) = check["jobs"]
    assert (job["framework"], job["num_ranks"], job["first_difference"]) == ("pytorch", 2, None)
    assert (check["case"], check["precision"], check["num_steps"], check["synthetic"]) == ("dots", "fp32", 3, True)
    assert job["errors"]["weights"] < check["tolerance"]["weights"]


def refused(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, RequestError), result.output
    return str(result.exception)


def test_a_folder_with_a_kit_is_complete_and_names_the_stand_in(bench: Path) -> None:
    result = CliRunner().invoke(app, ["new", "vendor", "kit1", "--kit", "--into", str(bench)])
    assert result.exit_code == EXIT_OK
    assert "accelmark check vendor kit1 --kit" in result.output
    folder = bench / "vendors" / "kit1"
    for file in ("telemetry.py", "kit/setup.py", "kit/standin_device/__init__.py"):
        compile((folder / file).read_text(), file, "exec")
    assert (folder / "kit/standin_device/device.cpp").is_file()
    assert (folder / "cases/resnet_mini-pytorch/extern/__init__.py").is_file(), "the adaptation is there, too"
    checks = list(vendor_checks("kit1"))
    assert [check.what for check in checks if check.state == "missing"] == []
    assert "pytorch device 'standin'" in checks[0].what


def test_a_kit_is_refused_where_it_has_no_meaning(bench: Path) -> None:
    assert "is for the folder of a vendor" in refused("new", "case", "kit2", "--kit", "--into", str(bench))
    for words in (("case", "resnet_mini"), ("vendor", "cpu", "--no-run"), ("vendor", "cpu", "--set", "threads=1")):
        assert "--kit is for a vendor, without other options" in refused("check", *words, "--kit")
    assert "has no kit/: 'accelmark new vendor NAME --kit'" in refused("check", "vendor", "cpu", "--kit")
    assert "--environment is for --kit" in refused("check", "vendor", "cpu", "--environment", str(bench))
    new_folder("vendors", "kit2", bench, kit=True)
    where = str(bench / "nowhere")
    assert f"{where}/bin/python: No such file" in refused("check", "vendor", "kit2", "--kit", "--environment", where)


def test_a_stand_in_that_cannot_be_compiled_is_reported(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = new_folder("vendors", "kit5", bench, kit=True) / "kit/standin_device/device.cpp"
    source.write_text("int broken = ;\n")
    with pytest.raises(RequestError, match=r"the stand-in cannot be built: .*device\.cpp:1:14: error"):
        next(check_kit("kit5"))
    assert not any((bench / "state/kits").iterdir()), "nothing is left of it"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RequestError, match=r"'no-such-compiler' is not installed: install g\+\+"):
        next(check_kit("kit5"))


@pytest.mark.heavy
def test_each_planted_fault_has_a_row_and_a_monitor_in_milliwatts_does_not_survive(bench: Path) -> None:
    folder = new_folder("vendors", "kit6", bench, kit=True)
    result = CliRunner().invoke(app, ["check", "vendor", "kit6", "--kit", "--json"])
    python = environment_python(kit_environment(folder / "kit"))  # as it was built
    subprocess.run([python, "-c", COMPUTES], env=os.environ | {"STANDIN_DRIVER": str(bench)}, check=True)
    rows = {row["fault"]: row for row in json.loads(result.stdout)}
    assert list(rows) == [fault.name for fault in FAULTS]
    assert [(row["fault"], row["reported"]) for row in rows.values() if not row["survived"]] == []
    assert result.exit_code == EXIT_OK
    for fault, said in {
        "no fault": "mean power ",
        "hung device": "timed_out: rank 0 wrote no event for 30 s",
        "lost device": "standin:0 does not answer: the device was lost",
        "too little memory": "rank 0: out of memory on standin:0",
        "power in milliwatts": "mean power ",
        "slow rank": "rank 1 on localhost costs the others",
    }.items():
        assert said in rows[fault]["reported"]

    monitor = folder / "telemetry.py"
    assert HEALTHY in monitor.read_text()
    monitor.write_text(monitor.read_text().replace(HEALTHY, '"W": 1000.0'))
    outcome = next(check_kit("kit6"))
    assert (outcome.fault, outcome.survived) == ("no fault", False)
    assert "device 0: power_w is out of bounds (0 to 5000 W). Check its unit." in outcome.reported


def test_the_table_shows_what_did_not_survive(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_folder("vendors", "kit7", bench, kit=True)
    monkeypatch.setattr("accelmark.cli.kit.kit_environment", lambda *_: Path(sys.prefix))
    monkeypatch.setattr("accelmark.cli.kit.run_accelmark", lambda *_: (1, "", "the host is not ready"))
    result = CliRunner().invoke(app, ["check", "vendor", "kit7", "--kit"], env={"COLUMNS": "160"})
    assert result.exit_code == EXIT_FAILED
    assert "6 of 6: slow rank: not survived" in result.output
    table = [line for line in result.output.splitlines() if line.startswith("slow rank ")]
    assert "the host is not ready (expected: the training succeeds; rank 1 is named)" in " ".join(table[-1].split())
