"""Verbs about machines: vendors, doctor, preflight, monitor, probe; env for the virtual environments of frameworks."""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer

from accelmark.cli import completion, options
from accelmark.cli.options import Output, Verb, argument, flag, group, option
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, AccelmarkError, Problem, RequestError, SpecError, nearest
from accelmark.spec.number_format import counted, duration, quantity

if TYPE_CHECKING:
    from accelmark.plan.request import Detected
    from accelmark.run.environments.create import Report
    from accelmark.run.host import Host
    from accelmark.run.launchers.launcher import Launcher
    from accelmark.spec.cluster import ClusterSpec
    from accelmark.spec.plugins.vendor import VendorSpec

_STATES: Final = ("accepted", "ran", "described", "not possible")


def vendors(
    name: Annotated[str | None, argument("NAME", "Vendor whose chips are shown.", completion.vendors)] = None,
    matrix: Annotated[bool, flag("--matrix", "Show what is known of each case on each vendor.")] = False,
    runs: Annotated[Path, option("DIR", "Directory of runs, for --matrix.")] = Path("runs"),
    as_json: options.AsJson = False,
) -> Output:
    """List vendors, their chips and their devices on this machine, or the published figures of one vendor's chips."""
    from accelmark.spec.plugins.catalog import find, folders, load_vendor
    from accelmark.telemetry.forms import telemetry_of
    from accelmark.telemetry.inventory import detect
    from accelmark.telemetry.sources import MODULE_FILE

    if matrix:
        return _matrix(name, runs)
    if name is not None:
        find("vendors", name)
        described = load_vendor(name)
        fields = {"name", "title", "frameworks", "chips", "cannot_run"}
        return Output(described.model_dump(mode="json", include=fields), lambda: _show_vendor(described))
    present = {entry.vendor: entry for entry in detect()}
    rows: list[dict[str, Any]] = []
    for vendor, folder in folders("vendors").items():
        try:
            spec = load_vendor(vendor)
            telemetry = telemetry_of(spec, str(folder.path))
        except AccelmarkError as error:
            rows.append({"name": vendor, "problem": str(error), "from": folder.origin})
            continue
        here = present.get(vendor)
        sources = ["library"] if (folder.path / MODULE_FILE).is_file() else []
        sources += [telemetry.tool.command[0]] if telemetry.tool else []
        sources += [telemetry.script.file] if telemetry.script else []
        rows.append({
            "name": vendor, "title": spec.title,
            "frameworks": {framework: device.device_type for framework, device in spec.frameworks.items()},
            "chips": sorted({chip.name for chip in spec.chips}), "read_by": sources, "here": here is not None,
            "devices": [device.name for device in here.devices] if here else [],
            "hardware": here.hardware if here else None, "cannot_run": spec.cannot_run,
            "problem": here.problem if here else None, "from": folder.origin,
        })  # fmt: skip
    return Output(rows, lambda: _show_vendors(rows))


def _matrix(vendor: str | None, runs: Path) -> Output:
    from accelmark.audit.acceptance import support

    opened = options.opened_runs([runs] if runs.is_dir() else [])
    rows = [row for row in support(opened) if vendor in (None, row.vendor)]

    def show() -> None:
        known: dict[tuple[str, str], dict[str, list[str]]] = {}
        for row in rows:
            known.setdefault((row.case, row.framework), {}).setdefault(row.state, []).append(row.vendor)
        lines = [(*names, *(", ".join(states.get(title, "-")) for title in _STATES)) for names, states in known.items()]
        options.print_table(("case", "framework", *_STATES), lines)

    return Output([row._asdict() for row in rows], show)


def _show_vendors(rows: list[dict[str, Any]]) -> None:
    readable = [row for row in rows if "title" in row]
    lines = []
    for row in readable:
        state = ", ".join(dict.fromkeys(row["devices"])) or (row["problem"] or "yes") if row["here"] else "-"
        lists = (dict.fromkeys(row["frameworks"].values()), row["read_by"], row["chips"])
        device, sources, chips = (", ".join(names) or "-" for names in lists)
        lines.append((row["name"], device, state, sources, chips))
    options.print_table(("vendor", "device", "on this machine", "telemetry", "chips"), lines)
    for row in readable:
        if row["cannot_run"]:
            typer.echo()
            options.echo_wrapped(f"{row['name']}: cannot run cases: {row['cannot_run']}")
    for row in rows:
        if "title" not in row:
            options.warn(f"vendor {row['name']} ({row['from']}) is left out: {row['problem']}")


