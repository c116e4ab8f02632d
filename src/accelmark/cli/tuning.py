"""``accelmark infer --tune``: the plan of a search for the best settings, its description, and its settings file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from accelmark.cli import options
from accelmark.spec.errors import RequestError
from accelmark.spec.number_format import duration, duration_s

if TYPE_CHECKING:
    from accelmark.plan.plan import Plan
    from accelmark.plan.tuning import Budget

DEFAULT_BUDGET: Final = "15m"


def read_budget(is_search: bool, text: str | None, settings_file: Path | None) -> Budget | None:
    """Return the limits of a search: a time as ``20m`` or ``1.5h``, or a number of trials; None without a search."""
    if not is_search:
        if text is not None or settings_file is not None:
            raise RequestError("--budget and --tuned-file have no effect without --tune")
        return None
    from accelmark.plan.tuning import Budget

    if settings_file is not None and not settings_file.expanduser().absolute().parent.is_dir():
        raise RequestError(f"--tuned-file {settings_file}: there is no directory {settings_file.parent}")
    text = text or DEFAULT_BUDGET
    trials = int(text) if text.isdecimal() else None
    time_s = None
    with contextlib.suppress(ValueError):
        time_s = duration_s(text) if trials is None else None
    if not (trials or time_s or 0) > 0:
        raise RequestError(f"--budget {text}: neither a number of trials nor a time such as 90s, 20m or 1.5h")
    return Budget(time_s, trials, settings_file)


def with_search(plan: Plan, budget: Budget) -> Plan:
    """Return the plan of a search that starts from the settings of ``plan``, on this machine."""
    from accelmark.cli.machine import detect_devices
    from accelmark.plan.tuning import Machine, tuned_plan
    from accelmark.spec.plugins.catalog import engine_specs, find

    engines = engine_specs(find("vendors", plan.vendor).path)
    machine = Machine(len(os.sched_getaffinity(0)), detect_devices(plan.vendor).capabilities, engines)
    return tuned_plan(plan, machine, budget)


def search_lines(plan: Plan) -> list[str]:
    """Return the settings that a search tries, in its order, and its limits."""
    from accelmark.results.figures import FigureName, title_of, unit_of

    tuning = plan.tuning
    if tuning is None:
        return []
    figure, unit, limits = FigureName(tuning.figure), plan.jobs[0].job.work.unit, []
    if tuning.budget_s is not None:
        limits = [f"trials while they and all other rounds fit into {duration(tuning.budget_s)}"]
    limits += [f"at most {tuning.max_trials} trials"] if tuning.max_trials is not None else []
    limits += [f"a round at most {duration(plan.timeout_s)}"] if plan.timeout_s is not None else []
    lines = [
        f"search for the best {title_of(figure, unit)} ({unit_of(figure, unit)}, {tuning.better} is better): "
        + ", ".join(limits),
        "one setting after the other from the settings as shipped, until no change is better by more than 1 %; "
        "results beyond the case's accuracy tolerance cannot be chosen",
    ]
    for choice in tuning.choices:
        tried = ", ".join(" ".join(map(_shown, settings.values())) for settings in choice.values)
        names = " and ".join(choice.values[0])
        lines.append(f"  {f'{choice.engine}: ' if choice.engine else ''}{names}: {tried}")
    rounds = tuning.num_rounds
    lines.append(f"then {rounds} rounds as shipped and {rounds} tuned in turn (the first as shipped begins the search)")
    if tuning.budget_s is not None:
        lines.append(f"without time for a trial, the {rounds} rounds as shipped only, which may exceed the limit")
    if tuning.settings_file is not None:
        lines.append(f"writes the best settings to {tuning.settings_file}")
    return lines


def _shown(value: Any) -> str:
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def write_settings_file(run_dir: Path, *, as_json: bool) -> None:
    """Write the best settings of a search to the file that its plan names, or why they are not recommended."""
    from accelmark.results.store.files import write_atomic
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
    name = f"infer_{key.hardware}x{key.nnodes}x{key.nproc}.yaml"
    place = f"vendors/{plan.vendor}/cases/{key.model}-{key.framework}/{name}"
    origin = f"Found by accelmark infer {key.model} --tune on {plan.created_at[:10]}"
    lines = (f"{origin}, AccelMark {plan.accelmark_version}", search.conclusion, f"To ship it: {place}")
    head = "".join(f"# {line}.\n" for line in lines)
    write_atomic(file, head + yaml.safe_dump(nest(vendor_values(shipped, tuned)), sort_keys=False))
    if not as_json:
        typer.echo(f"Settings  {file}")
