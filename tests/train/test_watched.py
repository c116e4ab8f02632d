"""What of AccelMark's own training is told as somebody else's, in a run that loads no vendor's code."""

from __future__ import annotations

import pytest

from accelmark.frameworks.pytorch.integrity.monkeypatch import foreign_functions
from accelmark.train.loop import window

pytestmark = pytest.mark.adversary


def made_at(path: str) -> object:
    names: dict[str, object] = {}
    exec(compile("def put_in_place(): return 1", path, "exec"), names)  # noqa: S102 - a function that stands elsewhere
    return names["put_in_place"]


def test_all_functions_are_in_their_original_place() -> None:
    assert foreign_functions() == ()


@pytest.mark.parametrize(
    "place", ["/opt/conda/lib/python3.11/site-packages/a.py", "/usr/lib/python3/dist-packages/a.py"]
)
def test_packages_installed_next_to_accelmark_are_not_foreign(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "borrowed", made_at(place), raising=False)
    assert foreign_functions() == ()


def test_a_function_from_anywhere_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "borrowed", made_at("/srv/evil/patch.py"), raising=False)
    assert foreign_functions() == ("accelmark.train.loop.window.borrowed -> srv/evil/patch.py:1",)
