"""Which launcher a plan's cluster asks for."""

from __future__ import annotations

from accelmark.plan.plan import Plan
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.launchers.local import LocalLauncher
from accelmark.spec.errors import RequestError


def launcher_for(plan: Plan) -> Launcher:
    """Return the launcher that a plan's cluster asks for.

    Raises:
        RequestError: there is none of that name.
    """
    if plan.cluster.launcher != "local":
        raise RequestError(f"cluster {plan.cluster.name!r}: the launcher {plan.cluster.launcher!r} is not available")
    return LocalLauncher()
