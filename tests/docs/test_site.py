"""The documentation site builds without a warning and has the generated reference; Chinese pages have the same code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accelmark.datasets.catalogue import known_datasets

ROOT = Path(__file__).parents[2]


def test_the_site_builds_strictly_with_the_generated_reference(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)], cwd=ROOT,
        check=True, timeout=500, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
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
