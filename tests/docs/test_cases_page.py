"""docs/cases.md and README.md's table of cases are what docs/cases.py writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from accelmark.spec.plugins.catalog import folders

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cases_page", ROOT / "docs/cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_cases_follows_from_their_folders(written: ModuleType) -> None:
    text = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    assert text == written.page(), "run: python docs/cases.py"
    shipped = [name for name, folder in folders("cases").items() if folder.origin == "accelmark"]
    assert len(shipped) > 50
    assert [name for name in shipped if text.count(f"[{name}](../src/accelmark/cases/{name}/README.md)") != 1] == []


def test_readme_names_every_case_once_by_family_and_size(written: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = written.MARKED.search(text)
    assert found is not None
    assert found[0] == f"{found[1]}{written.families()}{found[2]}", "run: python docs/cases.py"
    shipped = [name for name, folder in folders("cases").items() if folder.origin == "accelmark"]
    listed = [name.strip() for name in re.split(r"[,;:\n]", found[0])]
    assert [name for name in shipped if listed.count(name) != 1] == []


def test_the_chinese_readme_counts_the_cases_and_families_rightly() -> None:
    text = (ROOT / "docs/zh/README.md").read_text(encoding="utf-8")
    shipped = [name for name, folder in folders("cases").items() if folder.origin == "accelmark"]
    assert "七类共五十多个用例" in text
    assert 50 < len(shipped) < 60
