"""Run several jobs in one process, as a search does with its trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch.distributed as dist

from accelmark.frameworks.pytorch.case import Place, TrainCase
from accelmark.spec.settings import TrainSettings


@final
@dataclass(frozen=True, slots=True)
class InProcess:
    """Settings that the process provides for each of its jobs."""

    make_case: Callable[[TrainSettings, Mapping[str, Path], Place], TrainCase]
    """Builds the case, instead of the folder that the job names."""
    control: dist.ProcessGroup | None = None
    """The gloo group of the ranks, which outlives the job; None for a single rank."""
