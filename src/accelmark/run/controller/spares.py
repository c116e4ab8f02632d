"""Replace hosts that are not ready for a run by the spares of its cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from accelmark.plan.plan import Plan, PlannedJob
from accelmark.spec.cluster import HostSpec
from accelmark.spec.errors import Problem, SpecError


def with_spares(plan: Plan, error: SpecError) -> tuple[Plan, list[str]] | None:
    """Return the plan with a spare for each host that ``error`` names, and a message for each; None without enough.

    A spare that turns out not to be ready is a host of the new plan, and is replaced in the same way.
    """
    hosts, spares = plan.cluster.hosts, plan.cluster.spares
    problems = {problem.where: problem for problem in error.problems}
    bad = [host for host in hosts if host.name in problems]
    if not bad or len(bad) > len(spares):
        return None
    replacements = dict(zip((host.name for host in bad), spares, strict=False))
    cluster = plan.cluster.model_copy(
        update={
            "hosts": tuple(replacements.get(host.name, host) for host in hosts),
            "spares": spares[len(bad) :],
        }
    )
    jobs = tuple(_on(job, replacements) for job in plan.jobs)
    return plan.model_copy(update={"cluster": cluster, "jobs": jobs}), list(_notes(replacements, problems))


def _on(job: PlannedJob, replacements: Mapping[str, HostSpec]) -> PlannedJob:
    nodes = (
        node.model_copy(update={"host": replacements[node.host].name}) if node.host in replacements else node
        for node in job.nodes
    )
    return job.model_copy(update={"nodes": tuple(nodes)})


def _notes(replacements: Mapping[str, HostSpec], problems: Mapping[str, Problem]) -> Iterator[str]:
    for name, spare in replacements.items():
        yield f"host {name} {problems[name].what}: it was replaced by the spare {spare.name}"
