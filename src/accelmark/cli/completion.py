"""Shell completion of names: cases, vendors, frameworks, engines, suites, data sets, runs, explained names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Final, get_args

_CATALOG: Final = "accelmark.spec.plugins.catalog"
_COLON: Final = ":"
_BEFORE: Final = "_ACCELMARK_COMPLETED"
"""Variable with the parts of a key that bash has split off as words, with their colons."""

Completion = Callable[[str], list[str]]


def join_words_of_bash() -> None:
    """Join the parts of each key that bash has split at its colons; bash replaces the last part of the current one."""
    index = os.environ.get("COMP_CWORD", "")
    words = os.environ.get("COMP_WORDS", "").split("\n")[: int(index) + 1 if index.isdecimal() else 0]
    joined: list[str] = []
    for word in words:
        if joined and (word == _COLON or joined[-1].endswith(_COLON)):
            joined[-1] += word
        else:
            joined.append(word)
    if len(joined) < len(words):
        before, colon, joined[-1] = joined[-1].rpartition(_COLON)
        os.environ |= {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1), _BEFORE: before + colon}


def _of(names: Callable[[], Iterable[str]]) -> Completion:
    """Return a completion of ``names``, which are listed only on the shell's request."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _call(module: str, function: str, *arguments: str) -> Completion:
    """Return a completion of the names that a function returns; its module is imported only on the shell's request."""
    return _of(lambda: getattr(import_module(module), function)(*arguments))


def _keys(frameworks_of: str) -> Completion:
    """Return a completion of the case, and after a colon of the framework, of a key; by a function of the catalogue."""

    def complete(incomplete: str) -> list[str]:
        from accelmark.spec.plugins import catalog

        before = os.environ.get(_BEFORE, "")
        case, *others = f"{before}{incomplete}".split(_COLON)
        if not others:
            return cases(incomplete)
        if case not in catalog.folders("cases") or len(others) > 1:
            return []
        keys = [f"{case}:{name}" for name in getattr(catalog, frameworks_of)(catalog.load_case(case))]
        return [key.removeprefix(before) for key in keys if key.startswith(before + incomplete)]

    return complete


def _scenarios() -> Iterable[str]:
    from accelmark.spec.settings.inference import ScenarioName

    return get_args(ScenarioName)


def _datasets() -> Iterable[str]:
    from accelmark.datasets.catalogue import known_datasets

    return [known.spec.name for known in known_datasets()]


def _explained() -> Iterable[str]:
    from accelmark.explain.entries import entries

    return sorted({entry.name for entry in entries()})


keys_to_train = _keys("frameworks_of")
keys_to_infer = _keys("inference_frameworks_of")
cases, vendors, frameworks, servers = (
    _call(_CATALOG, "folders", kind) for kind in ("cases", "vendors", "frameworks", "servers")
)
engines = _call(_CATALOG, "engine_specs")
scenarios = _of(_scenarios)
token_scenarios = _of(lambda: ("server", "offline"))
datasets = _of(_datasets)
prepared = _call("accelmark.datasets.catalogue", "preparable")
explained = _of(_explained)


def vendors_and_cases(incomplete: str) -> list[str]:
    """Complete the name of a vendor or a case."""
    return [*vendors(incomplete), *cases(incomplete)]


def listed_frameworks(incomplete: str) -> list[str]:
    """Complete the last of several names of frameworks between commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in frameworks(last) if name not in before.split(",")]


def _shipped(folder: str) -> Completion:
    """Return a completion of the names of shipped YAML files, and of the paths of others."""

    def complete(incomplete: str) -> list[str]:
        names = sorted(path.stem for path in (Path(__file__).parents[1] / folder).glob("*.yaml"))
        directory = incomplete.rpartition("/")[0]
        files = (str(path) for path in sorted(Path(directory or ".").glob("*.yaml")))
        return [name for name in [*names, *files] if name.startswith(incomplete)]

    return complete


suites, claims, searches = map(_shipped, ("suites", "claims", "searches"))


def runs(incomplete: str) -> list[str]:
    """Complete the path of a run, below ``runs`` or below what is typed; the newest first."""
    return sorted(_directories_with("plan.json", incomplete), reverse=True)


def searches_run(incomplete: str) -> list[str]:
    """Complete the path of a search that was run, as :func:`runs` does."""
    from accelmark.results.rounds.search import CONFIG_FILE

    return sorted(_directories_with(CONFIG_FILE, incomplete), reverse=True)


def results(incomplete: str) -> list[str]:
    """Complete the path of a run, a search or a bundle; without a match, the shell completes file names."""
    from accelmark.results.store.bundle import SUFFIX

    folder = Path(incomplete.rpartition("/")[0] or ("/" if incomplete.startswith("/") else "."))
    bundles = sorted(str(path) for path in folder.glob(f"*{SUFFIX}") if str(path).startswith(incomplete))
    return [*runs(incomplete), *searches_run(incomplete), *bundles]


def _directories_with(file: str, incomplete: str) -> Iterator[str]:
    directory, _, start = incomplete.rpartition("/")
    folder = Path(directory or ("/" if incomplete.startswith("/") else "runs"))
    yield from (str(path.parent) for path in folder.glob(f"*/{file}") if path.parent.name.startswith(start))
