"""The report of an AutoML search: one HTML page, JSON and CSV."""

from __future__ import annotations

import tarfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Any, Final

from accelmark.automl.journal import SearchDirectory, SearchState
from accelmark.automl.model.graph import BatchNorm, Convolution, Dense, Network, ReLU, infer_shapes, main_chain, skips
from accelmark.automl.records import Individual, TrialRecord
from accelmark.automl.scoring import Scoreboard, summarise
from accelmark.report.charts import Chart, Json, Span, bars, line, titled
from accelmark.report.templating import page
from accelmark.results.rounds.search import SearchPoint, SearchSummary
from accelmark.results.store.files import write_atomic
from accelmark.results.table import Cell, to_csv
from accelmark.spec.number_format import Scale, digits, quantity, scale_of

_MOST_DRAWN: Final = 60
_LOGS: Final = ("journal.jsonl", "automl.json", "network.json", "study.journal", "telemetry", "ray", "report.html")
_AIPERF_PAGES: Final = {True: "Report_Succeed.html", False: "Report_Failed.html"}
"""AIPerf's names of the page of a search that has ended: whether it is VALID by the rules ``aiperf-v1``."""
_TRIAL_HEADINGS: Final = (
    "trial", "network", "round", "status", "epochs", "validation", "held out", "parameters", "weights", "settings",
    "reason",
)  # fmt: skip


def render_search(directory: SearchDirectory) -> str:
    """Return the page as self-contained HTML; raises RunError where the search cannot be read."""
    state = directory.state()
    return _page(directory, state, summarise(directory, state=state))


def write_report(directory: SearchDirectory, *, logs: bool = False) -> list[Path]:
    """Write the report into the search's directory, with ``logs`` also an archive of its records; return the files."""
    state = directory.state()
    summary = summarise(directory, state=state)
    series = [tuple(point.model_dump().values()) for point in summary.series]
    texts = {
        "report.html": _page(directory, state, summary),
        "report.json": summary.to_json() + "\n",
        "report.csv": to_csv(tuple(SearchPoint.model_fields), series),
        "trials.csv": to_csv(_TRIAL_HEADINGS, [_trial(record, state) for record in state.trials.values()]),
    }
    if summary.judgement.rules == "aiperf-v1" and summary.status == "over":
        is_valid = summary.judgement.verdict == "VALID"
        (directory.path / _AIPERF_PAGES[not is_valid]).unlink(missing_ok=True)
        texts[_AIPERF_PAGES[is_valid]] = texts["report.html"]
    for name, text in texts.items():
        write_atomic(directory.path / name, text)
    written = [directory.path / name for name in texts]
    if logs:
        archive = directory.path / "logs.tar.gz"
        part = archive.with_suffix(".part")
        with tarfile.open(part, "w:gz") as opened:
            for name in _LOGS:
                if (directory.path / name).exists():
                    opened.add(directory.path / name, arcname=f"{directory.name}/{name}")
        written.append(part.replace(archive))
    return written


def _page(directory: SearchDirectory, state: SearchState, summary: SearchSummary) -> str:
    board, individuals = Scoreboard(state), state.individuals
    reached = {record.individual: board.best_validation(record.trial) for record in state.trials.values()}
    known = {net.id: accuracy for net in individuals if (accuracy := reached.get(net.id)) is not None}
    best = sorted(individuals, key=lambda net: known.get(net.id, -1.0), reverse=True)[:_MOST_DRAWN]
    time = scale_of(3600 * max((point.time_h for point in summary.series), default=0.0), "s")
    ended_s = max([board.ended_s, *(record.ended_s or 0.0 for record in state.attempts.values())])
    valued = {net.id for net in individuals if net.value is not None}
    return page(
        "search/search.html", "search/search.js", charts=True, title=f"Search {summary.run}", summary=summary,
        headings=_TRIAL_HEADINGS, trials=[_trial(record, state) for record in state.trials.values()], digits=digits,
        time=time, charts_over_time=list(filter(None, (*_progress(summary, time), _accuracy_chart(state)))),
        memory_mib=max((record.peak_memory_mib or 0 for record in state.attempts.values()), default=0) or None,
        family=_family_chart(individuals, {name: known[name] for name in known if name in valued}),
        workers=_workers_chart(state, summary.utilisation.workers) if ended_s > 0 else None,
        networks=[(net, known.get(net.id), _layer_rows(net.network)) for net in sorted(best, key=lambda net: net.id)],
        left_out=max(0, len(individuals) - _MOST_DRAWN), config=directory.config().model_dump_json(indent=2),
    )  # fmt: skip


