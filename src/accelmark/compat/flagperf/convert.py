"""Convert FlagPerf's files into a cluster file, a run file and settings of a case, and list what has no equivalent."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from accelmark.compat.flagperf.parse import Parsed, parse_file
from accelmark.compat.flagperf.settings import settings_of
from accelmark.compat.flagperf.site import cluster_of, run_of, take
from accelmark.compat.flagperf.values import Given, Values
from accelmark.spec.errors import Problem, SpecError

_SCALE: Final = re.compile(r"config_[^/]+x[1-9][0-9]*x[1-9][0-9]*")
_EVERY_SCALE: Final = "config_common"


@final
@dataclass(slots=True)
class Converted:
    """The converted files."""

    cluster: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    configs: dict[str, Values] = field(default_factory=dict)
    """File name (``config.yaml``, ``config_<HW>x<nnodes>x<nproc>.yaml``) -> settings."""
    left_over: list[Problem] = field(default_factory=list)
    """Settings that were not converted, each with the reason."""


def convert(paths: Iterable[Path]) -> Converted:
    """Convert FlagPerf's files to one cluster file and one run file.

    Raises:
        SpecError: a file cannot be read, the cluster is invalid, or two files give the same output file.
    """
    result = Converted()
    given: dict[str, Given] = {}
    cases: list[Given] = []
    origins: dict[str, Path] = {}
    places = dict.fromkeys(paths)
    with_common = any(path.stem == _EVERY_SCALE for path in places)
    for path in places:
        if path.stem.startswith("config_") and path.stem != _EVERY_SCALE and not _SCALE.fullmatch(path.stem):
            what = f"is named neither config_<HW>x<nnodes>x<nproc> nor {_EVERY_SCALE}: its scale is unknown"
            result.left_over.append(Problem(str(path), "", what))
            continue
        parsed = parse_file(path)
        _list_unread(parsed, with_common, result.left_over)
        if not path.stem.startswith("config_"):
            take(parsed, given, cases, result.left_over)
            continue
        name = "config.yaml" if path.stem == _EVERY_SCALE else f"{path.stem}.yaml"
        before = origins.setdefault(name, path)
        if before != path:
            what = f"would become {name}, as {before} does: import them one at a time, each with an --out of its own"
            raise SpecError([Problem(str(path), "", what)])
        result.configs[name] = settings_of(parsed, result.left_over)
    result.cluster = cluster_of(given, result.left_over)
    result.run = run_of(given, cases, result.left_over)
    return result


def _list_unread(parsed: Parsed, with_common: bool, left_over: list[Problem]) -> None:
    left_over += [Problem(parsed.file, key, why) for key, why in parsed.skipped.items()]
    for line, module in parsed.taken_whole.items():
        is_common = module.rpartition(".")[2] == _EVERY_SCALE
        if not is_common:
            left_over.append(Problem(parsed.file, line, f"takes everything from {module}, which is not read"))
        elif not with_common:
            what = f"takes everything from {module}: import that file too, it becomes config.yaml for every scale"
            left_over.append(Problem(parsed.file, line, what))
