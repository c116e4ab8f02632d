"""The site and generated pages are current; Chinese pages have the same code; tables of migration name what exists."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

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
from tests.docs.test_commands import parse

ROOT = Path(__file__).parents[2]


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
