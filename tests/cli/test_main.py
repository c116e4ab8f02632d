"""The command line: help, errors, exit codes, light imports, and the demonstration of the audit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app

ROOT = Path(__file__).parents[2]
CODE = "import sys; from accelmark.cli import main; main()"
LISTING = """
import sys, atexit; from accelmark.cli import main
heavy = {'torch', 'numpy', 'scipy', 'plotly', 'jinja2', 'pydantic', 'ray', 'asyncssh', 'duckdb'}
atexit.register(lambda: print('LOADED', sorted(heavy & set(sys.modules))))
main()
"""


def accelmark(*arguments: str, code: str = CODE, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"COLUMNS": "100", "TERM": "dumb"} | environment
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env=variables)


def test_help_names_every_verb_and_imports_neither_a_framework_nor_a_numerical_library() -> None:
    done = accelmark("--help", code=LISTING)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "LOADED []"
    for verb in ("train", "infer", "automl", "run", "resume", "status", "stop", "report", "cases", "vendors", "doctor"):
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize(
    ("option", "shown"),
    [("--dry-run", ("hosts ", "time ")), ("--commands", ("accelmark.run.agent", "cases/resnet_mini/case.yaml"))],
)
def test_a_dry_run_starts_nothing(option: str, shown: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = accelmark("train", "resnet_mini", "--vendor", "cpu", option, "--out", str(out), code=LISTING)
    assert done.returncode == 0, done.stderr
    assert not {"'torch'", "'numpy'"} & set(re.findall(r"'\w+'", done.stdout.splitlines()[-1]))
    assert all(text in done.stdout for text in shown)
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "resnet_mimi"], "did you mean 'resnet_mini'?"),
        (["check", "vendr", "x"], "Error: Invalid value for 'vendor|case': 'vendr' is not one of 'vendor', 'case'."),
        (["monitr"], "Error: No such command 'monitr'. Did you mean 'monitor', 'init'?"),
        (
            ["train", "resnet_mini", "--vendor", "cpu", "--set", "lr=0.1"],
            "unknown setting (did you mean 'optimizer.lr'?)",
        ),
        (["cases", "--family", "visoin"], "--family: unknown family 'visoin' (did you mean 'vision'?)"),
        (["run", "quikstart"], "neither a file here nor one of AccelMark's suites; did you mean 'quickstart'?"),
        (["train", "resnet_mini:pytorhc"], "did you mean 'pytorch'?"),
        (["train", "resnet_mini", "--vendor", "nvidai"], "did you mean 'nvidia'?"),
        (["train", "resnet_mini", "--set", "optimizer.lr=0.3"], "is not mutable: it is 0.2, not 0.3 (cases/"),
        (["train", "resnet_mini", "--set", "eval_batch_size"], "is not of the form key=value"),
        (["train", "resnet_mini:pytorch:CPU:1:x:0"], "nproc 'x'"),
        (["run", "missing.yaml"], "missing.yaml"),
        (["report", "missing"], "missing"),
    ],
)
def test_a_wrong_request_exits_with_2_and_suggests_the_right_one(arguments: list[str], expected: str) -> None:
    done = accelmark(*arguments, *(["--dry-run"] if arguments[0] in ("train", "run") else []))
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_gets_the_same_error_as_json() -> None:
    done = accelmark("train", "resnet_mimi", "--json")
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert told["error"] == "SpecError"
    assert "resnet_mimi" in told["problems"][0]


def test_flagperfs_files_are_imported_and_the_rest_is_listed(tmp_path: Path) -> None:
    (tmp_path / "cluster_conf.py").write_text('HOSTS = ["10.1.2.3", "10.1.2.4"]\nSSH_PORT = "2022"\n')
    (tmp_path / "test_conf.py").write_text(
        'import os\nFLAGPERF_PATH = os.getcwd()\nCASES = {"resnet50:pytorch": "/data"}\n'
    )
    (tmp_path / "config_A100x1x8.py").write_text("train_batch_size = 4\n")
    files = [str(tmp_path / name) for name in ("cluster_conf.py", "test_conf.py", "config_A100x1x8.py")]
    done = accelmark("import", "flagperf", *files, "--out", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert "ssh_port: 2022" in (tmp_path / "site" / "cluster.yaml").read_text()
    assert "cluster: cluster.yaml" in (tmp_path / "site" / "run.yaml").read_text()
    listed = " ".join(done.stdout.split())
    assert "FLAGPERF_PATH: the value is an expression, and the importer runs no code: os.getcwd()" in listed
    assert "runs read config_A100x1x8.yaml from vendors/<vendor>/cases/<case>-<framework>/" in listed
    again = accelmark("import", "flagperf", *files, "--out", str(tmp_path / "site"))
    assert again.returncode == 2
    assert "use --force to overwrite" in again.stderr


def test_the_wheel_has_every_file_that_the_package_reads(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=400)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    listing = ["git", "ls-files", "src/accelmark"]
    tracked = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300).stdout.split()
    assert {name.removeprefix("src/") for name in tracked} <= packed


def test_a_broken_plug_in_is_named_and_the_other_cases_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "cases" / "bad"
    folder.mkdir(parents=True)
    (folder / "case.yaml").write_text("name: bad\n")
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "worse.yaml").write_text("name: worse\n")
    done = accelmark("cases", ACCELMARK_PLUGINS=str(tmp_path))
    assert done.returncode == 1
    assert "resnet_mini" in done.stdout
    assert f"case bad ({tmp_path}) is left out" in done.stderr
    assert f"a trainer is left out: {tmp_path / 'trainers' / 'worse.yaml'}: " in done.stderr


@pytest.mark.parametrize("verb", ["status", "resume", "verify", "compare"])
def test_a_run_is_found_by_its_name_in_runs_and_a_mistyped_name_lists_those_there(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("20261122T000000Z-toy", "20261123T000000Z-resnet_mini"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    listed = "no such run directory or bundle; in runs/: 20261122T000000Z-toy, 20261123T000000Z-resnet_mini"
    assert listed in str(CliRunner().invoke(app, [verb, "toy"]).exception)
    unreadable = CliRunner().invoke(app, [verb, "20261122T000000Z-toy"])
    assert "no such run" not in str(unreadable.exception), "its plan is unreadable, but it is there"


@pytest.mark.parametrize("verb", ["status", "stop", "resume", "report", "verify", "evaluate", "bundle"])
def test_without_a_name_the_run_that_was_planned_last_is_taken(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(CliRunner().invoke(app, [verb]).exception) == "there is no run in runs/; name its directory"
    for age_s, name in enumerate(("new", "other", "old")):
        plan = tmp_path / "runs" / name / "plan.json"
        plan.parent.mkdir(parents=True)
        plan.write_text("{}")
        os.utime(plan, (1e9 - age_s, 1e9 - age_s))
    assert CliRunner().invoke(app, [verb]).stderr.splitlines()[0] == "latest: runs/new"


@pytest.mark.heavy
def test_the_audit_finds_the_cheat_of_its_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELMARK_PLUGINS", "")
    monkeypatch.setenv("ACCELMARK_STATE", str(tmp_path / "state"))
    done = CliRunner().invoke(app, ["demo", "audit", "--out", str(tmp_path / "demo"), "--json"])
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0, done.output
    assert (found["honest"]["verdict"], found["cheat"]["verdict"]) == ("VALID", "INVALID")
    assert any("replayed" in reason for reason in found["cheat"]["reasons"])
    assert (tmp_path / "demo/audit.html").is_file()
