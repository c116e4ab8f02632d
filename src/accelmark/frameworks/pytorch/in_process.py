"""Jobs inside a process that outlives them: a search trains one network after another without starting anew."""

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
class Tenancy:
    """What the process provides for a job in it."""

    make_case: Callable[[TrainSettings, Mapping[str, Path], Place], TrainCase]
    """Builds the case, in place of the folder that the job names."""
    control: dist.ProcessGroup | None = None
    """The gloo group of the ranks, which have met before the job and part after it; None for a single rank."""
