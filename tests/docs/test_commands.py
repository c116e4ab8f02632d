"""Every command in README.md and the guides is valid, and is run or planned here or by the tests of its verb.

The pages about a first chip and about a case are followed as a whole by tests of their own.
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
