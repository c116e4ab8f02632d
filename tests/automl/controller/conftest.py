"""A search in a folder of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.automl.controller.searching import Search


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Search]:
    made = Search(tmp_path)
    yield made
    made.end()
