"""The tables of coverage: FlagPerf's models with cases or reasons, and cases by framework and vendor."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

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


def test_every_case_is_measured_runs_or_is_not_possible_on_every_vendor() -> None:
    spec = importlib.util.spec_from_file_location("support", Path(__file__).parents[2] / "docs/support.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["support"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = {(row.case, row.task, row.framework): row.vendors for row in module.case_support()}
    assert rows["resnet_mini", "train", "pytorch"]["cpu"] == "measured"
    assert rows["resnet_mini", "infer", "pytorch"]["cpu"] == "measured"
    assert rows["efficientnet_lite0", "infer", "pytorch"]["cpu"] == "measured"
    assert rows["resnet_mini", "train", "jax"]["nvidia"] == "runs"
    assert rows["resnet_mini", "train", "jax"]["ascend"] == "not possible"
    assert rows["detr", "train", "pytorch"]["cpu"] == "runs"
    assert all(vendors["zixiao"] == "not possible" for vendors in rows.values()), "it declares cannot_run"
    assert ("detr", "train", "jax") not in rows
