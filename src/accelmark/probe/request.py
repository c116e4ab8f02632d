"""``probe.json``: what a probe is asked to measure."""

from __future__ import annotations

from typing import Final

from pydantic import PositiveFloat

from accelmark.spec.ceilings import ProbeItem
from accelmark.spec.job import JobSpec
from accelmark.spec.model import Spec

REQUEST_FILE: Final = "probe.json"
CEILINGS_FILE: Final = "ceilings.json"
"""Written by rank 0 into the directory of its host."""


class ProbeRequest(Spec):
    """A probe of one device, or of a group of them."""

    place: JobSpec
    """A job without a workload: the vendor's device and backend."""
    items: tuple[ProbeItem, ...] = ("matmul", "memory", "copies", "collectives")
    budget_s: PositiveFloat = 60.0
    """About how long measuring may take."""
