"""Print the summary of a finished run, or the status of one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from accelmark.results.cluster import ScalingCurve, scaling_curves
from accelmark.results.figures import FigureName, format_figure, title_of
from accelmark.results.read.round_dir import node_dirs, reevaluation_dir, was_cancelled
from accelmark.results.schema import CaseResult, Summary, marks_text
from accelmark.results.store.loaded_run import load_run
from accelmark.results.tuning import tuned_result
from accelmark.run.display.displays import SIGNS, JobProgress, ProgressReader, job_name, plain_progress, print_hanging
from accelmark.run.processes import ProcessId
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.states import JobStatus
from accelmark.spec.errors import RunError
from accelmark.spec.number_format import counted, percent

_VERDICT_STYLE: Final = {"VALID": "bold green", "OPEN": "bold yellow", "INVALID": "bold red"}
_VERDICT_SIGNS: Final = {"VALID": ("✓", "green"), "OPEN": ("○", "yellow"), "INVALID": ("✕", "red")}
_TO_CONTINUE: Final = {"cancelled": "", "lost": "", "failed": " --failed", "timed_out": " --failed"}
"""State of a round that can be repeated -> the option of ``resume`` that repeats it."""
_NOTHING: Final = "-"
_MAX_SETTINGS: Final = 3
"""Changed settings of a case that the line of the vendor names."""
_NUM_FIXED: Final = 3
"""Columns of the table that are always shown."""
_SPEED: Final = {
    "train": FigureName.THROUGHPUT_STEADY, "infer": FigureName.INFERENCE_CORE, "serve": FigureName.OUTPUT_RATE,
}  # fmt: skip
_TIME: Final = {
    "train": FigureName.RAW_TRAIN_TIME, "infer": FigureName.E2E_TIME, "serve": FigureName.E2E_TIME,
}  # fmt: skip

_ASKED: Final = (
    FigureName.OFFLINE_RATE, FigureName.SINGLE_STREAM_LATENCY, FigureName.MULTI_STREAM_LATENCY, FigureName.SERVER_RATE,
    FigureName.LOADGEN_OFFLINE_TOKENS, FigureName.LOADGEN_SERVER_TOKENS, FigureName.SLO_RATE,
    FigureName.PREFILL_RATE, FigureName.DECODE_RATE,
)  # fmt: skip
"""Figures of LoadGen's scenarios, generation and the search for a rate, which only some runs have."""
_BEFORE: Final = (FigureName.VALIDATION_CORE, FigureName.VALIDATION_METRIC)
"""Figures of the framework, which are all that inference without an engine has."""


def print_summary(summary: Summary, run_dir: Path, page: Path | None, console: Console | None = None) -> None:
    """Print the results of a run, the reasons why any is invalid, and the path of its page."""
    console = console or Console(highlight=False)
    with console.capture() as captured:
        console.print()
        measured = summary.measured
        console.print(_table(measured))
        for word, text in dict.fromkeys((_judgement(case), case.verdict_text) for case in measured):
            console.print(Padding(Text.assemble((f"{word}: ", "bold"), text), (0, 0, 0, 3), expand=False))
        for line in _detail_lines(measured):
            console.print(Padding(line, (0, 0, 0, 3), expand=False))
        _print_search(summary, run_dir, console)
        console.print(_vendor_line(summary))
        with contextlib.suppress(RunError):
            for line in scaling_lines(scaling_curves([load_run(run_dir)])):
                console.print(line, soft_wrap=True)
        for case in measured:
            if case.reasons or case.warnings:
                console.print(Text(f"  {case.key} {case.variant}" if case.variant else f"  {case.key}", style="bold"))
            for reason in (*case.reasons, *case.warnings):
                style = "red" if reason in case.reasons else "yellow"
                console.print(Padding(Text(reason, style=style), (0, 0, 0, 4), expand=False))
        for problem in summary.problems:
            console.print(Text(f"  {problem}", style="red"))
        console.print()
        console.print(Text(f"Run   {_relative(run_dir)}"), soft_wrap=True)
        if page is not None:
            console.print(Text(f"Page  {_relative(page)}", style="bold"), soft_wrap=True)
        if advice := how_to_continue(run_dir, {case.state for case in measured}):
            console.print(Text(advice, style="bold yellow"), soft_wrap=True)
    lines = captured.get().split("\n")
    print("\n".join(line.rstrip(" ") for line in lines), end="", file=console.file)


