"""Shell completion of names: cases, vendors, frameworks, engines, suites, data sets, runs, explained names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cases(incomplete: str) -> list[str]:
    """Complete the name of a case."""
    from accelmark.spec.plugins.catalog import folders

    return [name for name in folders("cases") if name.startswith(incomplete)]


def vendors(incomplete: str) -> list[str]:
    """Complete the name of a vendor."""
    from accelmark.spec.plugins.catalog import folders

    return [name for name in folders("vendors") if name.startswith(incomplete)]


def engines(incomplete: str) -> list[str]:
    """Complete the name of an inference engine."""
    from accelmark.spec.plugins.catalog import engine_specs

    return [name for name in engine_specs() if name.startswith(incomplete)]


def vendors_and_cases(incomplete: str) -> list[str]:
    """Complete the name of a vendor or a case."""
    return [*vendors(incomplete), *cases(incomplete)]


def frameworks(incomplete: str) -> list[str]:
    """Complete the name of a framework."""
    from accelmark.spec.plugins.catalog import folders

    return [name for name in folders("frameworks") if name.startswith(incomplete)]


def suites(incomplete: str) -> list[str]:
    """Complete the name of a shipped suite, or a YAML file."""
    return _shipped("suites", incomplete)


def searches(incomplete: str) -> list[str]:
    """Complete the name of a shipped search, or a YAML file."""
    return _shipped("searches", incomplete)


def _shipped(folder: str, incomplete: str) -> list[str]:
    shipped = sorted(path.stem for path in (Path(__file__).parents[1] / folder).glob("*.yaml"))
    directory = incomplete.rpartition("/")[0]
    found = (str(path) for path in sorted(Path(directory or ".").glob("*.yaml")))
    return [name for name in [*shipped, *found] if name.startswith(incomplete)]


def prepared(incomplete: str) -> list[str]:
    """Complete the name of a data set that is prepared from archives."""
    from accelmark.datasets.catalogue import preparable

    return [name for name in preparable() if name.startswith(incomplete)]


def servers(incomplete: str) -> list[str]:
    """Complete the name of a server of language models."""
    from accelmark.spec.plugins.catalog import folders

    return [name for name in folders("servers") if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Complete the path of a run, below ``runs`` or below what is typed; the newest first."""
    return sorted(_runs(incomplete), reverse=True)


def _runs(incomplete: str) -> Iterator[str]:
    folder = Path(incomplete.rpartition("/")[0] or ("runs" if not incomplete.startswith("/") else "/"))
    start = incomplete.rpartition("/")[2]
    for plan in folder.glob("*/plan.json"):
        name = plan.parent.name
        if name.startswith(start):
            yield str(plan.parent)


def explained(incomplete: str) -> list[str]:
    """Complete a name that ``explain`` knows."""
    from accelmark.explain.entries import entries

    return sorted({entry.name for entry in entries() if entry.name.startswith(incomplete)})