def _show_vendor(spec: VendorSpec) -> None:
    typer.secho(f"{spec.name}: {spec.title}", bold=True)
    if spec.cannot_run:
        options.echo_wrapped(f"  cannot run cases: {spec.cannot_run}")
    for framework, device in spec.frameworks.items():
        options.echo_wrapped(f"  {framework}: device {device.device_type}, collectives {device.collective_backend}")
    for chip in spec.chips:
        typer.echo(f"\n{chip.title}")
        peaks = {name: peak for name, peak in chip.peaks.model_dump().items() if peak is not None}
        rates = [f"{name} {peak:g}" for name, peak in peaks.items()]
        options.echo_wrapped(f"  dense peaks in TFLOP/s (int8 in TOP/s): {', '.join(rates) or 'none published'}")
        figures = {"memory bandwidth": (chip.memory_bandwidth_gb_s, "GB/s"), "thermal design power": (chip.tdp_w, "W")}
        if known := [f"{what} {value:,g} {unit}" for what, (value, unit) in figures.items() if value is not None]:
            typer.echo(f"  {', '.join(known)}")
        options.echo_wrapped(f"  source: {chip.source}")
    if not spec.chips:
        typer.echo("  no chips are described")


def doctor(as_json: options.AsJson = False) -> Output:
    """Show devices, frameworks and engines, and what can run."""
    from accelmark.run.environments.create import broken_frameworks, registered
    from accelmark.telemetry.host import collect
    from accelmark.telemetry.inventory import inventory

    environments = registered().values()
    with options.working("importing the frameworks of this machine"):
        seen = inventory({venv.framework: venv.path for venv in environments if venv.exists})
        broken = asyncio.run(broken_frameworks())
    content = vars(seen) | {"broken_packages": broken, "environments": [venv.to_json() for venv in environments]}
    if as_json:
        content["machine"] = collect([device for entry in seen.found for device in entry.devices])

    def show() -> None:
        lines = ["Devices"]
        for entry in seen.found:
            for device, chip in zip(entry.devices, entry.chips, strict=True):
                known = f"chip {chip.title}" if chip else "unknown chip"
                memory = f", {device.memory_gib:.0f} GiB" if device.memory_gib else ""
                driver = f", driver {device.driver}" if device.driver else ""
                lines.append(f"  {entry.vendor} {device.index}: {device.name}{memory}{driver} ({known})")
            if entry.problem:
                lines.append(f"  {entry.vendor}: {entry.evidence}, but cannot be read: {entry.problem}")
        for heading, installed in (("Frameworks", seen.frameworks), ("Engines", seen.engines)):
            present = [f"{package.name} {package.version}" for package in installed if package.version]
            absent = [package.name for package in installed if not package.version]
            lines += [heading, f"  installed: {', '.join(present) or 'none'}"]
            lines.append(f"  not installed: {', '.join(absent) or 'none'}")
        for package in seen.engines:
            if package.version and package.options:
                lines.append(f"  options of {package.name}: {', '.join(package.options)}")
        containers = [name for name, path in seen.containers.items() if path]
        lines += ["Containers", f"  {', '.join(containers) or 'neither docker nor podman is on the PATH'}"]
        lines.append("What can run")
        lines += [f"  {'yes' if support.works else 'no '} {support.what}: {support.why}" for support in seen.support]
        if seen.problems:
            lines += ["Problems", *(f"  {line}" for problem in seen.problems for line in problem.splitlines())]
        if environments:
            lines += ["Environments", *(f"  {venv.framework}: {venv.title} in {venv.path}" for venv in environments)]
        if broken:
            lines += ["Broken packages", *(f"  {entry}" for entry in broken)]
        for line in lines:
            options.echo_wrapped(line)

    return Output(content, show)


def _cluster_of(file: Path, vendor: str | None) -> ClusterSpec:
    """Return a cluster with ``vendor``, else the vendor in its file, else on this machine the detected vendor."""
    from accelmark.spec.plugins.launcher import load_launcher, read_cluster
    from accelmark.telemetry.inventory import default_vendor

    spec = read_cluster(file)
    own = default_vendor() if load_launcher(spec.launcher).is_localhost else None
    return spec.model_copy(update={"vendor": vendor or spec.vendor or own})


