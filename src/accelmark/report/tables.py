"""Tables of results: many runs as rows, in a terminal, on a page and in Markdown, and the results in a README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from accelmark.results.comparison import value_text
from accelmark.results.figures import HEADLINES, FigureName, format_figure, title_of
from accelmark.results.schema import AdaptationCost, Task, relative_half, with_marks
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun
from accelmark.results.table import HALF, Cell, Row, grouped, row_of
from accelmark.spec.errors import RunError, raising
from accelmark.spec.number_format import NOTHING, percent, printable

BEGIN: Final = "<!-- results -->"
END: Final = "<!-- /results -->"

F = FigureName


class _Layout(NamedTuple):
    title: str
    columns: tuple[tuple[str, FigureName], ...]
    software: str = ""
    """Title of the column for the engine and batch size, or for the server and load; empty: none."""


_LAYOUTS: Final[dict[Task, _Layout]] = {
    "train": _Layout("Training", (
        ("Throughput", F.THROUGHPUT_STEADY), ("Time to target", F.TIME_TO_TARGET), ("{metric}", F.FINAL_METRIC),
        ("MFU", F.MFU), ("Peak memory", F.PEAK_DEVICE_MEMORY), ("Energy", F.ENERGY),
    )),
    "infer": _Layout("Inference", (
        ("In the engine", F.INFERENCE_CORE), ("In the framework", F.VALIDATION_CORE),
        ("{metric}, engine", F.ENGINE_METRIC), ("framework, same inputs", F.FRAMEWORK_METRIC),
        ("Latency, median", F.LATENCY_P50), ("p99", F.LATENCY_P99),
        ("MFU", F.MFU), ("Energy", F.ENERGY),
    ), software="Engine and batch"),
    "serve": _Layout("Serving", (
        ("Output", F.OUTPUT_RATE), ("Requests", F.REQUEST_RATE), ("TTFT, median", F.TTFT_P50),
        ("TTFT, p99", F.TTFT_P99),
        ("TPOT, median", F.TPOT_P50), ("TPOT, p99", F.TPOT_P99), ("Rate within the SLO", F.SLO_RATE),
        ("Agreement", F.ANSWER_AGREEMENT), ("Per joule", F.UNITS_PER_JOULE),
    ), software="Server and load"),
    "automl": _Layout("Search", (
        ("Score", F.SEARCH_SCORE), ("Held-out error", F.SEARCH_HELD_OUT_ERROR),
        ("Regulated score", F.SEARCH_REGULATED_SCORE), ("Idle", F.SEARCH_IDLE_SHARE), ("Time", F.SEARCH_TIME),
        ("Energy", F.ENERGY),
    )),
}  # fmt: skip
_STANDARD_LAYERS: Final = ("default", "cases/", "vendors/")
"""Prefixes of layers that belong to a case or vendor; settings of other layers are listed in the table."""
_OWN_COLUMNS: Final = frozenset({"compiler", "precision", "batch_size", "server"})
_FACTS: Final = (("Run", "run"), ("Case", "case"), ("Variant", "variant"), ("Role", "role"), ("Chip", "chip"),
                 ("Scale", "scale"), ("Verdict", "verdict"), ("Rounds", "rounds"))  # fmt: skip
_OPTIONAL: Final = ("variant", "role")
"""Columns that are shown only if a row has them: distinguish inference runs and searches of one case."""
_SHORT_TITLES: Final = {F.THROUGHPUT_STEADY: "Throughput", F.PEAK_DEVICE_MEMORY: "Peak memory"}


def shown_figures(rows: Sequence[Row]) -> dict[str, FigureName]:
    """Return the figures of each task that at least one row has, by title."""
    shown: set[FigureName] = set()
    for task in _LAYOUTS:
        part = [row for row in rows if row["task"] == task]
        shown.update([name for name in HEADLINES if any(row[name.value] is not None for row in part)][:5])
    return {_SHORT_TITLES.get(name, title_of(name, "unit")): name for name in HEADLINES if name in shown}


def shown_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the titles of the columns, and the cells of each row."""
    absent = {name for name in _OPTIONAL if all(row[name] is None for row in rows)}
    facts, figures = {title: name for title, name in _FACTS if name not in absent}, shown_figures(rows)
    shown = []
    for row in rows:
        texts = {name: NOTHING if row[name] is None else str(row[name]) for name in facts.values()}
        texts["verdict"] = with_marks(texts["verdict"], filter(None, str(row["marks"]).split(", ")))
        shown.append([*texts.values(), *(figure_cell(row, name) for name in figures.values())])
    return [*facts, *figures], shown


def figure_cell(row: Row, name: FigureName) -> str:
    """Return a figure of a row with half its relative 95 % interval."""
    value, half = row[name.value], row[f"{name.value}{HALF}"]
    if not isinstance(value, float | int):
        return NOTHING
    text = format_figure(name, float(value), str(row["unit"]))
    return f"{text} ± {percent(relative_half(half, value))}" if isinstance(half, float | int) and value else text


def group_title(by: Sequence[str], values: Iterable[Cell]) -> str:
    """Return the title of a group."""
    return ", ".join(f"{name} {NOTHING if value is None else value}" for name, value in zip(by, values, strict=True))


def markdown(rows: Sequence[Row], group_by: Sequence[str] = ()) -> str:
    """Return the table in Markdown with a heading for each group."""
    parts = []
    for values, part in grouped(rows, group_by).items():
        title = f"### {_escaped(group_title(group_by, values))}\n\n" if group_by else ""
        parts.append(title + plain_markdown(*shown_table(part)))
    return "\n".join(parts) or plain_markdown(*shown_table(rows))


