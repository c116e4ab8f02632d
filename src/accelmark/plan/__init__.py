"""From what people ask for to what will be started: pure, and complete before anything starts."""

from accelmark.plan.build import Detected, build_plan
from accelmark.plan.plan import Plan, PlannedJob, PlannedNode

__all__ = ["Detected", "Plan", "PlannedJob", "PlannedNode", "build_plan"]
