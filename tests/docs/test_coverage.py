"""docs/coverage.yaml names existing cases, and a reason for each model that none carries."""

from __future__ import annotations

from pathlib import Path

import yaml

from accelmark.spec.plugins.catalog import load_case

TABLE = yaml.safe_load((Path(__file__).parents[2] / "docs/coverage.yaml").read_text(encoding="utf-8"))


def test_every_model_of_flagperf_is_carried_by_a_case_or_has_a_reason() -> None:
    counts = {task: len({row["model"] for row in rows}) for task, rows in TABLE.items()}
    assert counts == {"train": 48, "infer": 11}
    for task, rows in TABLE.items():
        for row in rows:
            if row["case"] is None:
                assert row["note"], row
            else:
                assert getattr(load_case(row["case"]), task) is not None, row
