"""The command line as a person meets it: help, errors, exit codes, and nothing heavy imported."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import zipfile
from pathlib import Path
from typing import get_args

import pytest
import yaml

from accelmark.cli.main import keep_units_with_numbers
from accelmark.spec.plugins.case import Family
from accelmark.spec.plugins.catalog import load_case
from tests.made_run import make_run

ROOT = Path(__file__).parents[2]
CODE = "import sys; from accelmark.cli import main; main()"


def accelmark(*arguments: str, code: str = CODE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env=os.environ | {"COLUMNS": "100", "TERM": "dumb"} | environment,
    )


def test_help_names_every_verb_and_imports_neither_a_framework_nor_a_numerical_library() -> None:
    code = (
        "import sys, atexit; from accelmark.cli import main\n"
        "heavy = {'torch', 'numpy', 'scipy', 'plotly', 'jinja2', 'pydantic', 'ray', 'asyncssh', 'duckdb'}\n"
        "atexit.register(lambda: print('LOADED', sorted(heavy & set(sys.modules))))\n"
        "main()"
    )
    done = accelmark("--help", code=code)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "LOADED []"
    for verb in ("train", "infer", "automl", "run", "resume", "status", "stop", "report", "cases", "vendors", "doctor"):
        assert f"\n  {verb} " in done.stdout


def on_a_terminal(columns: int, *arguments: str) -> str:
    """What a command writes to stderr, a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", CODE, *arguments], stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # the end of the process
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    assert process.wait(60) != 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [40, 80])
def test_an_error_on_a_terminal_breaks_no_word_and_stays_one_line(columns: int, tmp_path: Path) -> None:
    long = f"{tmp_path}/{'x' * 90}"
    for arguments in (
        ("train", "resnet50", "--vendor", "cpu"),
        ("status", long),
        ("check", "vendr", "acme"),
        ("monitor", "start", "--interval", "0"),
        ("train", "resnet_mini:pytorch:CPU:1:1", "--vendor", "cpu", "--set", "lr=1", "--set", "seed=x"),
    ):
        piped, shown = accelmark(*arguments).stderr, on_a_terminal(columns, *arguments)
        assert [line.split() for line in shown.splitlines()] == [line.split() for line in piped.splitlines()]
        for line in shown.splitlines():
            rows = [line[at : at + columns] for at in range(0, len(line), columns)]
            cut = [row for row, after in itertools.pairwise(rows) if row[-1] != " " and after[0] != " "]
            assert all(len(row.rpartition(" ")[2]) == columns or "/" in row.rpartition(" ")[2] for row in cut), line