def preflight(
    cluster: Annotated[Path, argument("CLUSTER", "Cluster file.")],
    vendor: options.Vendor = None,
    as_json: options.AsJson = False,
) -> Output:
    """Check all hosts of a cluster file, as before a run. Reports each problem with what to do."""
    from accelmark.run.controller.execution import run_until_signal
    from accelmark.run.preflight.hosts import check_cluster
    from accelmark.spec.plugins.launcher import unusable_parts

    spec = _cluster_of(cluster, vendor)
    if unusable := unusable_parts(spec):
        raise SpecError(unusable)
    num_hosts = len(spec.hosts) + len(spec.spares)
    with options.working(f"checking {counted(num_hosts, 'host')}") as note:
        problems = run_until_signal(check_cluster(spec, note))
    bad = {problem.where for problem in problems if problem.severity == "error"}
    lacking = [host.name for host in spec.hosts if host.name in bad]
    spares = [host.name for host in spec.spares if host.name not in bad]
    is_ready = len(lacking) <= len(spares) and bad <= {host.name for host in (*spec.hosts, *spec.spares)}

    def show() -> None:
        options.print_problems(problems)
        if spec.vendor is None:
            options.warn("devices were not checked: name their vendor in the cluster file, or with --vendor")
        typer.echo(f"{num_hosts - len(bad)} of {num_hosts} hosts are ready")
        if lacking and is_ready:
            pairs = ", ".join(f"{spare} for {host}" for host, spare in zip(lacking, spares, strict=False))
            typer.echo(f"a run would use spares: {pairs}")

    listed = [{"host": p.where, "what": p.what, "hint": p.hint, "severity": p.severity} for p in problems]
    content = {"hosts": num_hosts, "ready": is_ready, "problems": listed}
    return Output(content, show, EXIT_OK if is_ready else EXIT_FAILED)


MonitorOperation = Literal["start", "stop", "restart", "status"]


def monitor(
    operation: Annotated[MonitorOperation | None, argument("start|stop|restart|status", "Operation.")] = None,
    option: Annotated[
        MonitorOperation | None,
        option("OPERATION", "The operation, as FlagPerf's monitors take it.", "--operation", "-o"),
    ] = None,
    vendor: options.Vendor = None,
    log_path: Annotated[Path, typer.Option("--log-path", "--log", "-l", help="Directory for the logs.")] = Path("logs"),
    interval: Annotated[float, typer.Option(min=0.05, help="Sampling interval in seconds.")] = 1.0,
    as_json: options.AsJson = False,
) -> Output:
    """Record telemetry in the background. Logs have FlagPerf's file names and formats."""
    from accelmark.spec.plugins.catalog import find
    from accelmark.telemetry import monitor as recorder
    from accelmark.telemetry.inventory import default_vendor

    if (operation is None) == (option is None):
        raise RequestError("name one operation: start, stop, restart or status")
    operation = operation or option
    log_path, was_running = log_path.absolute(), False
    starts = operation in ("start", "restart")
    if vendor is not None:
        find("vendors", vendor, "--vendor")
        if starts:
            recorder.check_vendor(vendor)  # before the running monitor is stopped
    if operation in ("stop", "restart"):
        was_running = recorder.stop(log_path)
    if starts:
        recorder.start(vendor or default_vendor(), log_path, interval)
    now = recorder.status(log_path)

    def show() -> None:
        if operation == "stop":
            typer.echo("stopped" if was_running else f"no monitor is running for {log_path}")
            return
        running = f"running as process {now.pid} ({now.vendor}, {now.num_samples} samples so far)"
        options.echo_wrapped(f"{running if now.running else 'not running'}, logs in {log_path}")
        if now.problem is not None:
            options.warn(f"only the host is recorded, devices of {now.vendor} cannot be read: {now.problem}")

    content = {"running": now.running, "pid": now.pid, "vendor": now.vendor, "samples": now.num_samples}
    return Output(content | {"problem": now.problem, "log_path": str(log_path)}, show)


