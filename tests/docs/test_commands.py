"""Every command in README.md and the guides is valid, and is run or planned here or by the tests of its verb.

The pages about a first chip and about a case are followed as a whole by tests of their own. The site and generated
pages are current; Chinese pages have the same code; tables of migration name what exists.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

import accelmark
from accelmark.cli.main import app
from accelmark.compat.flagperf.parse import TABLES, coverage
from accelmark.datasets.catalogue import known_datasets
from accelmark.explain.entries import entries
from accelmark.results.figures import FigureName as F
from accelmark.results.sources import open_sources
from accelmark.spec.key import CaseKey
from accelmark.spec.log.events import Evaluation, Event, Finished, StepWindow
from accelmark.spec.plugins.catalog import folders, load_case
from tests.made_run import measured_run

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src/accelmark/cases").glob("*/README.md"),
        *(ROOT / "src/accelmark/vendors").glob("*/README.md"),
    ]
)
FOLLOWED: Final = (
    "docs/start/first-chip.md",
    *(f"docs/how-to/add-{name}.md" for name in ("an-engine", "a-chip", "a-case", "a-kernel", "inference")),
    *(f"docs/how-to/{name}-a-case.md" for name in ("adapt", "finish")),
)
"""Pages whose files and commands tests/docs/test_pages.py writes and types."""
ELSEWHERE: Final = {
    "view", "probe", "cluster", "reproduce", "ledger", "data", "env", "automl", "demo", "doctor", "monitor",
    "preflight", "status", "stop", "resume", "evaluate", "new", "check",
}  # fmt: skip
"""Verbs that serve, install, train or follow a live run, which other tests run."""
HARDWARE: Final = re.compile(r"(train|infer) [^ ]+:H100:|--compiler (tensorrt|torchtrt)|--set max_batches")
"""Commands that need an accelerator, another project's trainer, or minutes of computation, also to be planned."""
_COMMAND: Final = re.compile(r"^(?: {4,}|\$ )?(accelmark(?: [^\n]*)?)$", re.MULTILINE)


class Documented(NamedTuple):
    """One command of a page, without its comment."""

    page: str
    words: tuple[str, ...]


def documented() -> Iterator[Documented]:
    """Yield the commands of all pages; ``a X | b`` are two."""
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for text in _COMMAND.findall(page.read_text(encoding="utf-8")):
            first, *more = text.split(" #")[0].split(" > ")[0].split(" | ")
            for part in [first, *(f"accelmark {part}" for part in more)]:
                yield Documented(name, tuple(shlex.split(part)[1:]))


COMMANDS: Final = list(dict.fromkeys(documented()))
_ROOT_COMMAND: Final[Any] = typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Parse a command with the real command line, without running it; raises click's error where it is invalid."""
    command = _ROOT_COMMAND
    context: Any = command.make_context("accelmark", [], resilient_parsing=True)
    rest = words
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(
            name, list(rest), parent=context, **({"resilient_parsing": True} if hasattr(command, "commands") else {})
        )