def test_a_dry_run_shows_jobs_commands_and_where_settings_come_from_and_starts_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, atexit; from accelmark.cli import main\n"
        "atexit.register(lambda: print('LOADED', 'torch' in sys.modules or 'numpy' in sys.modules))\n"
        "main()"
    )
    out = tmp_path / "run"
    done = accelmark("train", "resnet_mini", "--vendor", "cpu", "--dry-run", "--out", str(out), code=code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED False"
    assert "accelmark.run.agent" in done.stdout
    assert "cases/resnet_mini/case.yaml" in done.stdout
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
        (["train", "resnet_mini", "--set", "batchsize=3"], "did you mean 'batch_size'?"),
        (["train", "resnet_mini", "--set", "optimizer.lr=0.3"], "is not mutable (cases/resnet_mini/case.yaml"),
        (["train", "resnet_mini", "--set", "eval_batch_size"], "is not of the form key=value"),
        (["train", "resnet_mini:pytorch:CPU:1:x:0"], "nproc 'x'"),
        (["run", "missing.yaml"], "missing.yaml"),
        (["status", "missing"], "missing"),
        (["report", "missing"], "missing"),
    ],
)
def test_a_wrong_request_exits_with_2_and_suggests_the_right_one(arguments: list[str], expected: str) -> None:
    done = accelmark(*arguments, *(["--dry-run"] if arguments[0] in ("train", "run") else []))
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert arguments[0] in ("status", "report") or done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_all_mistakes_of_a_run_file_and_of_a_command_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "naem: x\nopen: maybe\ncases:\n  - key: resnet_mni\n  - key: llama_mini:torch:CPU:1:1:zero\n"
        "  - {key: llama_mini:torch, settings: {lr: 1, batch_size: big}}\n  - {task: fly, key: x}\n"
    )
    done = accelmark("run", str(tmp_path / "bad.yaml"), "--vendor", "cpu", "--dry-run")
    assert done.returncode == 2, done.stdout + done.stderr
    for said in (
        "error: 8 problems", "did you mean 'name'?", "open: must be true or false", "did you mean 'resnet_mini'?",
        "repeat 'zero'", "did you mean 'pytorch'?", "did you mean 'optimizer.lr'?",
        "batch_size: must be a whole number",
        "cases.3.task: input should be",
    ):  # fmt: skip
        assert said in done.stderr, done.stderr
    key = "resnet_mini:torch:CPU:3:1"
    done = accelmark("train", key, "--vendor", "cpu", "--set", "lr=1", "--set", "seed=x", "--dry-run")
    assert "error: 4 problems" in done.stderr, done.stderr
    for said in ("requests 3 hosts", "no framework 'torch'", "lr: unknown setting", "seed: must be a whole number"):
        assert said in done.stderr
    elsewhere = ("--vendor", "nope", "--data", str(tmp_path / "none"))
    done = accelmark("train", "llama_mini:pytorch:H100:4:8", *elsewhere, "--set", "lr=1", "--dry-run")
    for said in ("error: 3 problems", "vendor: unknown vendor 'nope'", "lr: unknown setting", "none is missing"):
        assert said in done.stderr, done.stderr
    wrong = ("--compiler", "opnvino", "--precision", "fp4", "--data", str(tmp_path / "none"), "--vendor", "cpu")
    done = accelmark("infer", "resnet_mini", *wrong, "--dry-run")
    for said in ("error: 3 problems", "did you mean 'openvino'?", "precision: input should be", "none is missing"):
        assert said in done.stderr, done.stderr
    (tmp_path / "bad.yaml").write_text("vendor: nope\ncases:\n  - {key: resnet_mni, tsk: train}\n")
    done = accelmark("run", str(tmp_path / "bad.yaml"), "--dry-run")
    for said in ("error: 3 problems", "vendor: unknown vendor 'nope'", "did you mean 'resnet_mini'?", "'task'?"):
        assert said in done.stderr, done.stderr
    (tmp_path / "hosts.yaml").write_text("launcher: ssh\nvendor: nvdia\nhots: []\n")
    (tmp_path / "bad.yaml").write_text("cluster: hosts.yaml\ncases: [{key: resnet_mni}]\n")
    done = accelmark("run", str(tmp_path / "bad.yaml"), "--dry-run")
    for said in ("error: 3 problems", "did you mean 'hosts'?", "did you mean 'nvidia'?", "did you mean 'resnet_mini'?"):
        assert said in done.stderr, done.stderr


def test_a_program_gets_the_same_error_as_json() -> None:
    done = accelmark("train", "resnet_mimi", "--json")
    assert done.returncode == 2
    told = json.loads(done.stdout)
    assert told["error"] == "SpecError"
    assert "resnet_mimi" in told["problems"][0]


def test_cases_are_listed_as_json() -> None:
    done = accelmark("cases", "--json")
    names = {case["name"] for case in json.loads(done.stdout)}
    assert {"resnet_mini", "llama_mini", "minilm_finetune", "resnet50", "bert", "llama2_7b"} <= names


