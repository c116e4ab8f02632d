"""Convert FlagPerf's files into a cluster file, a run file and settings of a case, and list what has no equivalent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from accelmark.compat.flagperf.inference import case_of, is_inference, layer_of
from accelmark.compat.flagperf.parse import TABLES, Given, Parsed, Values, parse_file
from accelmark.compat.flagperf.site import cluster_of, run_of, take
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.layers import Layer, nest, resolve

_SCALE: Final = re.compile(r"config_[^/]+x[1-9][0-9]*x[1-9][0-9]*")
_EVERY_SCALE: Final = "config_common"
_NUMBERS: Final[dict[str, str]] = TABLES["numbers"]
_PRECISIONS: Final[dict[str, str]] = TABLES["precisions"]
_LEAST: Final = Layer("", {"batch_size": 1, "end.max_steps": 1})
"""Required settings of a case, with which a layer can be checked alone."""


@final
@dataclass(slots=True)
class Converted:
    """The converted files."""

    cluster: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    configs: dict[str, Values] = field(default_factory=dict)
    """File name (``config.yaml``, ``config_<HW>x<nnodes>x<nproc>.yaml``, ``infer.yaml``) -> settings."""
    left_over: list[Problem] = field(default_factory=list)
    """Settings that were not converted, each with the reason."""


def convert(paths: Iterable[Path]) -> Converted:
    """Convert FlagPerf's files to one cluster file and one run file.

    Raises SpecError if a file cannot be read, the cluster is invalid, or two files give the same output file.
    """
    result = Converted()
    given: dict[str, Given] = {}
    cases: list[Given] = []
    inference: dict[str, list[Given]] = {}
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
        if is_inference(path):
            inference.setdefault(case_of(path), []).extend(parsed.settings())
            continue
        if not path.stem.startswith("config_"):
            take(parsed, given, cases, result.left_over)
            continue
        name = "config.yaml" if path.stem == _EVERY_SCALE else f"{path.stem}.yaml"
        before = origins.setdefault(name, path)
        if before != path:
            what = f"would become {name}, as {before} does: import them one at a time, each with an --out of its own"
            raise SpecError([Problem(str(path), "", what)])
        result.configs[name] = _settings_of(parsed, result.left_over)
    if len(inference) > 1:
        what = f"are of several cases, {', '.join(inference)}: import one case at a time, each with an --out of its own"
        raise SpecError([Problem("infer.yaml", "", what)])
    for case, settings in inference.items():
        if layer := layer_of(settings, case, result.left_over):
            result.configs["infer.yaml"] = layer
    result.cluster = cluster_of(given, result.left_over)
    result.run = run_of(given, cases, result.cluster, result.left_over)
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


def _settings_of(parsed: Parsed, left_over: list[Problem]) -> Values:
    """Return the file's settings; those that AccelMark would reject are added to ``left_over``."""
    taken: dict[str, Given] = {}
    unknown = "AccelMark has no such setting; look whether the case's model settings mean it"
    for item in parsed.settings():
        if item.key in _PRECISIONS:
            why = _take_precision(item, taken)
        elif item.key in _NUMBERS:
            why = _take_number(item, taken)
        else:
            why = TABLES["no_equivalent"].get(item.key, unknown)
        if why:
            left_over.append(item.left(why))
    values = {dotted: _value(item) for dotted, item in taken.items()}
    try:
        resolve(_LEAST, [Layer(parsed.file, values)], mutable=(), is_open=True)
    except SpecError as error:
        for key, problem in {problem.key: problem for problem in error.problems}.items():
            del values[key]
            left_over.append(taken[key].left(f"does not fit {key}: {problem.what}"))
    return nest(values)


def _value(item: Given) -> Any:
    return _PRECISIONS.get(item.key, item.value)


def _take_number(item: Given, taken: dict[str, Given]) -> str:
    """Take a number, or return why not."""
    if item.value is None:
        return "is None: the case's own value stays"
    if not isinstance(item.value, int | float) or isinstance(item.value, bool) or not math.isfinite(item.value):
        return f"is no number: {item.value!r}"
    return _take(_NUMBERS[item.key], item, taken)


def _take_precision(item: Given, taken: dict[str, Given]) -> str:
    """Take a switch that names a precision, or return why not."""
    if item.value is False:
        return "False does not say which precision it is instead: the case's own is kept; set precision to fp32 or tf32"
    if item.value is not True:
        return f"is neither True nor False: {item.value!r}; set precision to fp16 or bf16 where it means that"
    before = taken.get("precision")
    # amp enables a lower precision; another setting may specify which one.
    if before is not None and before.key == "amp":
        taken["precision"] = item
    elif before is None or item.key != "amp":
        return _take("precision", item, taken)
    return ""


def _take(dotted: str, item: Given, taken: dict[str, Given]) -> str:
    before = taken.setdefault(dotted, item)
    return "" if _value(before) == _value(item) else f"{before.key} gives {dotted} already, as {_value(before)!r}"