def probe(
    vendor: options.Vendor = None,
    cluster: Annotated[Path | None, option("FILE", "Cluster file: measure its hosts together.")] = None,
    nproc: Annotated[int, typer.Option(min=1, help="Devices to measure together, on each host.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="matmul, memory, copies or collectives. Repeatable.")] = None,
    budget: Annotated[float, typer.Option(min=0.1, help="Approximate duration in seconds.")] = 60.0,
    as_json: options.AsJson = False,
) -> Output:
    """Measure matmul, memory, copy and collective rates. Later runs also report MFU against the measured rate."""
    from accelmark.report.charts import size_text
    from accelmark.run.measure import probe as measure
    from accelmark.spec.log.records import ProbeItem
    from accelmark.spec.plugins.catalog import load_vendor

    items = [item for item in get_args(ProbeItem) if not only or item in only]
    if unknown := [name for name in only or () if name not in items]:
        raise RequestError(f"--only {unknown[0]}: unknown item ({nearest(unknown[0], get_args(ProbeItem))})")
    hosts = _cluster_of(cluster, vendor) if cluster is not None else None
    here = detect_devices(vendor or (hosts.vendor if hosts is not None else None))
    if hosts is not None and hosts.vendor is None:
        raise RequestError(f"{cluster}: names no vendor: add 'vendor: NAME', or give --vendor")
    if hosts is None and here.num_devices is not None and nproc > here.num_devices:
        raise RequestError(f"--nproc {nproc}: this machine has {here.num_devices} devices of {here.vendor}")
    vendor_spec = load_vendor(here.vendor)
    doing = f"measuring {', '.join(items)} for about {duration(budget)}"
    with options.host_problems_printed(as_json=as_json), options.working(doing) as note:
        rates = measure(vendor_spec, here.hardware, nproc, items, budget, hosts, note)
    if rates.disturbed:
        unused = "these rates are not used for MFU, earlier undisturbed ones are kept"
        effect = unused if hosts is None else "these rates are lower bounds"
        options.warn(f"other work ran meanwhile: {'; '.join(rates.disturbed)}; {effect}. Repeat on idle hosts.")

    def show() -> None:
        # A CPU's name is its architecture.
        device = here.hardware if rates.device_type == "cpu" else rates.device_name
        where = f" on {len(rates.hosts)} hosts" if len(rates.hosts) > 1 else ""
        typer.echo(f"{device}, {counted(rates.world_size, 'rank')}{where}, {rates.framework}")
        kinds = [(kind, getattr(rates, kind)) for kind in get_args(ProbeItem)]
        measured = [(f"{kind} {name}", rate) for kind, by_name in kinds for name, rate in by_name.items()]
        lines = [(name, quantity(rate.value, rate.unit), rate.size or rate.reason or "") for name, rate in measured]
        options.print_table(("operation", "rate", "size or reason"), lines)
        if rates.sweep:
            sizes = []
            for timing in rates.sweep:
                bandwidths = (quantity(timing.algorithm_gb_s, "GB/s"), quantity(timing.bus_gb_s, "GB/s"))
                time = quantity(timing.time_us / 1e6, "s")
                sizes.append((timing.operation, size_text(timing.size_bytes), time, *bandwidths))
            options.print_table(("collective", "size", "time", "algorithm", "bus"), sizes)

    return Output(rates, show)


def detect_devices(vendor: str | None) -> Detected:
    """Return the devices of ``vendor`` on this machine; default: the first detected accelerator, else the CPU."""
    from accelmark.plan.request import Detected, host_capabilities
    from accelmark.run.measure import remembered
    from accelmark.spec.plugins.catalog import load_vendor
    from accelmark.telemetry.inventory import detect, measurable_vendors

    name, *others = (vendor,) if vendor else measurable_vendors()
    present = next((entry for entry in detect([name]) if entry.vendor == name), None)
    if present is None:
        return Detected(name, name.upper(), chip=None, num_devices=None, is_present=False, others=tuple(others))
    chips = set(present.chips)
    return Detected(
        vendor=name,
        hardware=present.hardware or name.upper(),
        chip=chips.pop() if len(chips) == 1 else None,
        num_devices=None if present.fallback else len(present.devices),
        ceilings=remembered(name, present.hardware or name.upper()),
        capabilities=host_capabilities(load_vendor(name)),
        others=tuple(others),
        problem=present.problem,
    )


env = group("env", "Virtual environments of frameworks.")
Framework = Annotated[str, argument("FRAMEWORK", "A framework, such as jax.", completion.frameworks)]
Place = Annotated[Path | None, option("DIR", "Directory; default: in AccelMark's cache.", "--path")]
Hosts = Annotated[Path | None, option("CLUSTER", "On the hosts of this cluster file.", "--hosts")]


@env.command(cls=Verb)
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


@env.command("list", cls=Verb)
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


@env.command(cls=Verb)
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