def _layout(title: str, x: str, y: str, **y_axis: Any) -> Json:
    heading = {"text": title, "font": {"color": "--ink"}}
    return {"xaxis": titled(x), "yaxis": titled(y, **y_axis), "title": heading, "margin": {"t": 40}}


def _progress(summary: SearchSummary, time: Scale) -> Iterable[Chart | None]:
    times = [3600 * point.time_h / time.divisor for point in summary.series]
    for title, unit, fields in (
        ("Score", "operations / s", {"score": "score"}),
        ("Error", "error", {"error": "held-out error", "search_error": "search error"}),
        ("Regulated score", "operations / s", {"regulated_score": "regulated score"}),
    ):
        columns = {name: [getattr(point, field) for point in summary.series] for field, name in fields.items()}
        lines = [
            line(times, values, name, number, mode="lines+markers")
            for number, (name, values) in enumerate(columns.items())
            if any(value is not None for value in values)
        ]
        layout = _layout(title, f"time, {time.unit}", unit, rangemode="tozero", exponentformat="SI")
        layout["xaxis"]["rangemode"] = "tozero"
        yield Chart(f"{title} over time; values in the table below", lines, layout) if lines else None


def _layer_rows(network: Network) -> list[dict[str, str]]:
    """Return a row for the image and for each layer of the main chain: its shape, and where its skips begin."""
    shapes = infer_shapes(network)
    layers: list[tuple[str, list[str]]] = []  # batch norms and ReLUs are appended to the layer before
    for name in main_chain(network):
        layer = network.by_name[name].layer
        if isinstance(layer, BatchNorm | ReLU) and layers:
            text, names = layers[-1]
            layers[-1] = (f"{text} + {'bn' if isinstance(layer, BatchNorm) else 'relu'}", [*names, name])
        elif isinstance(layer, Convolution):
            stride = f" /{layer.stride}" if layer.stride > 1 else ""
            layers.append((f"conv {layer.kernel}×{layer.kernel} · {layer.filters}{stride}", [name]))
        else:
            text = f"dense · {layer.units}" if isinstance(layer, Dense) else layer.kind.replace("_", " ")
            layers.append((text, [name]))
    row_of = [0, *(row for row, (_, names) in enumerate(layers, start=1) for _ in names)]
    ends: dict[int, list[str]] = defaultdict(list)
    for skip in sorted(skips(network), key=lambda skip: skip.start):
        ends[row_of[skip.end]].append(f"{row_of[skip.start]} ({skip.merge})")
    rows = [("image", network.input_shape), *((text, shapes[names[-1]]) for text, names in layers)]
    return [
        {"text": text, "shape": "×".join(map(str, shape)), "skips": ", ".join(ends[number])}
        for number, (text, shape) in enumerate(rows)
    ]


def _family_chart(individuals: Sequence[Individual], values: Mapping[int, float]) -> Chart | None:
    """Draw the family tree: leaves are in consecutive columns, a parent is above the middle of its children."""
    if not individuals:
        return None
    lines: dict[int | None, tuple[int, ...]] = {None: ()}
    children: dict[int | None, list[int]] = defaultdict(list)
    for net in individuals:
        lines[net.id] = (*lines[net.parent], net.id)
        children[net.parent].append(net.id)
    leaves = sorted(path for path in lines.values() if path and path[-1] not in children)
    columns = {path[-1]: float(column) for column, path in enumerate(leaves)}
    for net in reversed(individuals):
        if net.id in children:
            below = [columns[child] for child in children[net.id]]
            columns[net.id] = (min(below) + max(below)) / 2
    rows = {net.id: len(lines[net.id]) - 1 for net in individuals}
    kin = [(net.parent, net.id) for net in individuals if net.parent is not None]
    edges = {
        "x": [place for parent, child in kin for place in (columns[parent], columns[child], None)],
        "y": [place for parent, child in kin for place in (rows[parent], rows[child], None)],
    }
    highest = max(values.values(), default=None)
    texts = [
        f"network {net.id}: {', '.join(map(str, net.morphs)) or 'seed'}; "
        + (f"validation accuracy {values[net.id]:.4f}" if net.id in values else "no value")
        for net in individuals
    ]
    is_best = [highest is not None and values.get(net.id) == highest for net in individuals]
    edge = {
        "width": [3 if best else 1 for best in is_best],
        "color": ["--good" if best else "--soft" for best in is_best],
    }
    marker = {
        "size": 22, "color": [values.get(net.id) for net in individuals],
        "colorscale": [[0, "--panel"], [1, "--accent"]], "line": edge,
        "symbol": ["circle" if net.id in values else "circle-open" for net in individuals],
    }  # fmt: skip
    networks = {
        "type": "scatter", "mode": "markers+text", "x": [columns[net.id] for net in individuals],
        "y": [rows[net.id] for net in individuals], "text": [str(net.id) for net in individuals], "hovertext": texts,
        "hoverinfo": "text", "marker": marker, "textfont": {"color": "--ink", "size": 11}, "showlegend": False,
    }  # fmt: skip
    hidden = {"visible": False}
    links = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False, "line": {"color": "--shade"}}
    layout = {
        "xaxis": hidden, "yaxis": hidden | {"autorange": "reversed"},
        "height": 80 + 54 * (max(rows.values(), default=0) + 1),
    }  # fmt: skip
    return Chart("Family tree of the networks", [links | edges, networks], layout)


