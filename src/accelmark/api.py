"""Python API: load results as typed objects and data frames, run cases, compare runs.

    import accelmark

    run = accelmark.load("runs/20261122T091340Z-quickstart")
    run.cases[0].verdict, run.cases[0].figures["throughput_train"].mean
    run.frame()              # pandas: one row for each case, every figure with half of its 95 % interval
    run.curves("loss")       # pandas: case, round, step, time_s, value

Data frames need pandas: ``pip install 'accelmark[pandas]'``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelmark.results.comparison import RunComparison
from accelmark.results.comparison import compare as _compare
from accelmark.results.schema import CaseResult, RoundResult, Summary
from accelmark.results.sources import find_sources, load_source, open_sources
from accelmark.results.store.loaded_run import LoadedRun
from accelmark.results.table import COLUMNS, rows_of
from accelmark.spec.errors import RequestError
from accelmark.spec.runfile import CaseRequest, RunSpec

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "compare", "frame", "load", "load_all", "run"]


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one run, search or bundle."""

    loaded: LoadedRun

    def __repr__(self) -> str:
        """Return the path, state and cases."""
        cases = ", ".join(f"{case.key}: {case.verdict}" for case in self.cases)
        return f"Run({str(self.path)!r}, {self.summary.state}, {cases})"

    @property
    def path(self) -> Path:
        """The run directory or bundle."""
        return self.loaded.path

    @property
    def summary(self) -> Summary:
        """``summary.json``."""
        return self.loaded.summary

    @property
    def cases(self) -> tuple[CaseResult, ...]:
        """The results of each case over its rounds: verdict, reasons, figures with mean and 95 % interval."""
        return self.summary.cases

    @property
    def rounds(self) -> Mapping[str, RoundResult]:
        """Directory of a round, relative to the run -> its result."""
        return self.loaded.rounds

    def frame(self) -> pd.DataFrame:
        """Return one row for each case; columns as in ``accelmark results --format csv``."""
        return frame([self])

    def curves(self, name: str = "loss") -> pd.DataFrame:
        """Return a curve of every round: of training ``loss``, ``throughput`` or a metric.

        Columns: case, round, step (optimizer steps), time_s (seconds of raw training time; of serving since the load
        began), value. Raises RequestError: no round has this curve.
        """
        known = {each for result in self.rounds.values() for each in result.curves}
        if known and name not in known:
            raise RequestError(f"{self.path}: has no curve {name!r}; it has: {', '.join(sorted(known))}")
        columns = ("case", "round", "step", "time_s", "value")
        rows = [
            (str(result.key), result.round, point.step, point.time_s, point.value)
            for result in self.rounds.values()
            for point in result.curves.get(name, ())
        ]
        return _frame(rows, columns)

    def telemetry(self) -> pd.DataFrame:
        """Return the telemetry of every round, downsampled as on the page.

        Columns: case, round, label (host and device), quantity, unit, time_s (seconds since training began, negative
        before), value (null where it could not be read).
        """
        columns = ("case", "round", "label", "quantity", "unit", "time_s", "value")
        rows = [
            (str(result.key), result.round, series.label, series.quantity, series.unit, time_s, value)
            for result in self.rounds.values()
            for series in result.telemetry
            for time_s, value in series.points
        ]
        return _frame(rows, columns)


def load(path: str | Path) -> Run:
    """Load one run directory, search or bundle; raises RequestError or RunError: there is no run, or it is damaged."""
    place = Path(path)
    if not place.exists():
        raise RequestError(f"{place}: no such run, bundle or directory of runs")
    found, problems = find_sources(place)
    if len(found) != 1:
        many = f"has {len(found)} runs: use load_all" if found else "has no run"
        raise RequestError("\n".join([f"{place}: {many}", *problems]))
    return Run(load_source(found[0]))


def load_all(*paths: str | Path) -> Iterator[Run]:
    """Yield every run at or below ``paths``, copies (bundles, exports) once; warns of runs that cannot be read."""
    found, problems = open_sources(Path(path) for path in paths)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    for each in found:
        yield Run(load_source(each.path))


def frame(runs: Iterable[Run]) -> pd.DataFrame:
    """Return one row for each case of ``runs``, oldest run first; figures are floats, NaN where null."""
    figures = {name: kind for name, kind in COLUMNS.items() if kind is float}
    return _frame(rows_of(run.loaded for run in runs), tuple(COLUMNS)).astype(figures)


def run(
    *keys: str,
    file: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    vendor: str | None = None,
    out: str | Path | None = None,
    synthetic: bool = False,
    allow_open: bool = False,
    offline: bool = False,
) -> Run:
    """Train the cases of ``keys``, or run a run file or shipped suite (``quickstart``), and return the results.

    Args:
        settings: dotted setting -> value, the strongest layer: ``{"end.max_steps": 100}``.
        data: directory with the data of the cases of ``keys``; None: fetch what can be fetched.
        out: run directory; None: a new one in ``runs``.
        allow_open: allow changes to immutable settings; permanently marks the result OPEN.

    Raises RequestError: the request is wrong; names every problem. Nothing was started.
    """
    from accelmark.cli.options import shipped_file
    from accelmark.cli.runs import plan_request, read_run_file, run_name
    from accelmark.run.controller import coordinator
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.preflight.hosts import run_preflight
    from accelmark.run.record.directory import default_path

    if (file is None) == (not keys):
        raise RequestError("name either keys of cases or a run file")
    if file is not None and data is not None:
        raise RequestError("data belongs to keys: a run file names the data of each of its cases")
    base = Path()
    if file is not None:
        path = shipped_file(Path(file), "suites")
        request, base = read_run_file(path), path.parent
    else:
        cases = tuple(CaseRequest(key=key, data=None if data is None else Path(data)) for key in keys)
        request = RunSpec(name=run_name(keys[0]) if len(keys) == 1 else "run", cases=cases)
    changed = {"vendor": vendor or request.vendor, "open": allow_open or request.open}
    texts = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in (settings or {}).items()]
    plan = plan_request(request.model_copy(update=changed), texts, synthetic=synthetic, base=base)
    plan = plan.model_copy(update={"offline": offline})
    place = Path(out) if out is not None else default_path(plan.name, datetime.now(UTC), request.runs or Path("runs"))
    outcome = coordinator.start(plan, place, DataFetcher(offline), run_preflight, as_json=False)
    return load(outcome.directory)


def compare(
    baseline: Run | str | Path, *others: Run | str | Path, across_scales: bool = False, force: bool = False
) -> RunComparison:
    """Compare runs, or those at paths, with ``baseline``; raises RequestError: no case can be compared."""
    runs = [each if isinstance(each, Run) else load(each) for each in (baseline, *others)]
    return _compare([run.loaded for run in runs], across_scales=across_scales, force=force)


def _frame(rows: Sequence[Any], columns: tuple[str, ...]) -> pd.DataFrame:
    from accelmark.spec.plugins.requirements import require

    require("a data frame", "accelmark[pandas]")
    import pandas as pd

    return pd.DataFrame(rows, columns=pd.Index(columns))