def test_completion_can_be_had_for_a_shell() -> None:
    done = accelmark("--show-completion", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    shown = accelmark("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.returncode == 0 or shown.returncode == 0
    assert "complete" in done.stdout + shown.stdout


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
    assert "FLAGPERF_PATH: is computed, and nothing is executed: os.getcwd()" in listed
    assert "runs read config_A100x1x8.yaml from vendors/<vendor>/cases/<case>-<framework>/" in listed
    again = accelmark("import", "flagperf", *files, "--out", str(tmp_path / "site"))
    assert again.returncode == 2
    assert "use --force to overwrite" in again.stderr


def test_an_imported_flagperf_run_uses_several_hosts(tmp_path: Path) -> None:
    (tmp_path / "cluster_conf.py").write_text('HOSTS = ["10.1.2.3", "10.1.2.4"]\nHOSTS_PORTS = ["2222"]\n')
    (tmp_path / "test_conf.py").write_text(
        'VENDOR = "nvidia"\nACCE_CONTAINER_OPT = " --gpus all"\nSHM_SIZE = None\nFLAGPERF_LOG_LEVEL = "warn"\n'
        'CASES = {"resnet_mini:pytorch:A100:2:8:1": ""}\n'
    )
    files = [str(tmp_path / name) for name in ("cluster_conf.py", "test_conf.py")]
    done = accelmark("import", "flagperf", *files, "--out", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert "FLAGPERF_LOG_LEVEL: input should be" in " ".join(done.stdout.split())
    shown = accelmark("run", str(tmp_path / "site" / "run.yaml"), "--dry-run", "--set", "loader.synthetic=true")
    assert shown.returncode == 0, shown.stderr
    agents = [line for line in shown.stdout.splitlines() if "docker run" in line and "accelmark.run.agent" in line]
    assert len(agents) == 2
    assert all(line.count("--gpus") == 1 for line in agents)


def test_an_imported_inference_run_of_flagperf_finds_its_data(tmp_path: Path) -> None:
    images = tmp_path / "imagenet" / "val" / "n01440764"
    images.mkdir(parents=True)
    (images / "ILSVRC2012_val_00000293.JPEG").touch()
    (tmp_path / "host.yaml").write_text(
        f'VENDOR: cpu\nHOSTS: ["127.0.0.1"]\nCASES: {{"resnet50:pytorch": {images.parent}}}\n'
    )
    done = accelmark("import", "flagperf", str(tmp_path / "host.yaml"), "--out", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    shown = accelmark("run", str(tmp_path / "site" / "run.yaml"), "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert str(tmp_path / "imagenet") in shown.stdout


def test_importing_aiperfs_file_names_the_command_that_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text("trialConcurrency: 2\n")
    done = accelmark("import", "aiperf", str(tmp_path / "config.yml"))
    assert done.returncode == 2
    assert "accelmark automl run -c config.yml" in done.stderr


def test_files_that_give_nothing_to_import_write_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_conf.py").write_text('FLAGPERF_LOG_LEVEL = "info"\nCASES = {}\n')
    done = accelmark("import", "flagperf", str(tmp_path / "test_conf.py"), "--out", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert "wrote nothing" in done.stdout
    assert "CASES: names no case" in " ".join(done.stdout.split()), "which may be wrapped"
    assert not (tmp_path / "site").exists()


def test_a_shipped_suite_is_found_by_its_name(tmp_path: Path) -> None:
    done = accelmark("run", "quickstart", "--vendor", "cpu", "--dry-run", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("quickstart: 2 rounds on cpu")


@pytest.mark.parametrize("name", [*get_args(Family), "standard"])
def test_a_suite_has_standard_training_cases_of_its_family(name: str) -> None:
    suite = yaml.safe_load((ROOT / "src/accelmark/suites" / f"{name}.yaml").read_text(encoding="utf-8"))
    chosen = [load_case(case["key"]) for case in suite["cases"]]
    families = set(get_args(Family)) if name == "standard" else {name}
    assert {case.family for case in chosen} == families
    assert all(case.size == "standard" and case.train is not None for case in chosen)


def test_the_quick_suite_has_a_small_case_of_each_family() -> None:
    suite = yaml.safe_load((ROOT / "src/accelmark/suites/quick.yaml").read_text(encoding="utf-8"))
    chosen = [load_case(case["key"]) for case in suite["cases"]]
    assert sorted(str(case.family) for case in chosen) == sorted(get_args(Family))
    assert all(case.size == "mini" and case.train is not None for case in chosen)


def test_cases_of_a_family_are_listed() -> None:
    listed = json.loads(accelmark("cases", "--family", "speech", "--json").stdout)
    assert {"wav2vec2", "whisper_small"} <= {row["name"] for row in listed}
    assert {row["family"] for row in listed} == {"speech"}


def test_the_wheel_has_every_file_that_the_package_reads(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=400,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "src/accelmark"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
    ).stdout.split()
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


def test_one_case_is_shown_with_its_settings() -> None:
    done = accelmark("cases", "resnet_mini")
    assert done.returncode == 0
    assert "optimizer.lr                           0.2  (immutable)" in done.stdout
    assert "infer: top1, tolerance 0.005" in done.stdout
    narrow = accelmark("cases", "llama_mini", COLUMNS="80").stdout.splitlines()
    assert max(len(line) for line in narrow) <= 80
    assert any(line.startswith("serve: agreement >= 0.9") for line in narrow)


def test_cases_for_two_cores_are_listed_before_those_for_accelerators() -> None:
    lines = accelmark("cases", COLUMNS="80").stdout.splitlines()
    first = [next(at for at, line in enumerate(lines) if line.startswith(start)) for start in _LISTED]
    assert first == sorted(first)
    assert lines[first[2]].split()[1:3] == ["train,", "infer,"]


_LISTED = ("on two CPU cores:", "detection_mini", "llama_mini", "resnet_mini", "on accelerators:", "bert ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("accelmark train resnet", {"resnet50", "resnet_mini"}),
        ("accelmark infer resnet_mini --compiler open", {"openvino"}),
        ("accelmark run quickstart --vendor nv", {"nvidia"}),
        ("accelmark explain optimizer.l", {"optimizer.lr"}),
        ("accelmark report RUNS/2026", {"RUNS/20261122T000000Z-a"}),
    ],
)
def test_the_shell_completes_names_and_run_directories(words: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "20261122T000000Z-a").mkdir()
    (tmp_path / "20261122T000000Z-a" / "plan.json").write_text("{}")
    typed = words.replace("RUNS", str(tmp_path))
    shell = {"_ACCELMARK_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
    done = accelmark(code="import sys; sys.argv[0] = 'accelmark'; from accelmark.cli import main; main()", **shell)
    assert set(done.stdout.split()) == {name.replace("RUNS", str(tmp_path)) for name in expected}


@pytest.mark.parametrize("verb", ["status", "stop", "resume", "report", "verify", "evaluate", "bundle", "compare"])
def test_a_run_is_found_by_its_name_in_runs_and_a_mistyped_name_lists_those_there(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("20261122T000000Z-toy", "20261123T000000Z-resnet_mini"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    done = accelmark(verb, "toy")
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "error: toy: no such run directory or bundle; in runs/: 20261122T000000Z-toy, 20261123T000000Z-resnet_mini",
    )
    assert "no such run" not in accelmark(verb, "20261122T000000Z-toy").stderr, (
        "its plan is unreadable, but it is there"
    )


@pytest.mark.parametrize("verb", ["status", "stop", "resume", "report", "verify", "evaluate", "bundle"])
def test_a_search_is_referred_to_its_own_verbs(verb: str, tmp_path: Path) -> None:
    (tmp_path / "automl.json").write_text("{}")
    done = accelmark(verb, str(tmp_path))
    assert done.returncode == 2
    assert "is a search; use 'accelmark automl'" in done.stderr


def test_a_bundle_replaces_no_file(tmp_path: Path) -> None:
    run, notes = make_run(tmp_path / "run"), tmp_path / "notes.txt"
    assert accelmark("report", str(run)).returncode == 0
    notes.write_text("mine")
    refused = accelmark("bundle", str(run), "-o", str(notes))
    assert (refused.returncode, notes.read_text()) == (2, "mine")
    assert f"{notes}: exists already; remove it, or choose another name with --output" in refused.stderr
    assert accelmark("bundle", str(run), "-o", str(tmp_path / "run.tar")).returncode == 0


@pytest.mark.parametrize("verb", ["status", "report"])
def test_a_directory_of_runs_is_no_run_and_names_some(verb: str, tmp_path: Path) -> None:
    (tmp_path / "scaling").mkdir()
    (tmp_path / "scaling" / "plan.json").write_text("{}")
    done = accelmark(verb, str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.endswith(f"is a directory of runs, not a run; name one of them: {tmp_path}/scaling\n")


@pytest.mark.parametrize("verb", ["status", "stop", "resume", "report", "verify", "evaluate", "bundle"])
def test_without_a_name_the_run_that_was_planned_last_is_taken(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = accelmark(verb)
    assert (done.returncode, done.stderr.strip()) == (2, "error: there is no run in runs/; name its directory")
    for age_s, name in enumerate(("new", "other", "old")):
        plan = tmp_path / "runs" / name / "plan.json"
        plan.parent.mkdir(parents=True)
        plan.write_text("{}")
        os.utime(plan, (1e9 - age_s, 1e9 - age_s))
    assert accelmark(verb).stderr.splitlines()[0] == "latest: runs/new"


def test_a_terminal_breaks_no_line_between_a_number_and_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich import _wrap
    from rich.console import Console

    monkeypatch.setattr(_wrap, "re_word", _wrap.re_word)
    keep_units_with_numbers()
    console = Console(width=26)
    with console.capture() as capture:
        console.print("a throughput of about 2,583\u202fimages/s, and more of it")
    assert [line.strip() for line in capture.get().splitlines()] == [
        "a throughput of about",
        "2,583\u202fimages/s, and more",
        "of it",
    ]


def test_explanations_fit_the_terminal() -> None:
    for name in ([], ["mfu"]):
        done = accelmark("explain", *name, COLUMNS="60")
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 60
