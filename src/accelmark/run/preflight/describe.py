"""What preflight would run, for people who want to know before it does."""

from __future__ import annotations

from collections.abc import Sequence

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.onhost import command
from accelmark.run.preflight.check import REACH_TIMEOUT_S
from accelmark.run.preflight.images import pulled_images
from accelmark.run.preflight.look import has_devices, look_command


def preflight_commands(plan: Plan, launcher: Launcher, jobs: Sequence[PlannedJob]) -> dict[str, list[list[str]]]:
    """Return the commands that look at each host that ``jobs`` use; ``TOKEN`` is drawn by lot each time."""
    hosts = {host.name: host for host in plan.cluster.hosts}
    python, port = launcher.python, str(plan.cluster.master_port)
    used = dict.fromkeys(node.host for job in jobs for node in job.nodes)
    found: dict[str, list[list[str]]] = {}
    for name in used:
        found[name] = [launcher.on(hosts[name], command(python, "probe"))]
        for recipe in pulled_images(plan, [job for job in jobs if any(node.host == name for node in job.nodes)]):
            found[name] += [launcher.on(hosts[name], argv) for argv in (recipe.present, recipe.seek)]
        if has_devices(plan.vendor):
            found[name].append(launcher.on(hosts[name], look_command(launcher.variables, python, plan.vendor)))
    reached: set[tuple[str, str]] = set()
    for job in jobs:
        master, *others = [node.host for node in job.nodes]
        for other in others:
            if (master, other) in reached:
                continue
            if not any(known == master for known, _ in reached):
                found[master].append(launcher.on(hosts[master], command(python, "port", "listen", port, "TOKEN")))
            reached.add((master, other))
            timeout, address = f"{REACH_TIMEOUT_S:g}", launcher.master_address(hosts[master])
            argv = command(python, "port", "reach", address, port, "TOKEN", timeout)
            found[other].append(launcher.on(hosts[other], argv))
    return found