def how_to_continue(run_dir: Path, states: Collection[str]) -> str:
    """Return the command that repeats rounds of an ended run in these states, or an interrupted evaluation; else ''."""
    if not _TO_CONTINUE.keys() & states and not any(map(was_cancelled, run_dir.glob("*/round*"))):
        return ""
    option = max(_TO_CONTINUE.get(state, "") for state in states)
    return f"Continue with: accelmark resume {_relative(run_dir)}{option}"


def _print_search(summary: Summary, run_dir: Path, console: Console) -> None:
    """Print the trials of a search for the best settings, and how much better those are; nothing of other runs."""
    if summary.tuning is None:
        return
    with contextlib.suppress(RunError):
        search = tuned_result(summary, load_run(run_dir, curves=False).rounds)
        if search is None:
            return
        table = Table(box=None, header_style="dim", pad_edge=False)
        numbers = ("figure", "accuracy diff.")
        for heading in ("trial", "settings", *numbers, "outcome"):
            table.add_column(heading, overflow="fold", justify="right" if heading in numbers else "left")
        for trial in search.trials:
            cells = (str(trial.number), trial.settings, trial.figure, trial.metric, trial.outcome)
            table.add_row(*map(Text, cells))
        console.print()
        if search.trials:
            console.print(table)
        console.print(Text(search.conclusion, style="bold"), soft_wrap=not console.is_terminal)


def _vendor_line(summary: Summary) -> Text:
    """Return the vendor of a run, and what it changed in the standard cases: hooks, engines, kernels, settings."""
    parts: list[str] = []
    for case in (case for case in summary.cases if case.role in (None, "as shipped")):
        if (cost := case.adaptation) is None:
            continue
        changed = [*(f"hook {hook.name}" for hook in cost.hooks), *(f"engine {name}" for name in cost.engines)]
        changed += [counted(len(cost.kernels), "kernel file")] if cost.kernels else []
        changed += [f"{key.key} {key.standard} -> {key.value}" for key in cost.keys[:_MAX_SETTINGS]]
        changed += [f"{len(cost.keys) - _MAX_SETTINGS} more settings"] if len(cost.keys) > _MAX_SETTINGS else []
        if changed:
            parts.append(f"{case.key.model}: {', '.join(changed)}")
    if not parts:
        return Text.assemble(f"Vendor {summary.vendor}: ", ("standard cases, nothing changed", "dim"))
    return Text.assemble(f"Vendor {summary.vendor} changed ", ("; ".join(dict.fromkeys(parts)), "yellow"))


def _table(cases: Sequence[CaseResult]) -> Table:
    rows = [_row(case) for case in cases]
    headings = ("", "case", "verdict", "target", "throughput", "time", "power")
    shown = [at for at in range(len(headings)) if at < _NUM_FIXED or any(row[at].plain != _NOTHING for row in rows)]
    table = Table(box=None, header_style="dim", pad_edge=False)
    for at in shown:
        right = headings[at] in ("throughput", "time", "power")
        table.add_column(headings[at], no_wrap=at in (0, 2), overflow="fold", justify="right" if right else "left")
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    return table


def _detail_lines(cases: Sequence[CaseResult]) -> Iterator[Text]:
    """Yield a line for figures that the table has not, and for a comparison of losses with a reference curve."""
    from accelmark.results.rounds.training import REFERENCE_RULE

    for case in cases:
        names = _ASKED if _figure(case, _SPEED[case.task]) != _NOTHING else (*_BEFORE, *_ASKED)
        figures = {title_of(name, case.unit): _figure(case, name) for name in names if name in case.figures}
        if shown := [f"{title} {figure}" for title, figure in figures.items() if figure != _NOTHING]:
            name = f"{case.key.model} {case.variant}" if case.variant else case.key.model
            yield Text.assemble((f"{name}: ", "dim"), ", ".join(shown))
        for result in case.findings:
            if result.rule == REFERENCE_RULE and result.severity == "info" and result.expected:
                yield Text.assemble((f"{case.key.model}: ", "dim"), str(result))


