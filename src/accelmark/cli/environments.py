"""The verb ``env``: virtual environments of frameworks."""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelmark.cli import completion, options
from accelmark.cli.options import Output, Verb, argument, flag, group, option
from accelmark.spec.errors import Problem, RequestError, nearest

if TYPE_CHECKING:
    from accelmark.run.environments.create import Report
    from accelmark.run.host import Host
    from accelmark.run.launchers.launcher import Launcher
    from accelmark.spec.cluster import ClusterSpec

app = group("env", "Virtual environments of frameworks.")
Framework = Annotated[str, argument("FRAMEWORK", "A framework, such as jax.", completion.frameworks)]
Place = Annotated[Path | None, option("DIR", "Directory; default: in AccelMark's cache.", "--path")]
Hosts = Annotated[Path | None, option("CLUSTER", "On the hosts of this cluster file.", "--hosts")]


@app.command(cls=Verb)
def create(
    framework: Framework,
    path: Place = None,
    index: Annotated[str | None, option("URL", "Package index in place of PyPI.")] = None,
    wheels: Annotated[
        Path | None, option("DIR", "Directory with wheels; needs no network unless --index is given.")
    ] = None,
    hosts: Hosts = None,
    vendor: options.Vendor = None,
    dry_run: Annotated[bool, flag("--dry-run", "Print the commands; run nothing.")] = False,
) -> None:
    """Create or update the environment of a framework. Later runs of the framework use it automatically."""
    from accelmark.run.environments.create import FrameworkEnvironment, constraints_file, recipe_of, register
    from accelmark.run.environments.create import create as make
    from accelmark.run.host import HostError
    from accelmark.spec.cluster import environment_python
    from accelmark.spec.plugins.launcher import load_launcher
    from accelmark.telemetry.inventory import default_vendor

    cluster, place = _cluster(hosts), _place(framework, path, hosts)
    recipe = recipe_of(framework, vendor or cluster.vendor or default_vendor(), index, wheels and wheels.absolute())
    if dry_run:
        is_localhost = load_launcher(cluster.launcher).is_localhost
        if is_localhost and recipe.wheels is not None and not recipe.wheels.is_dir():
            raise HostError(cluster.hosts[0].name, f"--wheels {recipe.wheels}: no such directory on this host")
        typer.echo(f"# on {', '.join(host.name for host in cluster.hosts)}")
        python = "python3" if cluster.python == environment_python(place) else cluster.python
        typer.echo(shlex.join([python, "-m", "venv", str(place)]))
        copied = shlex.join([str(recipe.constraints or "/dev/null"), str(constraints_file(place))])
        is_there = recipe.constraints is None or is_localhost
        typer.echo(f"cp {copied}" if is_there else f"# send {copied}")
        typer.echo(shlex.join(recipe.install_command(place)))
        return

    async def body(launcher: Launcher, host: Host, report: Report) -> dict[str, str]:
        return await make(recipe, place, launcher.python, host, report)

    versions = _on_hosts(cluster, body)
    for host, found in versions.items():
        listed = ", ".join(f"{name} {version}" for name, version in found.items())
        typer.echo(f"{host}: {place} has {listed}")
    if hosts is None:
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        found = versions[cluster.hosts[0].name]
        register(FrameworkEnvironment(framework=framework, path=place, created_at=now, versions=found))
    elif cluster.environments.get(framework) != place and cluster.python != environment_python(place):
        typer.echo(f"add to {hosts}:  environments: {{{framework}: {place}}}")
        typer.echo(f"or, for node agents and all frameworks:  python: {environment_python(place)}")


@app.command("list", cls=Verb)
def list_environments(as_json: options.AsJson = False) -> Output:
    """List the environments of this machine."""
    from accelmark.run.environments.create import registered

    environments = registered().values()

    def show() -> None:
        if not environments:
            typer.echo("no environment on this machine; create one: accelmark env create FRAMEWORK")
        for environment in environments:
            typer.echo(f"{environment.framework}: {environment.path}, created {environment.created_at}")
            options.echo_wrapped(f"  {environment.title}")

    return Output([environment.to_json() for environment in environments], show)


@app.command(cls=Verb)
def remove(framework: Framework, path: Place = None, hosts: Hosts = None) -> None:
    """Remove the environment of a framework."""
    from accelmark.run.environments.create import record_of, registered
    from accelmark.run.environments.create import remove as clear

    cluster = _cluster(hosts)
    known = registered()
    if hosts is None and path is None and framework not in known:
        raise RequestError(f"this machine has no environment of {framework!r} ({nearest(framework, known)})")
    place = _place(framework, path, hosts)

    async def body(launcher: Launcher, host: Host, report: Report) -> None:
        report(host.name, f"removing {place}")
        await clear(place, host)

    if hosts is None and framework in known and known[framework].path == place:
        record_of(framework).unlink(missing_ok=True)  # first: what is left of an interrupted removal is no environment
    _on_hosts(cluster, body)
    typer.echo(f"removed {place}")


def _cluster(file: Path | None) -> ClusterSpec:
    """Return a cluster file, or this machine with the Python that runs this program."""
    from accelmark.spec.cluster import ClusterSpec
    from accelmark.spec.plugins.launcher import read_cluster

    return read_cluster(file) if file is not None else ClusterSpec(python=sys.executable)


def _place(framework: str, path: Path | None, hosts: Path | None) -> Path:
    """Return the directory of an environment: given, named in the cluster file, or the default of this machine."""
    from accelmark.run.environments.create import default_path, registered

    if hosts is None:
        known = registered().get(framework)
        return path.absolute() if path is not None else known.path if known is not None else default_path(framework)
    named = path or _cluster(hosts).environments.get(framework)
    if named is None:
        what = f"{hosts}: names no environment of {framework}"
        raise RequestError(f"{what}: add environments: {{{framework}: DIRECTORY}}, or give --path")
    if not named.is_absolute():
        raise RequestError(f"--path {named}: is not absolute; hosts need the same directory")
    return named


def _on_hosts(cluster: ClusterSpec, body: Callable[[Launcher, Host, Report], Awaitable[Any]]) -> dict[str, Any]:
    """Run ``body`` on all hosts of a cluster at once with a line of progress each."""
    from accelmark.run.controller.execution import run_until_signal
    from accelmark.run.host import HostError
    from accelmark.run.launchers import create_launcher, plan_of_hosts
    from accelmark.run.preflight.checks import HostsNotReadyError

    async def all_hosts(report: Report) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="accelmark-env-") as directory:
            async with create_launcher(plan_of_hosts(cluster), Path(directory)) as launcher:
                await launcher.allocate()
                bodies = (body(launcher, launcher.host(host), report) for host in cluster.hosts)
                results = await asyncio.gather(*bodies, return_exceptions=True)
        problems = []
        for result in results:
            if isinstance(result, HostError):
                hint = "" if result.advice == HostError.default_advice else result.advice
                problems.append(Problem(result.host, "", result.problem, hint))
            elif isinstance(result, BaseException):
                raise result
        if problems:
            raise HostsNotReadyError(problems, strict=False)
        return {host.name: result for host, result in zip(cluster.hosts, results, strict=True)}

    return run_until_signal(all_hosts(lambda host, what: typer.echo(f"{host}: {what}", err=True)))
