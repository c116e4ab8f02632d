"""What a job of a case on this machine's CPU says, whether it trains or infers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelmark.spec.job import JobSpec
from accelmark.spec.key import CaseKey
from accelmark.spec.plugins.catalog import find, load_case


def job_on_cpu(name: str, data_dirs: Mapping[str, Path], checkpoint_dir: Path, **side: Any) -> JobSpec:
    """Return the job; ``side`` is its task and that task's part."""
    return JobSpec(
        key=CaseKey.parse(name, hardware="CPU"),
        round=1,
        case=find("cases", name).ref("train"),
        case_version=load_case(name).version,
        vendor="cpu",
        device_type="cpu",
        framework_module=None,
        collective_backend="gloo",
        data_dirs=dict(data_dirs),
        checkpoint_dir=checkpoint_dir,
        **side,
    )
