"""The page of a cluster: scaling efficiency, collectives by size, checkpoints, recovery from a killed rank."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from accelmark.report.charts import collectives_chart, scaling_chart, size_text, title_of
from accelmark.report.templating import fill, inline
from accelmark.results.cluster import CLUSTER_FILE, SCALING_DIR, ClusterReport
from accelmark.results.figures.scaling import ScalingCurve, scaling_curves
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import load_run
from accelmark.spec.errors import RunError
from accelmark.spec.log.records import Ceilings, CollectiveTiming
from accelmark.spec.number_format import NOTHING, percent, quantity

CLUSTER_PAGE: Final = "cluster.html"


class CollectiveTable(NamedTuple):
    """Collectives by size."""

    names: list[str]
    rows: list[tuple[str, list[CollectiveTiming | None]]]
    """(size, timing of each collective; None where a smaller size took too long)."""


def collective_table(found: Ceilings) -> CollectiveTable:
    """Return the sweep of a probe by size."""
    names = list(dict.fromkeys(one.operation for one in found.sweep))
    at = {(one.operation, one.size_bytes): one for one in found.sweep}
    sizes = sorted({one.size_bytes for one in found.sweep})
    rows = [(size_text(size), [at.get((name, size)) for name in names]) for size in sizes]
    return CollectiveTable([title_of(name) for name in names], rows)


def write_cluster_page(directory: Path) -> Path:
    """Write the page of the measurement in ``directory``; return its path. Raises RunError: it cannot be read."""
    file = directory / CLUSTER_FILE
    try:
        report = ClusterReport.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise RunError(f"{file}: cannot be read: {error}") from error
    write_atomic(directory / CLUSTER_PAGE, render_cluster(report, _curve(directory, report)))
    return directory / CLUSTER_PAGE


def render_cluster(report: ClusterReport, curve: ScalingCurve | None) -> str:
    """Return the page as HTML."""
    found = report.collectives
    return fill(
        "cluster/cluster.html",
        served=False,
        title=f"Cluster {report.name}",
        report=report,
        tiles=_tiles(report, curve),
        curve=curve,
        chart=None if curve is None else scaling_chart(curve),
        table=None if found is None else collective_table(found),
        rates=None if found is None else collectives_chart(found.sweep),
        style=inline("page.css"),
        more_style=inline("runs/runs.css"),
        script=inline("theme.js"),
    )


def _curve(directory: Path, report: ClusterReport) -> ScalingCurve | None:
    if "scaling" in report.reasons:
        return None
    return next(iter(scaling_curves([load_run(directory / SCALING_DIR)])), None)


def _tiles(report: ClusterReport, curve: ScalingCurve | None) -> list[tuple[str, str, str]]:
    """Return (title, value, note) of each part."""
    reasons, found, writes, recovery = report.reasons, report.collectives, report.checkpoints, report.recovery
    best = found.collectives.get("all_reduce") if found is not None else None
    return [
        (
            "Scaling efficiency",
            percent(curve.points[-1].efficiency, 3) if curve is not None else NOTHING,
            f"{curve.points[-1].scale} against {curve.points[0].scale}" if curve else reasons.get("scaling", ""),
        ),
        (
            "All-reduce",
            quantity(best.value, best.unit) if best is not None and best.value is not None else NOTHING,
            f"bus bandwidth at {best.size}" if best is not None and best.size else reasons.get("collectives", ""),
        ),
        (
            "Checkpoints",
            quantity(writes.mb_per_s / 1e3, "GB/s") if writes is not None else NOTHING,
            f"{quantity(writes.num_bytes / 2**20, 'MiB')} each" if writes else reasons.get("checkpoints", ""),
        ),
        (
            "Recovery",
            quantity(recovery.total_s, "s") if recovery is not None else NOTHING,
            "from a killed rank to the next step" if recovery is not None else reasons.get("recovery", ""),
        ),
    ]
