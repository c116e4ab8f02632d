"""The page of a cluster: scaling efficiency, collectives by size, checkpoints, recovery from a killed rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from accelmark.report.charts import collectives_chart, scaling_chart, size_text
from accelmark.report.templating import page
from accelmark.results.cluster import CLUSTER_FILE, SCALING_DIR, ClusterReport, Part, ScalingCurve, scaling_curves
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import load_run
from accelmark.spec.errors import RunError, raising
from accelmark.spec.number_format import NOTHING, percent, quantity

_PAGE: Final = "cluster.html"
_TITLES: Final[dict[Part, str]] = {
    "scaling": "Scaling efficiency",
    "collectives": "All-reduce",
    "checkpoints": "Checkpoints",
    "recovery": "Recovery",
}


Headline = tuple[str, str, str]
"""Title, value, and note: what the value is of and what limits it; without a value, why there is none."""


def write_cluster_page(directory: Path) -> tuple[Path, list[Headline]]:
    """Write the page of a measurement; return its path and headlines. Raises RunError: it cannot be read."""
    file = directory / CLUSTER_FILE
    with raising(RunError, f"{file}: cannot be read", OSError, ValidationError):
        report = ClusterReport.model_validate_json(file.read_bytes())
    curves = [] if "scaling" in report.reasons else scaling_curves([load_run(directory / SCALING_DIR)])
    curve = next(iter(curves), None)
    write_atomic(directory / _PAGE, render_cluster(report, curve))
    return directory / _PAGE, _headlines(report, curve)


def render_cluster(report: ClusterReport, curve: ScalingCurve | None) -> str:
    """Return the page as HTML."""
    rates = report.collectives
    table: dict[str, Any] | None = None
    if rates is not None:
        names = list(dict.fromkeys(timing.operation for timing in rates.sweep))
        at = {(timing.operation, timing.size_bytes): timing for timing in rates.sweep}
        sizes = sorted({timing.size_bytes for timing in rates.sweep})
        # A cell is None where a smaller size took too long.
        rows = [(size_text(size), [at.get((name, size)) for name in names]) for size in sizes]
        table = {"names": [name.replace("_", "-") for name in names], "rows": rows}
    return page(
        "cluster/cluster.html", charts=True, title=f"Cluster {report.name}", report=report,
        tiles=_headlines(report, curve), doubts=[] if curve is None else report.doubts(curve), curve=curve,
        chart=None if curve is None else scaling_chart(curve), table=table,
        rates=None if rates is None else collectives_chart(rates.sweep),
    )  # fmt: skip


def _headlines(report: ClusterReport, curve: ScalingCurve | None) -> list[Headline]:
    rates, writes, recovery = report.collectives, report.checkpoints, report.recovery
    parts: dict[Part, tuple[str, str]] = dict.fromkeys(_TITLES, ("", "not measured"))
    parts["scaling"] = ("", "no scale finished")
    if curve is not None:
        first, last, doubts = curve.points[0], curve.points[-1], "; ".join(report.doubts(curve))
        note = f"{last.scale} against {first.scale}" + (f", not conclusive: {doubts}" if doubts else "")
        parts["scaling"] = ("" if doubts else percent(last.efficiency, 3), note)
    best = rates.collectives.get("all_reduce") if rates is not None else None
    if best is not None and best.value is not None:
        parts["collectives"] = (quantity(best.value, best.unit), f"bus bandwidth at {best.size}")
    if writes is not None:
        size = f"{quantity(writes.num_bytes / 2**20, 'MiB')} each"
        parts["checkpoints"] = (quantity(writes.mb_per_s / 1e3, "GB/s"), size)
    if recovery is not None:
        kill = f"planned kill of rank {recovery.rank}, detected after {quantity(recovery.noticed_s, 's')}"
        parts["recovery"] = (quantity(recovery.total_s, "s"), kill)
    headlines = []
    for part, (value, note) in parts.items():
        busy = "; other work on the hosts" if value and part in report.disturbed else ""
        reason = report.reasons.get(part)
        headlines.append((_TITLES[part], NOTHING if reason else value or NOTHING, reason or f"{note}{busy}"))
    return headlines
