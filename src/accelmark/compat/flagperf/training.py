"""FlagPerf's configurations of training cases (``config_*.py``) and of inference (``configurations.yaml``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

from accelmark.compat.flagperf.coverage import equivalent
from accelmark.compat.flagperf.parse import TABLES, Given, Parsed, parse_file
from accelmark.spec.errors import Problem, nearest
from accelmark.spec.layers import resolve_inference
from accelmark.spec.plugins.catalog import folders, load_case
from accelmark.spec.settings.inference import InferCaseSpec

_SCALE: Final = re.compile(r"config_([^/]+)x([1-9][0-9]*)x([1-9][0-9]*)")
_EVERY_SCALE: Final = "config_common"
_NUMBERS: Final[dict[str, str]] = TABLES["numbers"]
_PRECISIONS: Final[dict[str, str]] = TABLES["precisions"]
_UNKNOWN: Final = "AccelMark has no such setting; look whether the case's model settings mean it"


@final
@dataclass(frozen=True, slots=True)
class Config:
    """One configuration file of a training case."""

    parsed: Parsed
    scale: tuple[str, ...] | None
    """Chip, hosts and devices per host as in keys; None: every scale."""
    case: tuple[str, str] | None
    """FlagPerf's model and framework, by the folder ``<model>-<framework>``; None: the folder has another name."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a file; None if its name has no scale. Raises SpecError if it cannot be read."""
        scale = _SCALE.fullmatch(path.stem)
        if scale is None and path.stem != _EVERY_SCALE:
            return None
        return cls(parse_file(path), scale.groups() if scale else None, case_of_folder(path.absolute().parent))

    @property
    def name(self) -> str:
        """Name of the YAML file with its settings in a vendor's folder of the case."""
        return "config.yaml" if self.scale is None else f"{Path(self.parsed.file).stem}.yaml"

    def applies(self, written: str) -> bool:
        """Return whether it configures a key of ``CASES``."""
        model, framework, *rest = [*written.split(":"), "", ""][:5]
        own = self.case is None or self.case == (model, framework.partition("_")[0])
        return own and (self.scale is None or self.scale == tuple(rest))

    def unread(self, *, with_common: bool) -> list[Problem]:
        """Return its statements that were not read, each with the reason."""
        problems = [Problem(self.parsed.file, key, why) for key, why in self.parsed.skipped.items()]
        for line, module in self.parsed.taken_whole.items():
            if module.rpartition(".")[2] != _EVERY_SCALE:
                what = f"takes everything from {module}, which is not read"
            elif not with_common:
                what = f"takes everything from {module}: import that file too, it applies to every scale"
            else:
                continue
            problems.append(Problem(self.parsed.file, line, what))
        return problems


def case_of_folder(folder: Path) -> tuple[str, str] | None:
    """Return FlagPerf's model and framework of ``<model>-<framework>`` or its ``config``, None for other folders."""
    model, dash, framework = (folder.parent if folder.name == "config" else folder).name.partition("-")
    known = model in folders("cases") or equivalent(model, "train") is not None
    return (model, framework.partition("_")[0]) if dash and known else None


def settings_of(parsed: Parsed, case: str | None, left_over: list[Problem]) -> dict[str, Given]:
    """Return a file's settings by AccelMark's dotted names; list those without equivalent in ``left_over``."""
    taken: dict[str, Given] = {}
    for item in parsed.settings():
        if item.key in _PRECISIONS:
            why = _take_precision(item, taken)
        elif item.key in _NUMBERS:
            why = _take_number(item, taken)
        elif item.key.startswith("target_"):
            train = load_case(case).train if case in folders("cases") else None
            target = f": {train.target.text}" if train is not None and train.target is not None else ""
            why = f"the target is the case's, and no run can change it{target}"
        else:
            why = TABLES["no_equivalent"].get(item.key, _UNKNOWN)
        if why:
            left_over.append(item.left(why))
    return taken


def value_of(item: Given) -> Any:
    """Return the value of a setting that :func:`settings_of` returned."""
    return _PRECISIONS.get(item.key, item.value)


def _take_number(item: Given, taken: dict[str, Given]) -> str:
    """Take a number, or return why not."""
    if item.value is None:
        return "is None: the case's own value stays"
    if not isinstance(item.value, int | float) or isinstance(item.value, bool) or not math.isfinite(item.value):
        return f"is not a number: {item.value!r}"
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
    return "" if value_of(before) == value_of(item) else f"{before.key} already gives {dotted}, as {value_of(before)!r}"


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
