"""Plan a run: resolve a run file to jobs with settings and commands, before anything starts."""

from accelmark.plan.build import build_plan
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode
from accelmark.plan.request import Detected

__all__ = ["Detected", "Plan", "PlannedJob", "PlannedNode", "build_plan"]
