"""Plan a run: resolve a run file to jobs with settings and commands, before anything starts."""

from accelmark.plan.build import Detected, build_plan
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode

__all__ = ["Detected", "Plan", "PlannedJob", "PlannedNode", "build_plan"]
