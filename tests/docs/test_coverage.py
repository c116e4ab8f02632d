"""The table of FlagPerf's models names existing cases, and a reason for each model that none carries."""

from __future__ import annotations

from collections import Counter

from accelmark.compat.flagperf.coverage import coverage
from accelmark.spec.plugins.catalog import load_case


def test_every_model_of_flagperf_is_carried_by_a_case_or_has_a_reason() -> None:
    assert Counter(row.task for row in coverage()) == {"train": 48, "infer": 11}
    assert len({(row.task, row.model) for row in coverage()}) == 59
    for row in coverage():
        if row.case is None:
            assert row.note, row
        else:
            assert getattr(load_case(row.case), row.task) is not None, row
