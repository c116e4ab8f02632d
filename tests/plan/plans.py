"""Plans of run files, without a machine and its data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelmark.plan.build import build_plan
from accelmark.plan.plan import Plan
from accelmark.plan.request import DataDirs, Detected
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.model import parse
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.runfile import RunSpec

CPU = Detected("cpu", "CPU", None, None)
_INFERENCE = """
infer:
  unit: image
  metric: top1
  tolerance: 0.01
  tolerance_why: made up for tests
  configurations: {batch_size: 4, compiler: eager, flops: 2*3}
"""


def with_inference(plugins: Path, more: str = "") -> Path:
    """Give the toy case an inference side with the lines ``more``; returns ``plugins``."""
    folder = plugins / "cases" / "toy"
    text = (folder / "case.yaml").read_text().partition("\ninfer:")[0]
    (folder / "case.yaml").write_text(text + _INFERENCE + more)
    (folder / "infer_pytorch.py").write_text("")
    return plugins


def data_below(case: CaseSpec, named: Path | None) -> Mapping[str, Path]:
    return {name: Path("/data") / name for name in case.data_names}


def plan_of(
    run: Mapping[str, Any],
    detected: Detected = CPU,
    *,
    cluster: Mapping[str, Any] | None = None,
    data_dirs: DataDirs = data_below,
    where: str = "run.yaml",
    command_line: Mapping[str, Any] | None = None,
    allow_missing_data: bool = False,
) -> Plan:
    return build_plan(
        parse(RunSpec, run, where),
        cluster=ClusterSpec.model_validate(cluster or {}),
        detected=detected,
        data_dirs=data_dirs,
        created_at="2026-01-01T00:00:00Z",
        where=where,
        command_line=command_line,
        allow_missing_data=allow_missing_data,
    )
