"""FlagPerf's inference files: ``configurations.yaml``, those of vendors, and ``parameters.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from accelmark.compat.flagperf.coverage import equivalent
from accelmark.compat.flagperf.parse import TABLES, Given
from accelmark.spec.errors import Problem, nearest
from accelmark.spec.layers import resolve_inference
from accelmark.spec.plugins.catalog import folders, load_case
from accelmark.spec.settings.inference import InferCaseSpec

_CONFIGURATION: Final = re.compile(r"(\w+_)?configurations?\.ya?ml")
_PARAMETERS: Final = "parameters.yaml"
_OVERRIDES: Final = "vendor_config"
"""Folder of a case's ``<vendor>_configurations.yaml``."""
_NONE: Final = object()
_NO_EQUIVALENT: Final[dict[str, str]] = TABLES["inference_no_equivalent"]


def is_inference(path: Path) -> bool:
    """Return whether the file has settings of an inference case."""
    return path.name == _PARAMETERS or _CONFIGURATION.fullmatch(path.name) is not None


def case_of(path: Path) -> str:
    """Return AccelMark's name of a file's case, by its folder."""
    folder = path.absolute().parent
    name = folder.parent.name if folder.name == _OVERRIDES else folder.name
    covered = equivalent(name, "infer")
    return name if covered is None or covered.case is None else covered.case


def data_directory(given: str, case: str) -> tuple[str, str]:
    """Return the directory that contains the data sets of an inference case, and a note about it.

    FlagPerf names the data set itself (``/raid/imagenet/val``), AccelMark the directory that contains ``imagenet/``.
    """
    side = load_case(case).infer
    names = (*side.data, *side.optional_data) if side is not None else ()
    parts = Path(given).parts
    at = next((place for place, part in enumerate(parts) if part in names), None)
    if not names or at == 0:
        return given, ""
    wanted = f"the directory that contains {' and '.join(f'{name}/' for name in names)}"
    if at is None:
        return given, f"data {given}: name {wanted}"
    return str(Path(*parts[:at])), f"data {given}: becomes {wanted}"


def inference_settings(given: Iterable[Given], case: str, left_over: list[Problem]) -> dict[str, Given]:
    """Return settings that differ from the case's; list those without equivalent in ``left_over``.

    Of several files with one setting the later one counts, as FlagPerf lets a vendor's file override the case's.
    """
    items = list(given)
    side = load_case(case).infer if case in folders("cases") else None
    if side is None:
        what = f"AccelMark has no inference case {case!r} ({nearest(case, folders('cases'))}), by the file's folder"
        left_over += [Problem(file, "", what) for file in dict.fromkeys(item.file for item in items)]
        return {}
    taken: dict[str, Given] = {}
    for item in items:
        is_parameter = Path(item.file).name == _PARAMETERS
        why = _parameter(item, side) if is_parameter else _NO_EQUIVALENT.get(item.key, "")
        if not why and item.key == "flops":
            why = f"the case states the FLOPs of an item ({side.configurations.get('flops')}); another value is OPEN"
        if why:
            left_over.append(item.left(why))
        elif not is_parameter and (item.is_set or item.value is None):
            taken["precision" if item.key == "fp16" else item.key] = item
    own = resolve_inference(side, case, over=[]).settings
    return {key: item for key, item in taken.items() if getattr(own, key, _NONE) != inference_value(item)}


def inference_value(item: Given) -> Any:
    """Return the value of a setting that :func:`inference_settings` returned."""
    return {True: "fp16", False: "fp32"}.get(item.value, item.value) if item.key == "fp16" else item.value


def _parameter(item: Given, side: InferCaseSpec) -> str:
    own = side.parameters.get(item.key)
    if own == item.value:
        return ""
    return "parameters are the case's on every chip" + ("" if own is None else f": {own!r}")
