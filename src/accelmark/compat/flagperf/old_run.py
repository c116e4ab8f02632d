"""Read the logs of a run of FlagPerf's into results, so that tables, comparisons and pages show it beside new runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import accelmark
from accelmark.compat.flagperf.parse import TABLES, case_of_model
from accelmark.results.figures import FigureName, figures_of
from accelmark.results.rounds.summary import aggregate, worst
from accelmark.results.schema import CaseResult, Point, RoundResult, Summary, finding, value
from accelmark.results.store.loaded_run import RESULT_FILE, SUMMARY_FILE
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.key import CaseKey
from accelmark.spec.log.perflog import PERFLOG_PREFIX
from accelmark.spec.plugins.catalog import folders, load_case

F = FigureName
_TIMES: Final = {
    F.E2E_TIME: "e2e_time", F.RAW_TRAIN_TIME: "raw_train_time", F.INIT_TIME: "init_time",
    F.TRAIN_NO_EVAL_TIME: "train_no_eval_time", F.PURE_COMPUTE_TIME: "pure_training_computing_time",
    F.THROUGHPUT_WHOLE: "throughput_raw", F.THROUGHPUT_TRAIN: "throughput_no_eval",
    F.THROUGHPUT_CORE: "throughput_pure_compute", F.FINAL_LOSS: "final_loss",
}  # fmt: skip
"""Figure -> name of the value in FlagPerf's FINISHED."""
_SOURCE: Final = re.compile(r"benchmarks/([^/]+)/([^/]+)/")
_SCALE: Final = re.compile(r"_([A-Za-z][A-Za-z0-9-]*)_\d+[Xx]\d+$")
_TASK_LOG: Final = re.compile(r"start_(\w+)_task\.log")
_UNKNOWN: Final = "FlagPerf's log does not have it"


class _Event(NamedTuple):
    name: str
    value: Mapping[str, Any]
    time_ms: float
    file: str


def is_run(path: Path) -> bool:
    """Return whether a directory is a run of FlagPerf's: ``<case>/round<N>/<host>_noderank<K>``."""
    return path.is_dir() and any(path.glob("*/round*/*_noderank*/rank*.out.log"))


def read_run(path: Path) -> dict[str, str]:
    """Return the files of a run directory with the results of FlagPerf's run: name -> text; every case is OPEN."""
    rounds: dict[str, RoundResult] = {}
    for folder in sorted(path.glob("*/round*"), key=lambda folder: (folder.parent.name, len(folder.name), folder.name)):
        result = _round(folder)
        rounds[f"{result.key.slug}/{folder.name}"] = result
    cases = [
        _case({name: rounds[name] for name in names})
        for _, names in groupby(rounds, key=lambda name: name.partition("/")[0])
    ]
    first = next(iter(rounds.values()))
    summary = Summary(
        accelmark_version=accelmark.__version__,
        run=path.resolve().name,
        started_at=min(result.started_at for result in rounds.values()),
        finished_at=max(result.started_at for result in rounds.values()),
        state=worst([case.state for case in cases]),
        vendor=first.vendor,
        cases=tuple(cases),
    )
    files = {f"{name}/{RESULT_FILE}": result.model_dump_json() for name, result in rounds.items()}
    files[SUMMARY_FILE] = summary.model_dump_json(indent=1)
    return {f"{summary.run}/{name}": f"{text}\n" for name, text in files.items()}


def _case(rounds: Mapping[str, RoundResult]) -> CaseResult:
    results = list(rounds.values())
    first, reached = results[0], {result.converged for result in results}
    findings = tuple(finding.model_copy(update={"round": None}) for finding in first.findings)
    return CaseResult(
        key=first.key.model_copy(update={"repeat": len(results)}),
        task="train",
        unit=first.unit,
        state=worst([result.state for result in results]),
        converged=None if None in reached else False not in reached,
        verdict="OPEN",
        reasons=tuple(finding.actual for finding in findings),
        figures=aggregate(results),
        rounds=tuple(rounds),
        findings=findings,
    )


