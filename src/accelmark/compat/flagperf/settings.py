"""Convert a FlagPerf configuration of a case (``config_<HW>x<nnodes>x<nproc>.py``) to a layer of settings."""

from __future__ import annotations

import math
from typing import Any, Final

from accelmark.compat.flagperf.parse import Parsed
from accelmark.compat.flagperf.values import IGNORED, Given, Values, settings_in
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.layers import Layer, nest, resolve

_NUMBERS: Final = {
    "train_batch_size": "batch_size",
    "eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "weight_decay_rate": "optimizer.weight_decay",
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
    "opt_lamb_beta_1": "optimizer.beta1",
    "opt_lamb_beta_2": "optimizer.beta2",
    "seed": "seed",
    "max_steps": "end.max_steps",
    "max_epoch": "end.max_epochs",
    "max_epochs": "end.max_epochs",
    "max_samples_termination": "end.max_samples",
    "warmup_steps": "schedule.warmup_steps",
    "warmup_proportion": "schedule.warmup_ratio",
    "warmup": "schedule.warmup_ratio",
    "num_workers": "loader.num_workers",
    "dataloader_num_workers": "loader.num_workers",
    "max_grad_norm": "gradient_clip_norm",
    "eval_steps": "evaluate.every_steps",
    "log_freq": "log_every_steps",
}
_PRECISIONS: Final = {"fp16": "fp16", "amp": "fp16", "bf16": "bf16"}
_LEAST: Final = Layer("", {"batch_size": 1, "end.max_steps": 1})
"""Required settings of a case, with which a layer can be checked alone."""


def settings_of(parsed: Parsed, left_over: list[Problem]) -> Values:
    """Return the file's settings; those that AccelMark would reject are added to ``left_over``."""
    taken: dict[str, Given] = {}
    values: dict[str, Any] = {}
    for item in settings_in(parsed):
        why = ""
        if item.key in _PRECISIONS:
            why = _take_precision(item, taken, values)
        elif item.key in _NUMBERS:
            why = _take_number(item, taken, values)
        else:
            why = IGNORED.get(item.key, "AccelMark has no such setting; look whether the case's model settings mean it")
        if why:
            left_over.append(item.left(why))
    for problem in _misfits(parsed.file, values):
        del values[problem.key]
        left_over.append(taken[problem.key].left(f"does not fit {problem.key}: {problem.what}"))
    return nest(values)


def _take_number(item: Given, taken: dict[str, Given], values: dict[str, Any]) -> str:
    dotted, value = _NUMBERS[item.key], item.value
    if value is None:
        return "is None: the case's own value stays"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return f"is no number: {value!r}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"is no finite number: {value!r}"
    return _take(dotted, item, value, taken, values)


def _take_precision(item: Given, taken: dict[str, Given], values: dict[str, Any]) -> str:
    if item.value is False:
        return "False does not say which precision it is instead: the case's own stays; fp32 and tf32 are the others"
    if item.value is not True:
        return f"is neither True nor False: {item.value!r}; set precision to fp16 or bf16 where it means that"
    precision = _PRECISIONS[item.key]
    before = taken.get("precision")
    # amp enables a lower precision; another setting may specify which one.
    if before is not None and before.key == "amp":
        taken["precision"], values["precision"] = item, precision
        return ""
    if before is not None and item.key == "amp":
        return ""
    return _take("precision", item, precision, taken, values)


def _take(dotted: str, item: Given, value: Any, taken: dict[str, Given], values: dict[str, Any]) -> str:
    if dotted in values and values[dotted] != value:
        return f"{taken[dotted].key} gives {dotted} already, as {values[dotted]!r}"
    taken.setdefault(dotted, item)
    values.setdefault(dotted, value)
    return ""


def _misfits(file: str, values: Values) -> list[Problem]:
    """Return one problem for each dotted key whose value is invalid."""
    try:
        resolve(_LEAST, [Layer(file, values)], mutable=(), is_open=True)
    except SpecError as error:
        return list({problem.key: problem for problem in error.problems}.values())
    return []
