"""Shell completion of names: cases, vendors, frameworks, engines, suites, data sets, runs, explained names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

_COLON: Final = ":"
_BEFORE: Final = "_ACCELMARK_COMPLETED"
"""Variable with the parts of a key that bash has taken for words of their own, with their colons."""


def join_words_of_bash() -> None:
    """Make one word of each key that bash has split at its colons; of the current one bash replaces the last part."""
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


def keys_to_train(incomplete: str) -> list[str]:
    """Complete the case, and after a colon the framework, of a key to train."""
    return _keys("", incomplete)


def keys_to_infer(incomplete: str) -> list[str]:
    """Complete the case, and after a colon the framework, of a key to infer with."""
    return _keys("infer_", incomplete)


def _keys(start: str, incomplete: str) -> list[str]:
    from accelmark.spec.plugins.catalog import folders

    before = os.environ.get(_BEFORE, "")
    case, *others = f"{before}{incomplete}".split(_COLON)
    if not others:
        return cases(incomplete)
    known = folders("cases").get(case)
    if known is None or len(others) > 1:
        return []
    names = [name for name in folders("frameworks") if (known.path / f"{start}{name}.py").is_file()]
    return [found.removeprefix(before) for name in names if (found := f"{case}:{name}").startswith(before + incomplete)]


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


def listed_frameworks(incomplete: str) -> list[str]:
    """Complete the last of several names of frameworks between commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in frameworks(last) if name not in before.split(",")]


def scenarios(incomplete: str) -> list[str]:
    """Complete the name of one of LoadGen's scenarios."""
    from accelmark.spec.settings.inference import ScenarioName

    return [name for name in get_args(ScenarioName) if name.startswith(incomplete)]


def token_scenarios(incomplete: str) -> list[str]:
    """Complete the name of one of LoadGen's scenarios with token latencies."""
    from accelmark.spec.settings.serving import TokenScenario

    return [name for name in get_args(TokenScenario) if name.startswith(incomplete)]


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


def datasets(incomplete: str) -> list[str]:
    """Complete the name of a data set or of weights."""
    from accelmark.datasets.catalogue import known_datasets

    return [known.spec.name for known in known_datasets() if known.spec.name.startswith(incomplete)]


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
    return sorted(_holding("plan.json", incomplete), reverse=True)


def searches_run(incomplete: str) -> list[str]:
    """Complete the path of a search that was run, as :func:`runs` does."""
    from accelmark.results.rounds.search import CONFIG_FILE

    return sorted(_holding(CONFIG_FILE, incomplete), reverse=True)


def results(incomplete: str) -> list[str]:
    """Complete the path of a run, a search or a bundle; where nothing begins so, the shell completes file names."""
    from accelmark.results.store.bundle import SUFFIX

    folder = Path(incomplete.rpartition("/")[0] or ("/" if incomplete.startswith("/") else "."))
    bundles = sorted(str(path) for path in folder.glob(f"*{SUFFIX}") if str(path).startswith(incomplete))
    return [*runs(incomplete), *searches_run(incomplete), *bundles]


def _holding(file: str, incomplete: str) -> Iterator[str]:
    """Yield the directories that have ``file``."""
    folder = Path(incomplete.rpartition("/")[0] or ("runs" if not incomplete.startswith("/") else "/"))
    start = incomplete.rpartition("/")[2]
    for found in folder.glob(f"*/{file}"):
        if found.parent.name.startswith(start):
            yield str(found.parent)


def explained(incomplete: str) -> list[str]:
    """Complete a name that ``explain`` knows."""
    from accelmark.explain.entries import entries

    return sorted({entry.name for entry in entries() if entry.name.startswith(incomplete)})