def _round(folder: Path) -> RoundResult:
    """Return the result of a round by the events of its rank 0."""
    logs = sorted(folder.glob("*_noderank*/rank*.out.log"))
    nodes = sorted({log.parent for log in logs}, key=lambda node: int(node.name.rpartition("noderank")[2]))
    log = next((log for log in logs if log.name == "rank0.out.log"), None)
    events = list(_events(log)) if log is not None else []
    if not events:
        raise SpecError([Problem(str(folder), "", "has no PerfLog lines of rank 0")])
    key = _key(folder, nodes, len(logs) // len(nodes), events)
    finished = next((event.value for event in events if event.name == "FINISHED"), {})
    begin = next((event.time_ms for event in events if event.name == "TRAIN_START"), events[0].time_ms)
    steps = [event for event in events if event.name == "STEP_END" and "global_steps" in event.value]
    train = load_case(key.model).train if key.model in folders("cases") else None
    rates = {match[1]: name for name in finished if (match := re.fullmatch(r"training_(\w+?)s?_per_second", name))}
    unit = next(({"seq": "sequence"}.get(name, name) for name in rates), train.unit if train is not None else "sample")
    given = {figure: finished.get(name) for figure, name in _TIMES.items()}
    if rates:
        given[F.THROUGHPUT_WHOLE] = finished[next(iter(rates.values()))]
    metrics = [name for name in finished if name.startswith("final_") and name != "final_loss"]
    if metrics:
        given[F.FINAL_METRIC] = finished[metrics[0]]
    thinned = steps[:: max(1, len(steps) // 500)]
    last = steps[-1].value if steps else {}
    what = f"read from FlagPerf's log {folder.parent.name}/{folder.name}: not audited, and its settings are not known"
    monitors = (file.name.removesuffix("_monitor.log") for file in sorted(nodes[0].glob("*_monitor.log")))
    vendor = next((name for name in monitors if name not in ("cpu", "mem", "pwr")), "unknown")
    return RoundResult(
        key=key,
        task="train",
        round=int(folder.name.removeprefix("round")),
        case_version=0,
        unit=unit,
        state="succeeded" if finished else "failed",
        reason=None if finished else "rank 0 logged no FINISHED",
        converged=finished.get("converged"),
        vendor=TABLES["vendors"].get(vendor, vendor),
        precision="unknown",
        started_at=datetime.fromtimestamp(events[0].time_ms / 1000, UTC).isoformat().replace("+00:00", "Z"),
        figures={name: value(_number(given.get(name)), _UNKNOWN) for name in figures_of("train")},
        curves={
            name: tuple(
                Point(step=event.value["global_steps"], time_s=(event.time_ms - begin) / 1000, value=number)
                for event in thinned
                if (number := _number(event.value.get(logged))) is not None
            )
            for name, logged in (("loss", "loss"), ("throughput", "seq/s"))
        },
        num_steps=finished.get("global_steps") or last.get("global_steps") or 0,
        num_samples=finished.get("num_trained_samples") or last.get("num_trained_samples") or 0,
        num_devices=len(logs),
        findings=(finding("open", "foreign-log", "a run of AccelMark", what),),
    )


def _events(log: Path) -> Iterator[_Event]:
    """Yield the events of a log; lines that are not JSON are skipped. FlagPerf writes NaN; values may be missing."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        start = line.find(PERFLOG_PREFIX)
        try:
            loaded = json.loads(line[start + len(PERFLOG_PREFIX) :]) if start >= 0 else None
        except ValueError:
            continue
        if isinstance(loaded, dict) and isinstance(origin := loaded.get("metadata"), dict):
            time_ms, value = _number(origin.get("time_ms")), loaded.get("value")
            if time_ms is not None:
                given = value if isinstance(value, dict) else {}
                yield _Event(str(loaded.get("event")), given, time_ms, str(origin.get("file")))


def _number(number: Any) -> float | None:
    return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None


def _key(folder: Path, nodes: list[Path], nproc: int, events: list[_Event]) -> CaseKey:
    """Return the key by the name of the case's directory, else by the logged source file and the names of logs."""
    name = folder.parent.name
    if name.count(":") >= 2:  # model:framework:hardware
        key = CaseKey.parse(name, hardware="unknown", where=str(folder))
        model, framework, version, hardware = key.model, key.framework, key.framework_version, key.hardware
    else:
        source = next((match for event in events if (match := _SOURCE.search(event.file))), None)
        if source is None:
            raise SpecError([Problem(str(folder), "", "neither its name nor its log names a case")])
        tasks = (match[1] for file in nodes[0].iterdir() if (match := _TASK_LOG.fullmatch(file.name)))
        model, (framework, _, version) = source[1], next(tasks, source[2]).partition("_")
        scale = _SCALE.search(name)
        hardware = scale[1] if scale is not None else "unknown"
    return CaseKey(
        model=case_of_model(model, "train"),
        framework=framework,
        framework_version=version or None,
        hardware=hardware,
        nnodes=len(nodes),
        nproc=nproc,
    )
