"""Every command in README.md and the guides is valid, and is run or planned here, or named with the test that runs it.

``docs/vendor.md`` and ``docs/case.md`` are followed as a whole by tests of their own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from accelmark.cli.main import app
from tests.results.compared_runs import made

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
FOLLOWED: Final = ("docs/vendor.md", "docs/case.md", "docs/zh/vendor.md", "docs/zh/case.md")
"""Pages whose files and commands tests/docs/test_vendor_page.py and test_case_page.py write and type."""
ELSEWHERE: Final = {
    "view": "tests/report/test_view.py",
    "probe": "tests/probe/test_probe.py",
    "cluster": "tests/cluster/test_cluster_report.py",
    "data": "tests/datasets/test_prepare.py",
    "env": "tests/frameworks/test_environments.py",
    "automl": "tests/automl/controller",
    "monitor": "tests/cli/test_machine_verbs.py",
    "preflight": "tests/cluster/test_preflight.py",
    "status": "tests/run/test_session.py",
    "stop": "tests/run/test_session.py",
    "resume": "tests/run/test_session.py",
    "evaluate": "tests/audit/test_reevaluation.py",
    "new": "tests/cli/test_scaffold.py",
    "check": "tests/cli/test_scaffold.py",
}
"""Verbs that serve, install, train or follow a live run -> the tests that run them."""
HARDWARE: Final = re.compile(r"(train|infer) [^ ]+:H100:|--compiler (tensorrt|torchtrt)|--set max_batches")
"""Commands that need an accelerator, another project's trainer, or minutes of computation, also to be planned."""
_COMMAND: Final = re.compile(r"^(?:    |\$ )?(accelmark(?: [^\n]*)?)$", re.MULTILINE)


class Documented(NamedTuple):
    """One command of a page, without its comment."""

    page: str
    words: tuple[str, ...]

    @property
    def line(self) -> str:
        """The command as written."""
        return shlex.join(self.words)


def documented() -> Iterator[Documented]:
    """Yield the commands of all pages; ``a X | b`` are two."""
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for text in _COMMAND.findall(page.read_text(encoding="utf-8")):
            first, *more = text.split(" #")[0].split(" > ")[0].split(" | ")
            for part in [first, *(f"accelmark {part}" for part in more)]:
                yield Documented(name, tuple(shlex.split(part)[1:]))


COMMANDS: Final = list(dict.fromkeys(documented()))


def parsed(words: list[str]) -> tuple[str, Any]:
    """Return the verb of a command and its parsed parameters; raises click's error where it is invalid."""
    command: Any = typer.main.get_command(app)
    context: Any = command.make_context("accelmark", [], resilient_parsing=True)
    rest = words
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(
            name, list(rest), parent=context, **({"resilient_parsing": True} if hasattr(command, "commands") else {})
        )
    return words[0], context


def test_there_are_commands_on_every_tutorial() -> None:
    pages = {command.page for command in COMMANDS}
    assert {"README.md", "docs/evaluator.md", "docs/reader.md", "docs/inference.md", "docs/compare.md"} <= pages
    assert len(COMMANDS) > 80


@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_every_documented_command_is_accepted_by_the_command_line(page: str) -> None:
    wrong: dict[str, str] = {}
    for command in (command for command in COMMANDS if command.page == page):
        words = [word for word in command.words if word not in ("…", "...")]
        try:
            parsed(words)
        except Exception as error:  # noqa: BLE001  click and typer raise their own usage errors
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            wrong[command.line] = message
    assert wrong == {}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two finished runs, a bundle, and FlagPerf's files, in which commands are typed."""
    made(tmp_path / "runs" / "base", rounds=2, windows=4)
    made(tmp_path / "runs" / "other", rounds=2, windows=4)
    (tmp_path / "cluster_conf.py").write_text('HOSTS = ["10.1.2.3"]\nSSH_PORT = "22"\n')
    (tmp_path / "test_conf.py").write_text('VENDOR = "nvidia"\nCASES = {"bert:pytorch:A100:1:8:1": "/data"}\n')
    (tmp_path / "config_A100x1x8.py").write_text("train_batch_size = 4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ready(words: tuple[str, ...]) -> list[str]:
    """Return a command with runs for its placeholders; what would start work is only planned."""
    found = {"RUN": "runs/base", "BASE": "runs/base", "A": "runs/base", "OTHER": "runs/other", "B": "runs/other"}
    found |= {"DIR": "runs"}
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


_TUTORIALS: Final = ("evaluator", "reader", "inference", "serving", "compare")
_RUN_PAGES: Final = ("README.md", *(f"docs/{name}.md" for name in _TUTORIALS))
RUN_HERE: Final = [
    command
    for command in COMMANDS
    if command.page in _RUN_PAGES
    and command.page not in FOLLOWED
    and not (command.words and command.words[0] in ELSEWHERE)
    and not HARDWARE.search(command.line)
    and not {"--tensorboard", "--mlflow", "--prometheus", "--replay"} & set(command.words)
]


def test_cheap_commands_of_the_tutorials_work_as_they_are_written(place: Path) -> None:
    failed: dict[str, str] = {}
    for command in RUN_HERE:
        done = CliRunner().invoke(app, ready(command.words))
        # verify: made runs have no data and no weights, so they are INVALID, which is exit code 1. A server may not be
        # installed, or may not run.
        absent = "is not installed" in done.output or "http://host:8000 cannot be reached" in done.output
        lacks = "this would not start" in done.output and absent
        if done.exit_code not in ((0, 1) if command.words[0] == "verify" or lacks else (0,)):
            failed[command.line] = f"exit code {done.exit_code}: {done.exception!r} {done.output[-500:]}"
    assert failed == {}
    assert len(RUN_HERE) > 20, "most commands of the tutorials are run"


def test_the_other_commands_name_tests_that_exist() -> None:
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []
    for verb, path in ELSEWHERE.items():
        files = [ROOT / path] if (ROOT / path).is_file() else [*(ROOT / path).glob("*.py")]
        assert any(verb in file.read_text(encoding="utf-8") for file in files), (verb, path)
