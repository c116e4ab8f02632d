"""Planning the inference side of a key: its settings by the rules of inference, and its one process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelmark.plan.data import DataDirs
from accelmark.spec.case import CaseSpec
from accelmark.spec.catalog import Folder, folders, load_case
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.infer_layers import ResolvedInference, resolve_inference
from accelmark.spec.inference import InferCaseSpec, InferSettings
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer
from accelmark.spec.work import InferJob
from accelmark.spec.yaml_file import read_yaml

VENDOR_FILE = "infer.yaml"
"""The vendor's overrides, in its folder for the case."""


def inference_side(key: CaseKey, folder: Folder, case: CaseSpec, where: str) -> InferCaseSpec:
    """Return the inference side of a case.

    Raises:
        SpecError: the case has none, or not in this framework, or the key asks for several ranks.
    """
    if case.infer is None:
        able = [name for name in folders("cases") if load_case(name).infer is not None]
        what = f"the case {key.model!r} has no inference side; those that have: {', '.join(able) or 'none'}"
        raise SpecError([Problem(where, str(key), what)])
    problems: list[Problem] = []
    if not (folder.path / f"infer_{key.framework}.py").is_file():
        present = [file.stem.removeprefix("infer_") for file in folder.path.glob("infer_*.py")]
        what = f"the case {key.model!r} has no inference in framework {key.framework!r}"
        problems.append(Problem(where, str(key), what, nearest(key.framework, present)))
    if key.world_size != 1:
        what = f"asks for {key.nnodes} hosts with {key.nproc} ranks each; inference runs one rank on one host"
        problems.append(Problem(where, str(key), what, f"write {key.model}:{key.framework}"))
    if problems:
        raise SpecError(problems)
    return case.infer


def resolve_layers(
    side: InferCaseSpec, folder: Folder, adaptation: Path, vendor: str, requests: Sequence[Layer]
) -> ResolvedInference:
    """Lay the vendor's ``infer.yaml`` and what the run asks for on the case's configurations.

    Args:
        side: the inference side of the case.
        folder: the case's folder.
        adaptation: the vendor's folder for the case; it need not exist.
        vendor: the vendor's name.
        requests: the run file's and the command line's layers.

    Raises:
        SpecError: with every problem of every layer.
    """
    path = adaptation / VENDOR_FILE
    own: Layer | None = None
    if path.is_file():
        own = Layer.of(f"vendors/{vendor}/cases/{adaptation.name}/{VENDOR_FILE}", read_yaml(path))
    return resolve_inference(side, f"cases/{folder.name}/case.yaml", vendor=own, over=requests)


def command_line_layer(values: Mapping[str, Any]) -> Layer:
    """Return the command line's layer; its switch for made-up data bears training's name."""
    return Layer("command line", {"synthetic" if key == "loader.synthetic" else key: values[key] for key in values})


def inference_data(
    side: InferCaseSpec, case: CaseSpec, settings: InferSettings, data_dirs: DataDirs, named: Path | None
) -> tuple[dict[str, Path], list[str]]:
    """Return the directories of what a run needs, and warnings about what it goes without.

    Args:
        side: the inference side of the case.
        case: the whole case, for its data.
        settings: made-up data needs none.
        data_dirs: where each data set of a case is.
        named: the directory that a person named, if any.
    """
    if settings.synthetic:
        return {}, ["made-up data: a figure of speed only"]
    warnings: list[str] = []
    wanted = set(side.data)
    for name in side.optional_data:
        if named is not None and (named / name).is_dir():
            wanted.add(name)
        else:
            warnings.append(f"goes without {name}: name a directory that holds {name}/")
    needed = tuple(entry for entry, name in zip(case.data, case.data_names, strict=True) if name in wanted)
    found = dict(data_dirs(case.model_copy(update={"data": needed}), named)) if needed else {}
    if side.weights is not None:
        file = named / side.weights if named is not None else None
        if file is not None and file.is_file():
            found["weights"] = file.absolute()
        else:
            where = f"{named}/" if named is not None else "the directory named with the run: "
            warnings.append(f"no trained weights ({where}{side.weights}): a figure of speed only")
    return found, warnings


def job_of(side: InferCaseSpec, resolved: ResolvedInference) -> InferJob:
    """Return the inference side of a job."""
    return InferJob(
        unit=side.unit,
        metric=side.metric,
        tolerance=side.tolerance,
        reference=side.reference,
        settings=resolved.settings,
        parameters=side.parameters,
        notes=resolved.notes,
    )


def slug(key: CaseKey, settings: InferSettings) -> str:
    """Return the directory of a key's rounds: engines, precisions, batches and options of one key lie side by side."""
    named = f"{key.slug}-infer-{settings.compiler or 'none'}-{settings.precision}-b{settings.batch_size}"
    if not settings.engine_options:
        return named
    options = json.dumps(settings.model_dump(mode="json")["engine_options"], sort_keys=True)
    return f"{named}-o{hashlib.sha256(options.encode()).hexdigest()[:6]}"
