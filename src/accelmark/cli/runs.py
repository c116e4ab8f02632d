"""Verbs that start, continue, follow and stop runs: train, infer, serve, run, cluster, resume, status, stop."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer import Option

import accelmark
from accelmark.cli import completion, options
from accelmark.cli.machine import detect_devices
from accelmark.cli.options import Output, argument, flag, option
from accelmark.results.store.files import write_atomic
from accelmark.spec.errors import EXIT_FAILED, AccelmarkError, Problem, RequestError, SpecError
from accelmark.spec.number_format import duration_s

if TYPE_CHECKING:
    from accelmark.plan.plan import Plan
    from accelmark.plan.tuning import Budget
    from accelmark.run.controller.coordinator import RunOutcome
    from accelmark.run.launchers import SubmittedJob
    from accelmark.spec.runfile import RunSpec

COMMAND_LINE: Final = "command line"
_KeyOfOneHost = Annotated[str, argument("KEY", "model[:framework[:hardware[:1[:devices[:repeat]]]]]", completion.cases)]


def train(
    key: Annotated[str, argument("KEY", "model[:framework[:hardware[:nnodes[:nproc[:repeat]]]]]", completion.cases)],
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    tolerate_bad_samples: options.BadSamples = None,
    is_open: options.Open = False,
    strict: options.Strict = False,
    timeout: options.Timeout = None,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    commands: options.Commands = False,
    write_reference: Annotated[
        bool, flag("--write-reference", "Store the loss curve as the reference of the case, in its folder.")
    ] = False,
    reference_file: Annotated[Path | None, option("FILE", "Store the loss curve in this file instead.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a case and measure it. Writes a run directory with a report page."""
    request = _request(key, "train", {}, data, vendor=vendor, open=is_open, strict=strict, timeout_s=timeout)
    tolerated = [] if tolerate_bad_samples is None else [f"loader.tolerate_bad_samples={tolerate_bad_samples}"]
    overrides = [*tolerated, *(settings or ())]
    plan = plan_request(request, overrides, synthetic=synthetic, allow_missing_data=dry_run or commands)
    file = _reference_file(plan, reference_file) if write_reference or reference_file is not None else None
    try:
        directory = execute(plan, out, offline=offline, dry_run=dry_run, with_commands=commands, as_json=as_json)
    except typer.Exit:
        if file is not None:
            options.warn(f"{file}: not written: the run was not completed, or is INVALID")
        raise
    if file is not None and directory is not None:
        import yaml

        from accelmark.results.rounds.training import reference_of

        curve = reference_of(directory / plan.jobs[0].directory, accelmark.__version__)
        head = f"# Written by 'accelmark train {plan.jobs[0].job.key} --write-reference'.\n"
        text = yaml.safe_dump(curve.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120)
        write_atomic(file, head + text)
        if not as_json:
            options.echo_wrapped(f"reference loss: {len(curve.steps)} steps up to {curve.steps[-1]}, written to {file}")


def _reference_file(plan: Plan, given: Path | None) -> Path:
    """Return the file for the reference of a plan's only key, before it is started."""
    from accelmark.spec.job import TrainJob
    from accelmark.spec.plugins.case import REFERENCE_FILE
    from accelmark.spec.plugins.catalog import find, load_case

    job = plan.jobs[0].job
    if not isinstance(job.work, TrainJob) or job.work.settings.loader.synthetic or plan.open:
        needs = "the case's own settings and data: not --synthetic, --open or a trainer"
        raise RequestError(f"--write-reference needs {needs}")
    path, train = given or find("cases", job.key.model).path / REFERENCE_FILE, load_case(job.key.model).train
    if given is None and train is not None and train.reference_loss is not None:
        what = f"the case has a reference ({train.reference_loss.source})"
        raise RequestError(f"{path}: {what}; remove it, or name a file with --reference-file")
    if path.exists() or not os.access(path.parent, os.W_OK):
        what = "exists already" if path.exists() else f"{path.parent} is not a directory that can be written to"
        raise RequestError(f"{path}: {what}; name another file with --reference-file")
    return path