def _accuracy_chart(state: SearchState) -> Chart | None:
    """Draw the validation accuracy of each trial's epochs, for the best trials; None where nothing was validated."""
    trials = [record for record in state.trials.values() if state.totals_of(record).accuracy is not None]
    best = nlargest(_MOST_DRAWN, trials, key=lambda record: (state.totals_of(record).accuracy or 0.0, -record.trial))
    lines = []
    for number, record in enumerate(sorted(best, key=lambda record: record.trial)):
        epochs = state.epochs_of(record)
        x, y = [epoch.epoch for epoch in epochs], [epoch.validation_accuracy for epoch in epochs]
        lines.append(line(x, y, f"trial {record.trial}", number, mode="lines+markers"))
    title = f"Validation accuracy per epoch of the best {len(best)} trials"
    return Chart(title, lines, _layout("Accuracy", "epoch", "validation accuracy")) if lines else None


def _workers_chart(state: SearchState, num_workers: int) -> Chart:
    """Draw what every worker did; the rest is idle time. Of many workers the first ones are drawn."""
    kinds = {"starting": "--r4", "waiting for data": "--r3", "training": "--r1", "evaluating": "--r2"}
    spans: dict[str, list[Span]] = {kind: [] for kind in kinds}

    def add(kind: str, worker: int, begun_s: float, length_s: float, label: str) -> None:
        if worker < _MOST_DRAWN and length_s > 0:
            spans[kind].append((f"worker {worker}", begun_s, length_s, f"{label}: {quantity(length_s, 's')} {kind}"))

    for key, record in state.attempts.items():
        epochs = state.epochs.get(key, [])
        if epochs:
            begun_s = record.started_s
            add("starting", record.worker, begun_s, epochs[0].begun_s - begun_s, f"trial {record.trial}")
        for epoch in epochs:
            label, waited_s = f"trial {epoch.trial}, epoch {epoch.epoch}", epoch.data_wait_s
            # The waits of an epoch are drawn together, at its beginning.
            add("waiting for data", record.worker, epoch.begun_s, waited_s, label)
            add("training", record.worker, epoch.begun_s + waited_s, epoch.training_s - waited_s, label)
            add("evaluating", record.worker, epoch.begun_s + epoch.training_s, epoch.evaluating_s, label)
        if record.ended_s is not None:
            held_out_s, label = record.held_out_s, f"trial {record.trial}: held-out split"
            add("evaluating", record.worker, record.ended_s - held_out_s, held_out_s, label)
    traces = [bars(spans[kind], kind, shade) for kind, shade in kinds.items()]
    x, height = titled("seconds since the first trial began; gaps are idle"), 120 + 34 * min(num_workers, _MOST_DRAWN)
    return Chart("Timeline of the workers", traces, {"xaxis": x, "yaxis": {"autorange": "reversed"}, "height": height})


def _trial(record: TrialRecord, state: SearchState) -> tuple[Cell, ...]:
    """Return the values of a trial in the order of the headings; accuracies are ratios."""
    totals, hyper = state.totals_of(record), record.hyperparameters
    settings = [f"batch {hyper.batch_size}", f"rate {digits(hyper.learning_rate)}"]
    settings += [f"kernel {hyper.kernel}"] if hyper.kernel is not None else []
    settings += [f"dropout {digits(hyper.dropout, 2)}"] if hyper.dropout is not None else []
    status = record.status + (f" (attempt {record.attempt})" if record.attempt > 1 else "")
    return (
        record.trial, record.individual, record.round, status, f"{totals.complete}/{record.epochs_planned}",
        totals.accuracy, record.held_out_accuracy, record.parameters, record.weights,
        ", ".join(settings) + (" (TPE)" if record.tuned else ""), record.reason,
    )  # fmt: skip