def plain_markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    cells = ([NOTHING if value is None else str(value) for value in row] for row in rows)
    return "".join(_line(line) for line in (heads, ["---"] * len(heads), *cells))


def _escaped(text: str) -> str:
    """Escape a cell of Markdown: one line, no HTML, no terminal control characters."""
    return printable(" ".join(text.splitlines())).replace("|", "\\|").replace("<", "&lt;")


def adaptation_rows(cost: AdaptationCost) -> list[tuple[str, str, str]]:
    """Return (kind, name, change) of everything that a vendor changed for a case."""
    rows = [("setting", key.key, f"{key.value} instead of {key.standard}, by {key.layer}") for key in cost.keys]
    for hook in cost.hooks:
        place = hook.place if hook.num_lines is None else f"{hook.place}, {hook.num_lines} lines"
        rows.append(("hook", hook.name, place))
    parts = (("code", "extern/", cost.extern), ("kernel", "csrc/", cost.kernels), ("engine", "", cost.engines))
    for kind, folder, files in parts:
        rows += [(kind, f"{folder}{file}", f"{lines} lines") for file, lines in files.items()]
    rows += [("requirement", name, "installed for the ranks") for name in cost.requirements]
    rows += [("variable", name, "set by vendor.yaml") for name in cost.vendor_environment]
    if cost.framework_module is not None:
        rows.append(("module", cost.framework_module, "imported by every rank (vendor.yaml)"))
    return rows + [("variable", name, "set by environment_variables.sh") for name in cost.environment]


def results_table(runs: Sequence[LoadedRun], model: str | None = None) -> str:
    """Return a Markdown table for each task with a row for each case (of ``model`` only, where given), newest last."""
    cases: dict[Task, list[LoadedCase]] = {task: [] for task in _LAYOUTS}
    for run in sorted(runs, key=lambda run: run.summary.started_at):
        for case in run.without_trials:
            if model is None or case.result.key.model == model:
                cases[case.result.task].append(case)
    tables = {task: table_of(task, rows, name_cases=model is None) for task, rows in cases.items() if rows}
    if len(tables) == 1:
        return "".join(tables.values())
    return "\n".join(f"{_LAYOUTS[task].title}:\n\n{table}" for task, table in tables.items())


def write_readme_table(readme: Path, runs: Sequence[LoadedRun], model: str) -> None:
    """Replace the text between the markers of a README by the results of ``model``."""
    with raising(RunError, f"{readme}: cannot be read", OSError):
        text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RunError(f"{readme}: has no markers {BEGIN!r} and {END!r}; the table is written between them")
    note = "Means over rounds ± half the 95 % interval. Written by `accelmark results --readme`; do not edit."
    write_atomic(readme, f"{before}{BEGIN}\n{results_table(runs, model)}\n{note}\n{END}{after}")


def table_of(task: Task, cases: Sequence[LoadedCase], *, name_cases: bool = True) -> str:
    """Return a Markdown table with a row for each of the cases of a task, at least one."""
    layout = _LAYOUTS[task]
    metrics = {case.first.metric_title or "" for case in cases if case.first}
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    measured = {name for name in FigureName if any(case.result.mean_of(name) is not None for case in cases)}
    figures = {title.format(metric=metric): name for title, name in layout.columns if name in measured}
    rows = []
    for case in cases:
        result, first, row = case.result, case.first, row_of(case)
        started = first.environment.started if first else {}
        software = (started.get("framework") or result.key.framework, started.get("framework_version"))
        facts = {"Case": result.key.case} if name_cases else {}
        facts |= {"Machine": _machine(case), "Software": " ".join(filter(None, software))}
        facts |= {"Scale and settings": _scale(case), "Precision": first.precision if first else NOTHING}
        facts |= {layout.software: _engine(case)} if layout.software else {}
        facts |= {"Rounds": str(result.num_rounds)}
        facts |= {title: figure_cell(row, name) for title, name in figures.items()}
        facts |= {"Verdict": with_marks(result.verdict, result.marks)}
        rows.append(facts | {"Date": case.run.summary.started_at[:10] or NOTHING})
    titles = list(rows[0])
    aligned = ["---:" if title == "Rounds" or title in figures else "---" for title in titles]
    return "".join(map(_line, [titles, aligned, *(row.values() for row in rows)]))


def _machine(case: LoadedCase) -> str:
    """Return the chip; for a run on CPUs also the processor and its cores."""
    hardware, hosts = case.result.key.hardware, case.first.environment.hosts if case.first else ()
    cpu = hosts[0].get("cpu") if hosts and not hosts[0].get("devices") else None
    if not isinstance(cpu, dict):
        return hardware
    parts = [str(cpu["model"])] if cpu.get("model") else []
    parts += [f"{cpu['logical_cores']} cores"] if cpu.get("logical_cores") else []
    return f"{hardware} ({', '.join(parts)})" if parts else hardware


def _scale(case: LoadedCase) -> str:
    """Return the scale, and the settings given by run file or command line, except those that have columns."""
    settings = case.first.settings if case.first else {}
    changed = (
        f"{name} {value_text(setting.value)}"
        for name, setting in settings.items()
        if not setting.layer.startswith(_STANDARD_LAYERS) and name not in _OWN_COLUMNS
    )
    return ", ".join([f"{case.result.key.nnodes}×{case.result.key.nproc}", *changed])


def _engine(case: LoadedCase) -> str:
    inference, serving = (case.first.inference, case.first.serving) if case.first else (None, None)
    if serving:
        stage = serving.headline_stage
        return ", ".join([serving.source, *([stage.label] if stage else [])])
    return f"{inference.compiler or 'none'}, {inference.batch_size}" if inference else NOTHING


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(_escaped, cells)) + " |\n"