def infer(
    key: _KeyOfOneHost,
    compiler: Annotated[
        str | None,
        option("NAME", "Inference engine; 'none' stops after the framework's own.", complete=completion.engines),
    ] = None,
    precision: Annotated[str | None, Option(help="fp32, tf32, bf16, fp16 or int8.")] = None,
    batch_size: Annotated[int | None, Option(min=1, help="Items in one call.")] = None,
    scenario: Annotated[
        list[str] | None,
        Option(
            help="LoadGen scenario: offline, single_stream, multi_stream or server. Repeatable.",
            autocompletion=completion.scenarios,
        ),
    ] = None,
    tune: Annotated[
        bool, flag("--tune", "Search engine, precision, batch, streams, threads; report as shipped and tuned.")
    ] = False,
    budget: Annotated[
        str | None, option("TIME|TRIALS", "Limit of --tune: 20m, 2h or 30 (trials); default: 15m.")
    ] = None,
    tuned_file: Annotated[Path | None, option("FILE", "Write the best settings as a vendor's YAML file.")] = None,
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    is_open: options.Open = False,
    strict: options.Strict = False,
    timeout: options.Timeout = None,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    commands: options.Commands = False,
    as_json: options.AsJson = False,
) -> None:
    """Run inference on a case's trained model in an engine. The report has its accuracy with its speed."""
    given = {"precision": precision, "batch_size": batch_size, "scenarios": tuple(scenario or ()) or None}
    named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if compiler is not None:
        named["compiler"] = None if compiler == "none" else compiler
    request = _request(key, "infer", named, data, vendor=vendor, open=is_open, strict=strict, timeout_s=timeout)
    limits = _budget(tune, budget, tuned_file)
    plan = plan_request(request, settings or (), synthetic=synthetic, allow_missing_data=dry_run or commands)
    if limits is not None:
        from accelmark.plan.tuning import tuned_plan

        plan = tuned_plan(plan, detect_devices(plan.vendor).capabilities, limits)
    execute(plan, out, offline=offline, dry_run=dry_run, with_commands=commands, as_json=as_json)


def _budget(is_search: bool, text: str | None, settings_file: Path | None) -> Budget | None:
    """Return the limits of a search: a time as ``20m`` or ``1.5h``, or a number of trials; None without a search."""
    if not is_search:
        if text is not None or settings_file is not None:
            raise RequestError("--budget and --tuned-file have no effect without --tune")
        return None
    from accelmark.plan.tuning import Budget

    if settings_file is not None and not settings_file.expanduser().absolute().parent.is_dir():
        raise RequestError(f"--tuned-file {settings_file}: there is no directory {settings_file.parent}")
    text = text or "15m"
    trials = int(text) if text.isdecimal() else None
    time_s = None
    with contextlib.suppress(ValueError):
        time_s = duration_s(text) if trials is None else None
    if not (trials or time_s or 0) > 0:
        raise RequestError(f"--budget {text}: neither a number of trials nor a time such as 90s, 20m or 1.5h")
    return Budget(time_s, trials, settings_file)


