"""Recipes of images install what ranks and cases need, and name the source of their base image."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from accelmark.run.preflight.checks import RANK_NEEDS
from accelmark.spec.plugins.catalog import folders, frameworks_of, load_case
from accelmark.spec.plugins.requirements import requirement_texts

RECIPES = sorted(
    file.parent for folder in folders("vendors").values() for file in folder.path.glob("images/*/Dockerfile")
)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.parts[-3]}-{recipe.name}")
def test_a_recipe_installs_what_ranks_and_cases_need(recipe: Path) -> None:
    framework = recipe.name
    texts = [need.requirement for need in RANK_NEEDS]
    for case in map(load_case, folders("cases")):
        if framework in frameworks_of(case):
            texts += requirement_texts(case.requires_for(framework))
    needs = [need for need in map(Requirement, texts) if need.marker is None or need.marker.evaluate()]
    needed = {need.name for need in needs} - {"torch"}
    content = "".join(file.read_text() for file in recipe.iterdir())
    assert needed - set(re.findall(r"[A-Za-z][\w-]*", content)) == set()
    if "BASE_IMAGE" in content:
        assert re.search(r"^# (Source|Tags): .*https?://.*, (read on )?\d{4}-\d\d-\d\d", content, re.MULTILINE)
        assert re.search("^# .*(PyTorch|torch)", content, re.MULTILINE), "the version of the framework"
