"""A scaffolded folder passes its own checks, and what is wrong with one is told in words."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from accelmark.cli.checks import conformance
from accelmark.cli.checks.conformance import allowed_hooks, case_checks, required_methods, vendor_checks
from accelmark.cli.checks.trial import Check, trial
from accelmark.cli.folders import _shown, new_folder
from accelmark.cli.main import app
from accelmark.frameworks.pytorch.case import TrainCase
from accelmark.frameworks.pytorch.hooks import ALLOWED_HOOKS
from accelmark.spec.errors import RequestError, SpecError
from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE, load_case


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PLUGINS_VARIABLE, str(tmp_path))
    return tmp_path


def missing(checks: Iterable[Check]) -> str:
    return " ".join(f"{check.what} {check.do}" for check in checks if check.state == "missing")


def test_hooks_and_required_methods_are_read_without_importing_the_framework() -> None:
    assert set(allowed_hooks("pytorch")) == set(ALLOWED_HOOKS)
    assert set(required_methods("pytorch")) == TrainCase.__abstractmethods__


def test_a_new_vendor_passes_its_checks(bench: Path) -> None:
    folder = new_folder("vendors", "acme1", bench)
    assert (folder / "cases" / "resnet_mini-pytorch" / "extern" / "__init__.py").is_file()
    assert missing(vendor_checks("acme1")) == ""


def test_a_new_case_passes_its_checks_and_trains(bench: Path) -> None:
    new_folder("cases", "line", bench)
    checks = list(case_checks("line", run=True))
    assert missing(checks) == ""
    assert [check.what for check in checks][-3:] == [
        "line trains three steps on synthetic data",
        "line: no audit rule was broken in three steps on synthetic data; "
        "data, target, speed and replay were not tried",
        "line: evaluation returns accuracy",
    ]


def test_checks_of_a_folder_are_given_before_its_training_begins(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_folder("vendors", "acme9", bench)
    new_folder("cases", "line9", bench)
    begun: list[str] = []

    def trial(name: str, *_: object, **__: object) -> Iterator[Check]:
        begun.append(name)
        yield from ()

    monkeypatch.setattr(conformance, "trial", trial)
    for checks, trained in (
        (vendor_checks("acme9", run=True), "resnet_mini"),
        (case_checks("line9", run=True), "line9"),
    ):
        assert next(checks).state == "good"
        assert trained not in begun
        assert all(check.state != "missing" for check in checks)
        assert trained in begun


def test_each_adaptation_of_a_vendor_is_tried_in_its_own_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[object, ...]] = []

    def trial(*arguments: object, **_: object) -> Iterator[Check]:
        begun.append(arguments)
        yield from ()

    monkeypatch.setattr(conformance, "trial", trial)
    list(vendor_checks("cpu", run=True))
    frameworks = ("jax", "mindspore", "paddle", "pytorch", "tensorflow")
    mini = [("llama_mini", "cpu", framework) for framework in frameworks]
    assert [one for one in begun if one[0] == "llama_mini"] == mini
    assert ("graph_mini", "cpu", "pytorch") in begun
    assert ("vit_l_16", "cpu", "pytorch") not in begun, "it is not trained"


def test_a_case_whose_framework_is_not_installed_is_not_tried(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELMARK_CACHE", str(bench / "cache"))  # without environments
    (check,) = trial("llama_mini", "cpu", "paddle", untried="advice")
    assert (check.state, check.what) == ("advice", "llama_mini-paddle: not tried: this machine lacks what it needs")
    assert check.do.startswith("localhost: framework paddle needs paddlepaddle")
    assert f"{sys.executable} -m pip install " in check.do
    assert "warning" not in check.do
    (check,) = trial("line404", "cpu")
    assert (check.state, check.what) == ("missing", "line404 cannot be trained on synthetic data")
    assert "line404" in check.do


def test_a_check_is_one_line_of_whole_words_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    terminal = Console(file=told, force_terminal=True, color_system=None, width=40)
    monkeypatch.setattr("rich.console.Console", lambda **_: terminal)
    checks = [
        Check("good", "a description that is longer than [the] terminal"),
        Check("missing", "no README.md", "add it"),
    ]
    assert list(_shown(iter(checks), "training")) == checks
    rows = f"{'✓ a description that is longer than':<40}    [the] terminal"
    assert f"\n{rows}\n" in plain(told.getvalue())
    assert "✕ no README.md\n    add it\n" in plain(told.getvalue())


def plain(text: str) -> str:
    """Return what a terminal shows of a text, without control sequences and the moving sign that they erase."""
    return "\n" + re.sub(r"[\u2800-\u28ff] \w+ …|\r|\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_problems_of_a_vendor_folder_are_reported_with_what_to_do(bench: Path) -> None:
    folder = new_folder("vendors", "acme2", bench)
    adaptation = folder / "cases" / "resnet_mini-pytorch"
    (adaptation / "config.yaml").write_text("log_every_step: 5\noptimizer: {name: adamw}\n")
    (adaptation / "csrc").mkdir()
    (adaptation / "extern" / "__init__.py").write_text("class Extern:\n    def metrics(self): ...\n")
    (folder / "README.md").unlink()
    checks = list(vendor_checks("acme2"))
    assert not any("replaces nothing" in check.what for check in checks)
    told = missing(checks)
    assert "log_every_step: unknown setting did you mean 'log_every_steps'?" in told
    assert "optimizer.name: is not mutable" in told
    assert "csrc cannot be built" in told
    assert "'metrics', which is not a hook" in told
    assert "no README.md" in told


def test_replaced_parts_of_a_framework_without_hooks_are_refused_before_a_run(bench: Path) -> None:
    folder = new_folder("vendors", "acme10", bench)
    description = (folder / "vendor.yaml").read_text()
    (folder / "vendor.yaml").write_text(
        description.replace("  pytorch:\n", "  jax: {device_type: cpu, collective_backend: gloo}\n  pytorch:\n")
    )
    (folder / "cases" / "resnet_mini-pytorch").rename(folder / "cases" / "resnet_mini-jax")
    what = "resnet_mini-jax/extern: framework jax has no hooks to replace"
    assert f"cases/{what}" in missing(vendor_checks("acme10"))
    arguments = ["train", "resnet_mini:jax", "--vendor", "acme10", "--synthetic", "--dry-run"]
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, SpecError)
    assert what in str(refused.exception)


def test_engines_servers_and_devices_of_a_vendor_are_checked_without_a_run(bench: Path) -> None:
    folder = new_folder("vendors", "acme11", bench)
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


def test_files_that_are_not_read_and_options_that_may_be_typing_mistakes_are_advice(bench: Path) -> None:
    adaptation = new_folder("vendors", "acme5", bench) / "cases" / "resnet_mini-pytorch"
    (adaptation / "config.yml").touch()
    (adaptation / "infer.yaml").write_text("batch_sise: 3\n")
    checks = list(vendor_checks("acme5"))
    advice = " ".join(f"{check.what} {check.do}" for check in checks if check.state == "advice")
    assert "cases/resnet_mini-pytorch/config.yml is not read names that are: config*.yaml" in advice
    assert "infer.yaml: batch_sise is none of the configurations (did you mean 'batch_size'?)" in advice
    assert not any("infer.yaml: 1 setting, all mutable" in check.what for check in checks)
    (adaptation / "infer.yaml").write_text("batch_size: many\n")
    assert "infer.yaml: batch_size: must be a whole number" in missing(vendor_checks("acme5"))


def test_the_folders_of_the_cpu_are_complete_also_those_of_cases_without_training() -> None:
    assert missing(vendor_checks("cpu")) == ""


def test_a_typo_in_vendor_yaml_is_named(bench: Path) -> None:
    file = new_folder("vendors", "acme3", bench) / "vendor.yaml"
    file.write_text(file.read_text().replace("device_type:", "device_typ:"))
    assert "device_typ" in missing(vendor_checks("acme3"))
    file.write_text(file.read_text().replace("device_typ:", "device_type:").replace("pytorch:", "pytorhc:"))
    assert "frameworks.pytorhc: unknown framework did you mean 'pytorch'?" in missing(vendor_checks("acme3"))


def test_a_case_without_required_methods_names_them(bench: Path) -> None:
    folder = new_folder("cases", "line2", bench)
    code = (folder / "pytorch.py").read_text()
    (folder / "pytorch.py").write_text(code.replace("def eval_sums", "def eval_sum"))
    assert "no eval_sums()" in missing(case_checks("line2", run=False))


def test_a_case_that_fails_in_training_reports_why(bench: Path) -> None:
    code = new_folder("cases", "line3", bench) / "pytorch.py"
    good = code.read_text()
    told = good.replace('"label"])\n\n    def eval_sums', '"label"]) * float("nan")\n\n    def eval_sums')
    assert told != good
    code.write_text(told)
    said = missing(case_checks("line3", run=True))
    assert "cannot be trained" in said
    assert "not finite" in said
    assert "cpu-contention" not in said
    assert "report.html" not in said


@pytest.mark.heavy
def test_an_error_in_the_code_of_a_case_is_reported_with_its_line(bench: Path) -> None:
    code = new_folder("cases", "line4", bench) / "pytorch.py"
    wrong = code.read_text().replace('model(batch["point"]), batch', 'model(batch["points"]), batch')
    code.write_text(wrong)
    number = wrong[: wrong.index('"points"')].count("\n") + 1
    assert f"KeyError: 'points' (pytorch.py:{number})" in missing(case_checks("line4", run=True))


@pytest.mark.heavy
def test_a_case_that_fails_in_evaluation_reports_why(bench: Path) -> None:
    code = new_folder("cases", "line3", bench) / "pytorch.py"
    good = code.read_text()
    code.write_text(good.replace('sums["count"]', 'sums["number"]'))
    assert "KeyError: 'number'" in missing(case_checks("line3", run=True))


@pytest.mark.heavy
def test_an_unknown_target_metric_is_named(bench: Path) -> None:
    file = new_folder("cases", "line4", bench) / "case.yaml"
    file.write_text(file.read_text().replace("metric: accuracy", "metric: acuracy"))
    assert "'acuracy', which metrics() does not return: accuracy" in missing(case_checks("line4", run=True))


def test_an_unknown_setting_is_named(bench: Path) -> None:
    file = new_folder("cases", "line5", bench) / "case.yaml"
    file.write_text(file.read_text().replace("precision,", "precison,"))
    with pytest.raises(SpecError, match=r"(?s)line5.*train.mutable.*'precison'.*'precision'"):
        load_case("line5")
    assert "'precison'" in missing(case_checks("line5", run=False))


def test_wrong_settings_are_reported_with_the_other_mistakes_of_the_file(bench: Path) -> None:
    file = new_folder("cases", "line11", bench) / "case.yaml"
    file.write_text(file.read_text().replace("at_least", "at_lest").replace(" batch_size", " batchsize"))
    said = missing(case_checks("line11", run=False))
    assert "train.target.direction: " in said
    assert "case.yaml: train.settings.batchsize: unknown setting" in said


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


def test_a_trial_over_its_time_limit_is_ended_and_reported(bench: Path) -> None:
    new_folder("cases", "line7", bench)
    assert "did not train three steps on cpu within 0.2 s" in missing([*trial("line7", "cpu", timeout_s=0.2)])


def test_a_name_that_is_taken_or_impossible_is_refused(bench: Path) -> None:
    with pytest.raises(RequestError, match="is taken"):
        new_folder("vendors", "cpu", bench)
    with pytest.raises(RequestError, match="cannot be a name"):
        new_folder("cases", "../evil", bench)


def test_an_unreadable_device_is_reported_by_the_vendor_check(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "accelmark.cli.checks.conformance.trial",
        lambda model, vendor, framework, **_: [Check("good", f"{model} in {framework} on {vendor}")],
    )
    new_folder("vendors", "acme4", bench)
    assert missing(vendor_checks("acme4", run=True)) == ""
    assert [check.what for check in vendor_checks("acme4", run=True)][-1] == "resnet_mini in pytorch on acme4"
    file = new_folder("vendors", "acme5", bench) / "vendor.yaml"
    form = "{header: [ID], rows: ['(?P<index>\\d+)'], source: made up for tests}"
    tool = f"  tool: {{command: [acme5-smi], forms: [{form}]}}\n"
    file.write_text(file.read_text().replace("telemetry:\n", "telemetry:\n" + tool))
    assert "acme5-smi is not installed" in missing(vendor_checks("acme5", run=True))
    file = new_folder("vendors", "acme6", bench) / "vendor.yaml"
    file.write_text(file.read_text().replace("always: true", "device_files: [nothing-of-the-kind]"))
    advice = [check.what for check in vendor_checks("acme6", run=True) if check.state == "advice"]
    assert "not tried: no device of this vendor on this machine" in advice


def test_a_vendor_that_nothing_runs_on_says_why_in_its_checks() -> None:
    assert "no PyTorch backend for Zixiao is public" in missing(vendor_checks("zixiao", run=True))


def test_new_files_name_their_schema_for_editors(tmp_path: Path) -> None:
    written = {
        "vendor": new_folder("vendors", "acme", tmp_path) / "vendor.yaml",
        "case": new_folder("cases", "mine", tmp_path) / "case.yaml",
    }
    for kind, file in written.items():
        first = file.read_text().split("\n", 1)[0]
        schema = Path(first.removeprefix("# yaml-language-server: $schema=file://"))
        assert schema.name == f"{kind}.json"
        assert schema.is_file()