def test_every_documented_command_is_accepted_by_the_command_line() -> None:
    wrong: dict[str, str] = {}
    for words in dict.fromkeys(command.words for command in COMMANDS):
        try:
            parse([word for word in words if word not in ("…", "...")])
        except Exception as error:  # noqa: BLE001  click and typer raise their own usage errors
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            wrong[shlex.join(words)] = message
    assert wrong == {}
    assert len(COMMANDS) > 150


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two finished runs, a bundle, and FlagPerf's files, in which commands are typed."""
    measured_run(tmp_path / "runs" / "base", rounds=2, windows=4)
    measured_run(tmp_path / "runs" / "other", rounds=2, windows=4)
    bundled = CliRunner().invoke(app, ["bundle", str(tmp_path / "runs" / "base"), "-o", str(tmp_path / "claim.tar")])
    assert bundled.exit_code == 0, bundled.output
    for name in ("engines.yaml", "suite.yaml"):  # as the guides show them
        (tmp_path / name).write_text(f"name: {name}\ncases: [resnet_mini]\n")
    (tmp_path / "cluster_conf.py").write_text('HOSTS = ["10.1.2.3"]\nSSH_PORT = "22"\n')
    (tmp_path / "test_conf.py").write_text('VENDOR = "nvidia"\nCASES = {"bert:pytorch:A100:1:8:1": "/data"}\n')
    (tmp_path / "config_A100x1x8.py").write_text("train_batch_size = 4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ready(words: tuple[str, ...]) -> list[str]:
    """Return a command with runs for its placeholders; what would start work is only planned."""
    found = {"RUN": "runs/base", "BASE": "runs/base", "A": "runs/base", "OTHER": "runs/other", "B": "runs/other"}
    found |= {"DIR": "runs", "runs/RUN": "runs/other", "latest": "base", "run.yaml": "suite.yaml"}
    found |= {"site/run.yaml": "suite.yaml", "march/run.yaml": "suite.yaml"}
    found |= {"run.tar": "claim.tar"} if words[0] != "bundle" else {}
    found |= {"/data/imagenet": "."} if words[0] == "verify" else {}
    typed = [found.get(word, word) for word in words if word not in ("…", "...")]
    if typed[0] in ("train", "infer", "serve", "run"):
        if "--data" in typed:
            at = typed.index("--data")
            typed[at : at + 2] = ["--synthetic"]
        typed += [] if "--vendor" in typed else ["--vendor", "cpu"]
        typed += [] if "--dry-run" in typed else ["--dry-run"]
        # A key of a tutorial may name a chip that this machine does not have, which only an open run accepts.
        typed += ["--open"] if typed[0] == "train" and "--open" not in typed else []
    return typed


PLANNED: Final = ("train", "infer", "serve", "run")
"""Verbs that start work, which is only planned: a second for each command."""
RUN_HERE: Final = {
    shlex.join(command.words): command
    for command in COMMANDS
    if command.page.startswith(("README.md", "docs/start/", "docs/how-to/", "docs/why/"))
    and command.page not in FOLLOWED
    and not (command.words and command.words[0] in ELSEWHERE)
    and not HARDWARE.search(shlex.join(command.words))
    and not {"--tensorboard", "--mlflow", "--prometheus", "--replay", "--key", "--allowed-signers"} & set(command.words)
}
"""Commands of the tutorials and guides, by line."""


@pytest.mark.parametrize(
    "planned", [pytest.param(False, id="quick"), pytest.param(True, id="planned", marks=pytest.mark.heavy)]
)
def test_commands_of_the_guides_work_as_they_are_written(place: Path, planned: bool) -> None:
    chosen = {line: command for line, command in RUN_HERE.items() if (command.words[0] in PLANNED) == planned}
    failed: dict[str, str] = {}
    for line, command in chosen.items():
        done = CliRunner().invoke(app, ready(command.words))
        # Made runs have no data and no weights, so verify finds them INVALID. A framework or server may not be
        # installed, or may not run.
        lacks = "this would not start" in done.output and ("not installed" in done.output or "host:8000" in done.output)
        if done.exit_code not in ((0, 1) if command.words[0] == "verify" or lacks else (0,)):
            failed[line] = f"exit code {done.exit_code}: {done.exception!r} {done.output[-500:]}"
    assert failed == {}
    assert len(chosen) > 15, "most commands of the guides are run or planned"


def test_the_site_builds_strictly_with_the_generated_reference(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=500,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    settings = (tmp_path / "reference/settings/index.html").read_text()
    keys = ("optimizer.lr", "data[].sources[].sha256", "data[].tree[].by_class", "server_options.block_size")
    assert [key for key in keys if key not in settings] == []
    data = (tmp_path / "reference/data/index.html").read_text()
    assert [known.spec.name for known in known_datasets() if f'<h2 id="{known.spec.name}">' not in data] == []
    assert "MIT (Zalando SE" in data
    assert "Debian package dataset-fashion-mnist" in data
    assert "train/ and val/ (*.npy" in data
    assert "accelmark explain" in (tmp_path / "reference/commands/index.html").read_text()
    assert "第一款芯片" in (tmp_path / "zh/start/first-chip/index.html").read_text()
    assert "replayed-losses" in (tmp_path / "reference/rules/index.html").read_text()
    assert (tmp_path / "page.png").stat().st_size < 200_000


ZH = ROOT / "docs" / "zh"
TRANSLATED = sorted(path.relative_to(ZH).as_posix() for path in ZH.glob("*/*.md"))


@pytest.mark.parametrize("page", TRANSLATED)
def test_a_chinese_page_has_the_code_commands_and_rows_of_the_english_one(page: str) -> None:
    english, chinese = ((place / page).read_text(encoding="utf-8") for place in (ROOT / "docs", ZH))
    blocks = re.compile(r"^`\S+`:\n\n```\w+\n.*?\n```", re.DOTALL | re.MULTILINE)
    assert blocks.findall(chinese) == blocks.findall(english)
    if not page.startswith("reference/"):  # of these only the main points are translated
        commands = re.compile(r"^    (?:accelmark|python|pip|export|chmod) .*$", re.MULTILINE)
        assert commands.findall(chinese) == commands.findall(english)
    named = re.compile(r"^\| `([^`]+)`", re.MULTILINE)
    assert set(named.findall(english)) - set(named.findall(chinese)) <= {"config_<capability>.yaml"}
    assert re.search(r"对应提交 `[0-9a-f]{7,}`", chinese)


def test_the_messages_that_a_chinese_guide_translates_are_those_of_the_command_line() -> None:
    text = (ZH / "start/first-result.md").read_text(encoding="utf-8").partition("| 信息 | 含义 |")[2]
    messages = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/accelmark").rglob("*.py"))
    assert [message for message in messages if message not in source] == []
    assert len(messages) >= 20


@cache
def script(name: str) -> ModuleType:
    """Import a script of ``docs/``, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_page_follows_from_its_record_and_notes() -> None:
    pages = script("results").pages()
    assert {path.name for path in pages} == {path.name for path in (ROOT / "results").glob("*.md")}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run: python docs/results.py"


def test_a_result_on_synthetic_data_is_marked_and_never_valid() -> None:
    records = script("results").records().values()
    assert any("synthetic" in record["marks"] for record in records)
    assert [
        record["title"] for record in records if "synthetic" in record["marks"] and record["verdict"] == "VALID"
    ] == []


def test_accelmark_results_lists_them() -> None:
    runs, problems = open_sources([ROOT / "results"])
    assert problems == []
    records = script("results").records()
    assert {run.summary.run: run.summary.cases[0].verdict for run in runs} == {
        name: record["verdict"] for name, record in records.items()
    }
    for run in runs:
        rate = records[run.summary.run]["figures"]["throughput_steady"]["value"]
        assert run.summary.cases[0].mean_of(F.THROUGHPUT_STEADY) == rate


def test_the_page_of_cases_follows_from_their_folders() -> None:
    text = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    assert text == script("cases").page(), "run: python docs/cases.py"
    shipped = [name for name, folder in folders("cases").items() if folder.origin == "accelmark"]
    assert len(shipped) > 50
    assert [name for name in shipped if text.count(f"[{name}](../src/accelmark/cases/{name}/README.md)") != 1] == []


def test_readme_names_every_case_once_by_family_and_size() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    cases = script("cases")
    found = cases.MARKED.search(text)
    assert found is not None
    assert found[0] == f"{found[1]}{cases.families()}{found[2]}", "run: python docs/cases.py"
    shipped = [name for name, folder in folders("cases").items() if folder.origin == "accelmark"]
    listed = [name.strip() for name in re.split(r"[,;:\n]", found[0])]
    assert [name for name in shipped if listed.count(name) != 1] == []


def test_every_model_of_flagperf_is_carried_by_a_case_or_has_a_reason() -> None:
    assert Counter(row.task for row in coverage()) == {"train": 48, "infer": 11}
    assert len({(row.task, row.model) for row in coverage()}) == 59
    for row in coverage():
        if row.case is None:
            assert row.note, row
        else:
            assert getattr(load_case(row.case), row.task) is not None, row


def test_every_case_is_measured_runs_or_is_not_possible_on_every_vendor() -> None:
    rows = {(row.case, row.task, row.framework): row.vendors for row in script("support").case_support()}
    assert rows["resnet_mini", "train", "pytorch"]["cpu"] == "measured"
    assert rows["resnet_mini", "infer", "pytorch"]["cpu"] == "measured"
    assert rows["efficientnet_lite0", "infer", "pytorch"]["cpu"] == "measured"
    assert rows["resnet_mini", "train", "jax"]["nvidia"] == "runs"
    assert rows["resnet_mini", "train", "jax"]["ascend"] == "not possible"
    assert rows["detr", "train", "pytorch"]["cpu"] == "runs"
    assert all(vendors["zixiao"] == "not possible" for vendors in rows.values()), "it declares cannot_run"
    assert ("detr", "train", "jax") not in rows


REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SUITES = Path(accelmark.__file__).parent / "suites"
SOURCES = ("files.md", "vendors.md", "case-files.md", "cluster.md", "inference.md", "automl.md")
"""Pages that describe files, methods and classes, which ``accelmark explain`` does not."""
STATUS = {"same", "converted", "otherwise", "no"}


def rows(page: str) -> list[list[str]]:
    lines = (REFERENCE / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("| ")]
    return [row for row in cells if len(row) == 3 and row[1]]


def known_names() -> set[str]:
    names = {part for entry in entries() for part in (entry.name, entry.name.rpartition(".")[2])}
    names |= {name for kind in ("cases", "vendors", "frameworks", "servers") for name in folders(kind)}
    names |= {file.stem for file in SUITES.glob("*.yaml")}
    names |= {event.value for event in Event} | set(TABLES["vendors"])
    names |= {field for model in (StepWindow, Evaluation, Finished) for field in model.model_fields}
    return names | set(options(typer.main.get_command(app)))


def options(command: Any) -> list[str]:
    """Return the options of a command and of its subcommands."""
    below = [name for sub in getattr(command, "commands", {}).values() for name in options(sub)]
    return [*below, *(name for parameter in command.params for name in parameter.opts)]


@pytest.mark.parametrize(("page", "least"), [("flagperf.md", 140), ("aiperf.md", 45)])
def test_the_rows_name_what_exists(page: str, least: int) -> None:
    described = "\n".join((REFERENCE / source).read_text(encoding="utf-8") for source in SOURCES)
    described += "\n".join(written for written, _, _ in rows(page))
    known, wrong = known_names(), []
    for written, status, text in rows(page):
        assert status in STATUS, written
        for name in re.findall(r"`([^`]+)`", text):
            if name.startswith("accelmark "):
                parse(shlex.split(name)[1:])
            elif ":" in name and name.partition(":")[0] in folders("cases"):
                CaseKey.parse(name, hardware="any")
            elif not {name, name.partition(" ")[0]} & known and name not in described and "<" not in name:
                wrong.append((written, name))
    assert wrong == []
    assert len(rows(page)) >= least