def scaling_lines(curves: Sequence[ScalingCurve]) -> list[Text]:
    """Return a line for each case that was run at several scales: its share of linear speed-up."""
    lines = [Text()] if curves else []
    for curve in curves:
        line = Text.assemble("scaling ", f"{curve.model}:{curve.framework}:{curve.chip}", style="dim")
        for point in curve.points:
            wide = f" ±{percent(point.half95)}" if point.half95 is not None else ""
            line.append(f"  {point.scale} ", style="default")
            line.append(f"{percent(point.efficiency)}{wide}", style="bold default")
        notes = {"batch sizes differ": not curve.same_batch, "busy machine": curve.is_busy}
        line.append("".join(f"  ({note})" for note, applies in notes.items() if applies))
        lines.append(line)
    return lines


def _row(case: CaseResult) -> tuple[Text, ...]:
    sign, style = SIGNS[case.state] if case.state != "succeeded" else _VERDICT_SIGNS[case.verdict]
    key = case.key
    name = f"{key.model}:{key.framework}" if case.role is None else f"{case.role}: {key.model}:{key.framework}"
    place = f"{key.hardware} {case.variant}" if case.variant else f"{key.hardware}:{key.nnodes}:{key.nproc}"
    below = ", ".join(filter(None, (place, marks_text(case.marks))))
    return (
        Text(sign, style=style),
        Text.assemble(name, (f" ×{case.num_rounds}" if case.num_rounds > 1 else "", "dim"), (f"\n{below}", "dim")),
        Text(_judgement(case).replace(", ", "\n"), style=_VERDICT_STYLE[case.verdict]),
        Text({True: "reached", False: "missed", None: _NOTHING}[case.converged if case.state == "succeeded" else None]),
        Text(_figure(case, _SPEED[case.task])),
        Text(_figure(case, _TIME[case.task])),
        Text(_figure(case, FigureName.MEAN_POWER)),
    )


def _judgement(case: CaseResult) -> str:
    """Return the verdict and what limits it, or the state of a case that did not succeed."""
    return ", ".join(filter(None, (case.verdict, case.verdict_note))) if case.state == "succeeded" else case.state


def _figure(case: CaseResult, name: FigureName) -> str:
    spread = case.figures.get(name)
    if spread is None or spread.mean is None:
        return _NOTHING
    wide = ""
    if spread.ci95 is not None and spread.mean:
        wide = f" ±{percent((spread.ci95[1] - spread.ci95[0]) / 2 / abs(spread.mean))}"
    return f"{format_figure(name, spread.mean, case.unit)}{wide}"


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


class RunStatus(NamedTuple):
    """The state of a run: its directory, running coordinator, states of jobs, and progress of the running jobs."""

    directory: RunDirectory
    coordinator: ProcessId | None
    statuses: dict[str, JobStatus]
    progress: dict[str, JobProgress]


def read_status(path: Path) -> RunStatus:
    """Read the state of the run at ``path``."""
    directory = RunDirectory.open(path)
    statuses = directory.statuses()
    progress = {}
    for job in directory.plan.jobs:
        if statuses[job.directory].state == "running":
            now = ProgressReader(directory.node_dir(job, job.nodes[0]), job.job.work).read()
            evaluation = node_dirs(reevaluation_dir(directory.round_dir(job)))
            if now.phase == "finished" and any(node.exit is None for node in evaluation):
                now = replace(now, phase="evaluating weights")
            progress[job.directory] = now
    return RunStatus(directory, directory.coordinator(), statuses, progress)


def print_status(run: RunStatus, console: Console | None = None) -> None:
    """Print one line for each round, and the coordinator's process ID."""
    console = console or Console(highlight=False)
    for job in run.directory.plan.jobs:
        status = run.statuses[job.directory]
        sign, style = SIGNS[status.state]
        line = Text.assemble((f"{sign} ", style), job_name(job), "  ", (status.state, style))
        if job.directory in run.progress:
            line.append(f"  {plain_progress(run.progress[job.directory], job)}")
        elif status.reason:
            line.append(f": {status.reason}", style="dim")
        print_hanging(console, line)
    ended = all(status.ended for status in run.statuses.values())
    if run.coordinator is not None:
        where = f" on {run.coordinator.hostname}" if run.coordinator.is_elsewhere else ""
        console.print(Text(f"Coordinator: process {run.coordinator.pid}{where}.", style="dim"))
    elif not ended:
        advice = f"No coordinator is running: continue with 'accelmark resume {_relative(run.directory.path)}'."
        print_hanging(console, Text(advice, style="yellow"))
    elif advice := how_to_continue(run.directory.path, {status.state for status in run.statuses.values()}):
        print_hanging(console, Text(advice, style="yellow"))
