"""Shell completion of the names that AccelMark knows; shells complete paths themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Final, get_args

_CATALOG: Final = "accelmark.spec.plugins.catalog"
Completion = Callable[[str], list[str]]


def _of(names: Callable[[], Iterable[str]]) -> Completion:
    """Return a completion of ``names``, which are listed only on the shell's request."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _call(module: str, function: str, *arguments: str) -> Completion:
    """Return a completion of the names that a function returns; its module is imported only on the shell's request."""
    return _of(lambda: getattr(import_module(module), function)(*arguments))


def _shipped(folder: str) -> Completion:
    return _of(lambda: sorted(path.stem for path in (Path(__file__).parents[1] / folder).glob("*.yaml")))


def _scenarios() -> Iterable[str]:
    from accelmark.spec.settings.inference import ScenarioName

    return get_args(ScenarioName)


def _datasets() -> Iterable[str]:
    from accelmark.datasets.catalogue import known_datasets

    return (known.spec.name for known in known_datasets())


def _explained() -> Iterable[str]:
    from accelmark.explain.entries import entries

    return sorted({entry.name for entry in entries()})


cases, vendors, frameworks, servers = (
    _call(_CATALOG, "folders", kind) for kind in ("cases", "vendors", "frameworks", "servers")
)
engines, prepared = _call(_CATALOG, "engine_specs"), _call("accelmark.datasets.catalogue", "preparations")
suites, claims, searches = map(_shipped, ("suites", "claims", "searches"))
scenarios, datasets, explained = map(_of, (_scenarios, _datasets, _explained))