def run(
    file: Annotated[
        Path,
        argument("FILE|SUITE", "Run file (YAML), or a suite, as quickstart or vision.", completion.suites),
    ],
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    is_open: options.Open = False,
    strict: options.Strict = False,
    fail_fast: options.FailFast = False,
    timeout: options.Timeout = None,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    commands: options.Commands = False,
    submit: Annotated[bool, flag("--submit", "Submit the run as a batch job (launcher: slurm).")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run all cases of a run file, one round after another."""
    file = options.shipped_file(file, "suites")
    given = {"vendor": vendor, "open": is_open, "strict": strict, "fail_fast": fail_fast, "timeout_s": timeout}
    request = read_run_file(file)
    request = request.model_copy(update={name: value for name, value in given.items() if value})
    plan = plan_request(
        request, settings or (), synthetic=synthetic, where=str(file), base=file.parent,
        allow_missing_data=dry_run or commands,
    )  # fmt: skip
    execute(
        plan, out, runs=request.runs, offline=offline, dry_run=dry_run, with_commands=commands, as_json=as_json,
        submit=submit,
    )  # fmt: skip


def cluster(
    file: Annotated[Path, argument("CLUSTER", "Cluster file.")],
    case: Annotated[str, Option(help="Case that is trained: MODEL or MODEL:FRAMEWORK.")] = "llama_mini",
    hardware: Annotated[str | None, Option(help="Chip of the hosts, as in keys; default: this machine's.")] = None,
    nproc: Annotated[int, Option(min=1, help="Devices on each host.")] = 1,
    steps: Annotated[int, Option(min=4, help="Optimizer steps of each training.")] = 400,
    budget: Annotated[float, Option(min=0.1, help="Approximate seconds for collectives.")] = 60.0,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    commands: options.Commands = False,
    as_json: options.AsJson = False,
) -> Output | None:
    """Measure all hosts of a cluster file together: scaling, collectives, checkpoints, recovery from a killed rank.

    --dry-run shows two runs: scaling with checkpoints, and recovery. With --json, it prints a line for each.
    """
    from accelmark.report.cluster_page import write_cluster_page
    from accelmark.results.cluster import RECOVERY_DIR, SCALING_DIR
    from accelmark.run.launchers import create_launcher
    from accelmark.run.measure import ClusterRequest, measure
    from accelmark.run.record.directory import default_path
    from accelmark.spec.plugins.launcher import read_cluster
    from accelmark.spec.runfile import CaseRequest, RunSpec

    hosts = read_cluster(file)
    here = detect_devices(vendor or hosts.vendor)
    if hardware is None and not here.is_present:
        what = f"this machine has no device of {here.vendor}"
        raise RequestError(f"--hardware: {what}: name the chip of the hosts, as in keys")
    model, _, framework = case.partition(":")
    counts = sorted({1, len(hosts.hosts)})
    keys = [f"{model}:{framework or 'pytorch'}:{hardware or here.hardware}:{count}:{nproc}" for count in counts]
    every = max(1, steps // 4)
    bounds = {"end.max_steps": steps, "end.at_target": False, "log_every_steps": max(1, min(10, every // 2))}
    given: dict[str, Any] = {**bounds, "checkpoint.every_steps": every, "checkpoint.keep": 2}

    def planned(name: str, *chosen: str) -> Plan:
        cases = tuple(CaseRequest(key=key, settings=given) for key in chosen)
        request = RunSpec(name=name, vendor=vendor or hosts.vendor, open=True, cluster=hosts, cases=cases)
        plan = plan_request(request, settings or (), synthetic=synthetic, where="accelmark cluster")
        return plan.model_copy(update={"offline": offline})

    scaling, recovery = planned("scaling", *keys), planned("recovery", keys[-1])
    directory = out or default_path(f"cluster-{hosts.name}", datetime.now(UTC))
    if dry_run or commands:
        from accelmark.cli.dry_run import print_plan

        for part, name in ((scaling, SCALING_DIR), (recovery, RECOVERY_DIR)):
            print_plan(part, directory / name, as_json=as_json, with_commands=commands)
        return None
    if not as_json:
        for warning in scaling.warnings:
            options.warn(warning)
        if create_launcher(scaling, directory / SCALING_DIR).allocation_commands():
            options.warn("each part requests an allocation, and recovery includes the wait for it: run this inside one")
    kill_step = every + max(1, every // 2)
    request = ClusterRequest(scaling, recovery, kill_step, budget, options.working, as_json=as_json)
    with options.host_problems_printed(as_json=as_json):
        report = measure(request, directory)
    page, headlines = write_cluster_page(directory)

    def show() -> None:
        options.print_table(("part", "result", "note"), headlines)
        typer.echo(f"page: {page}")

    return Output({"page": str(page), "report": report}, show)


def resume(
    run: options.RunPath = options.LATEST,
    redo_failed: Annotated[bool, flag("--failed", "Also repeat rounds that failed or timed out.")] = False,
    from_scratch: Annotated[bool, flag("--from-scratch", "Ignore checkpoints.")] = False,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> None:
    """Continue an interrupted run. Follows running rounds, repeats lost and cancelled ones, skips finished ones."""
    from accelmark.run.controller import coordinator
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.preflight.hosts import run_preflight

    with options.host_problems_printed(as_json=as_json):
        outcome = coordinator.resume(
            options.own_run(run), DataFetcher(offline), run_preflight, redo_failed=redo_failed,
            from_scratch=from_scratch, as_json=as_json,
        )  # fmt: skip
    finish(outcome, as_json=as_json)


def status(run: options.RunPath = options.LATEST, as_json: options.AsJson = False) -> Output:
    """Show the state and progress of every round of a run."""
    from accelmark.run.display.summary import print_status, read_status

    if (waiting := submitted_job(run)) is not None:
        where, job = waiting
        none_yet: dict[str, object] = {"coordinator": None, "machine": None, "jobs": {}}
        content = {"run": str(where)} | none_yet | {"submitted": job.state}
        return Output(content, lambda: options.echo_wrapped(f"{run}: {job.state}"))
    current = read_status(options.own_run(run))
    jobs = {
        name: state._asdict() | {"progress": asdict(current.progress[name]) if name in current.progress else None}
        for name, state in current.statuses.items()
    }
    process = current.coordinator
    machine = process.hostname if process is not None and process.is_elsewhere else None
    coordinator = {"coordinator": process.pid if process is not None else None, "machine": machine}
    content = {"run": str(current.directory.path), **coordinator, "jobs": jobs}
    return Output(content, lambda: print_status(current))


def stop(
    run: options.RunPath = options.LATEST,
    at_once: Annotated[bool, flag("--now", "Kill the ranks instead of letting them end.")] = False,
    as_json: options.AsJson = False,
) -> Output:
    """Stop a run. This works even if its coordinator has died; results so far are kept."""
    from accelmark.run.controller.coordinator import stop as stop_run
    from accelmark.run.display.summary import how_to_continue
    from accelmark.run.record.directory import RunDirectory

    if (waiting := submitted_job(run)) is not None:
        where, job = waiting
        if job.may_start:
            job.cancel()
        text = f"{run}: {f'job {job.number} was cancelled' if job.may_start else job.state}"
        return Output({"run": str(where), "stopped": job.may_start}, lambda: options.echo_wrapped(text))
    run = options.own_run(run)
    with options.working("stopping"):
        was_running = stop_run(run, at_once=at_once)

    def show() -> None:
        typer.echo(f"{run}: stopped" if was_running else f"{run}: not running")
        if advice := how_to_continue(run, {status.state for status in RunDirectory.open(run).statuses().values()}):
            typer.echo(advice)

    return Output({"run": str(run), "stopped": was_running}, show)


def _request(
    key: str, task: Literal["train", "infer", "serve"], settings: dict[str, Any], data: Path | None, **limits: Any
) -> RunSpec:
    from accelmark.spec.runfile import CaseRequest, RunSpec

    name = run_name(key) + ("" if task == "train" else f"-{task}")
    return RunSpec(name=name, cases=(CaseRequest(key=key, task=task, data=data, settings=settings),), **limits)


def execute(
    plan: Plan,
    out: Path | None,
    *,
    runs: Path | None = None,
    offline: bool = False,
    as_json: bool,
    dry_run: bool = False,
    with_commands: bool = False,
    submit: bool = False,
    is_judged: bool = False,
) -> Path | None:
    """Execute or submit ``plan``, or only print it, and end with the exit code of the run unless it is 0.

    The run directory is ``out``, or a new one in ``runs``. ``is_judged``: the caller judges a run that failed or is
    INVALID. Returns the run directory, or None where nothing was started.
    """
    from accelmark.run.launchers import submit_module
    from accelmark.run.record.directory import default_path, require_empty

    path = out or default_path(plan.name, datetime.now(UTC), runs or Path("runs"))
    # The same command in a batch job, which names the run directory.
    inside = [argument for argument in sys.argv[1:] if argument not in ("--submit", "--dry-run", "--commands")]
    inside += [] if out is not None else ["--out", str(path.absolute())]
    if plan.strict and plan.warnings:
        raise RequestError("\n".join(["not started: --strict is set and there are warnings:", *plan.warnings]))
    if dry_run or with_commands:
        from accelmark.cli.dry_run import print_plan

        script = submit_module(plan).batch_script(plan, path.absolute(), inside) if submit else None
        print_plan(plan, path, as_json=as_json, with_commands=with_commands, script=script)
        return None
    if submit:
        place = path.absolute()
        require_empty(place)
        number = submit_module(plan).submit(plan, place, inside)
        if as_json:
            typer.echo(json.dumps({"run": str(place), "job": number}))
        else:
            typer.echo(f"submitted as job {number}; it writes {place}\nfollow it with 'accelmark status {place}'")
        return None
    from accelmark.run.controller import coordinator
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.preflight.hosts import run_preflight

    plan = plan.model_copy(update={"offline": offline})
    if not as_json:
        for warning in plan.warnings:
            options.warn(warning)
    with options.host_problems_printed(as_json=as_json):
        outcome = coordinator.start(plan, path, DataFetcher(offline), run_preflight, as_json=as_json)
    finish(outcome, as_json=as_json, is_judged=is_judged)
    return outcome.directory


def submitted_job(run: Path) -> tuple[Path, SubmittedJob] | None:
    """Return the path and the batch job of a run that was submitted and has no directory (yet), else None."""
    from accelmark.run.launchers import submitted

    paths = (run.absolute(), Path("runs").absolute() / run)
    if any(path.exists() for path in paths):
        return None
    return next(((path, job) for path in paths if (job := submitted(path)) is not None), None)


def finish(outcome: RunOutcome, *, as_json: bool, is_judged: bool = False) -> None:
    """Write the report page, print the results, and exit with the exit code of the run."""
    from accelmark.report.run_page import write_page
    from accelmark.run.display.summary import print_summary

    page = None
    try:
        page = write_page(outcome.directory)
    except AccelmarkError as error:  # the results exist
        if not as_json:
            options.warn(f"cannot write the report page: {error}")
    if as_json:
        done = {"event": "summary", "directory": str(outcome.directory), "page": str(page) if page else None}
        summary = outcome.summary.model_dump(mode="json")
        typer.echo(json.dumps(done | {"exit_code": outcome.exit_code, "summary": summary}))
    else:
        print_summary(outcome.summary, outcome.directory, page)
    if outcome.summary.tuning is not None:
        write_settings_file(outcome.directory, as_json=as_json)
    if outcome.exit_code and not (is_judged and outcome.exit_code == EXIT_FAILED):
        raise typer.Exit(outcome.exit_code)


def write_settings_file(run_dir: Path, *, as_json: bool) -> None:
    """Write the best settings of a search to the file that its plan names, or why they are not recommended."""
    from accelmark.results.store.loaded_run import load_run
    from accelmark.results.tuning import tuned_result
    from accelmark.run.record.directory import RunDirectory

    plan = RunDirectory.open(run_dir).plan
    if plan.tuning is None or plan.tuning.settings_file is None:
        return
    file, run = plan.tuning.settings_file, load_run(run_dir, curves=False)
    search = tuned_result(run.summary, run.rounds)
    if search is None or not search.is_better:
        if not as_json:
            why = "the search did not end" if search is None else search.conclusion
            options.warn(f"{file}: not written: {why}")
        return
    import yaml

    from accelmark.plan.tuning import vendor_values
    from accelmark.spec.layers import nest

    shipped = plan.jobs[0].job
    tuned = next(job.job for job in plan.jobs if job.job.role == "tuned")
    key = shipped.key
    name = f"{key.model}-{key.framework}/infer_{key.hardware}x{key.nnodes}x{key.nproc}.yaml"
    origin = (
        f"Found by accelmark infer {key.model} --tune on {plan.created_at[:10]}, AccelMark {plan.accelmark_version}"
    )
    place = f"To ship it: vendors/{plan.vendor}/cases/{name}"
    head = "".join(f"# {line}.\n" for line in (origin, search.conclusion, place))
    write_atomic(file, head + yaml.safe_dump(nest(vendor_values(shipped, tuned)), sort_keys=False))
    if not as_json:
        typer.echo(f"Settings  {file}")


def plan_request(
    request: RunSpec,
    settings: Sequence[str],
    *,
    synthetic: bool,
    where: str = COMMAND_LINE,
    base: Path = Path(),
    allow_missing_data: bool = False,
) -> Plan:
    """Return the plan of a request on the devices of this machine or of its cluster.

    ``settings`` are ``dotted.key=value``, the strongest layer. ``where`` is the run file or ``command line``, for
    errors; the path of a cluster file is relative to ``base``. ``allow_missing_data``: list missing data in the plan
    instead of raising. Raises AccelmarkError with all problems.
    """
    from accelmark.plan.build import build_plan
    from accelmark.run.controller.data import data_dirs
    from accelmark.run.environments.create import with_environments
    from accelmark.spec.plugins.catalog import find, load_vendor
    from accelmark.spec.plugins.launcher import read_cluster
    from accelmark.telemetry.forms import telemetry_of

    cluster = request.cluster
    if isinstance(cluster, Path):
        cluster = read_cluster(base / cluster.expanduser())
    vendor = request.vendor or cluster.vendor
    if vendor is not None:
        find("vendors", vendor, where)
    plan = build_plan(
        request,
        cluster=cluster,
        detected=detect_devices(vendor),
        data_dirs=data_dirs,
        created_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        where=where,
        command_line=setting_values(settings, synthetic=synthetic),
        allow_missing_data=allow_missing_data,
    )
    plan = with_environments(plan)
    unread: list[str] = []
    try:
        telemetry_of(load_vendor(plan.vendor), str(find("vendors", plan.vendor).path / "vendor.yaml"))
    except SpecError as error:  # devices are not sampled then, but ranks run
        unread = [f"no telemetry of devices: {problem}" for problem in error.problems]
    return plan.model_copy(update={"warnings": (*plan.warnings, *unread)})


def setting_values(settings: Sequence[str], *, synthetic: bool) -> dict[str, Any]:
    """Return ``--set`` options as dotted keys; raises SpecError with those that are not ``key=value``."""
    from accelmark.spec.model import read_value

    values: dict[str, Any] = {"loader.synthetic": True} if synthetic else {}
    problems = []
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problems.append(Problem(COMMAND_LINE, f"--set {text}", "is not of the form key=value"))
            continue
        values[key.strip()] = read_value(value, f"{COMMAND_LINE}: --set {key}")
    if problems:
        raise SpecError(problems)
    return values


def read_run_file(path: Path) -> RunSpec:
    """Read a run file; its directories of data and runs are relative to it. Raises SpecError with all problems."""
    from accelmark.spec.model import parse, read_yaml
    from accelmark.spec.plugins.catalog import add_plugins
    from accelmark.spec.plugins.launcher import launcher_problems
    from accelmark.spec.rules import resolve_rules
    from accelmark.spec.runfile import RunSpec

    add_plugins(path.parent)
    values = read_yaml(path)
    if "hosts" in values and "cases" not in values:
        raise SpecError([Problem(str(path), "", "is a cluster file", "name it as 'cluster' in a run file")])
    paths = [(case, "data") for case in values.get("cases") or [] if isinstance(case, dict)]
    for part, key in [*paths, (values, "runs")]:
        if isinstance(part.get(key), str):
            part[key] = str(path.parent / Path(part[key]).expanduser())
    resolve_rules(values, path)
    cluster = values.get("cluster")
    problems = launcher_problems(cluster, str(path), "cluster.") if isinstance(cluster, dict) else []
    return parse(RunSpec, {"name": path.stem} | values, str(path), problems)


def run_name(key: str) -> str:
    """Return a name for the run of a single key: its model, without characters that paths cannot have."""
    name = "".join(sign if sign.isalnum() or sign in "._-" else "-" for sign in key.partition(":")[0])
    return name.strip(".-_")[:57] or "case"


def serve(
    key: _KeyOfOneHost,
    server: Annotated[
        str | None, option("NAME", "Server to start; default: the case's.", complete=completion.servers)
    ] = None,
    endpoint: Annotated[str | None, option("URL", "Base URL of a running server instead; needs --model.")] = None,
    model: Annotated[str | None, option("NAME", "Model name in requests.")] = None,
    concurrency: Annotated[
        list[int] | None, Option(min=1, help="Closed load: requests in progress in a stage. Repeatable.")
    ] = None,
    rate: Annotated[
        list[float] | None, Option(min=0.001, help="Open load, Poisson: requests per second in a stage. Repeatable.")
    ] = None,
    duration: Annotated[float | None, Option(min=0.1, help="Seconds in which requests of a stage are started.")] = None,
    ttft: Annotated[float | None, option("MS", "SLO: greatest time to first token.", min=0.001)] = None,
    tpot: Annotated[float | None, option("MS", "SLO: greatest time per output token.", min=0.001)] = None,
    slo: Annotated[str | None, option("PRESET", "SLO: MLPerf's limits of a model, for example llama3_1_8b.")] = None,
    search: Annotated[bool, flag("--search", "Search the highest rate that holds the SLO.")] = False,
    scenario: Annotated[
        list[str] | None, Option(help="LoadGen scenario with token latencies: server or offline. Repeatable.")
    ] = None,
    precision: Annotated[str | None, Option(help="fp32, bf16, fp16 or int8.")] = None,
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    is_open: options.Open = False,
    strict: options.Strict = False,
    timeout: options.Timeout = None,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    commands: options.Commands = False,
    as_json: options.AsJson = False,
) -> None:
    """Serve a language model under load: latencies, throughput, goodput. Starts the server or takes a running one."""
    if Path(key).is_dir():
        raise RequestError(f"{key}: is a directory; the web pages over many runs are: accelmark view {key}")
    if concurrency and rate:
        raise RequestError("--concurrency is a closed load, --rate an open one: name one of them")
    given = {
        "server": server, "endpoint": endpoint, "served_model": model, "precision": precision,
        "load.concurrency": tuple(concurrency or ()) or None, "load.rates": tuple(rate or ()) or None,
        "load.arrival": "poisson" if rate else None, "load.duration_s": duration, "load.search": search or None,
        "slo.preset": slo, "slo.ttft_ms": ttft, "slo.tpot_ms": tpot, "scenarios": tuple(scenario or ()) or None,
    }  # fmt: skip
    named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    request = _request(key, "serve", named, data, vendor=vendor, open=is_open, strict=strict, timeout_s=timeout)
    plan = plan_request(request, settings or (), synthetic=False, allow_missing_data=dry_run or commands)
    execute(plan, out, offline=offline, dry_run=dry_run, with_commands=commands, as_json=as_json)
