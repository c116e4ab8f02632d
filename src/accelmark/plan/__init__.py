"""Plan a run: from the run file to every job, its settings and its commands, before anything starts."""

from accelmark.plan.build import Detected, build_plan
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode

__all__ = ["Detected", "Plan", "PlannedJob", "PlannedNode", "build_plan"]
