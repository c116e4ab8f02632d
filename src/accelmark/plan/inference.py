"""Plan inference: its settings, its data and weights, and its one process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from accelmark.plan.adaptation import vendor_layers
from accelmark.plan.benchmarks import BENCHMARK_REQUIRES, benchmark_dirs, benchmark_problems
from accelmark.plan.plan import LayerFile
from accelmark.plan.request import KeyRequest, PlannedWork, require_task
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.job import InferJob
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, Provenance, resolve_inference
from accelmark.spec.parallelism import fitting
from accelmark.spec.plugins.catalog import engine_specs
from accelmark.spec.plugins.launcher import option_names
from accelmark.spec.settings.inference import InferCaseSpec, InferSettings

HF_CONFIG: Final = "config.json"
"""File by which a directory of weights in Hugging Face's layout is recognised."""
_FILES: Final = {"exist_compiler_path": False, "exist_onnx_path": True}
"""Settings that name a file -> whether they may be a word that is none."""


def plan_inference(request: KeyRequest) -> PlannedWork:
    """Merge the inference settings of a key, and find its data and weights."""
    side = _inference_side(request)
    _check_scale(request, side)
    run = request.run
    layers, files = vendor_layers(request.adaptation, run.vendor.name, request.key, request.capabilities, "infer")
    # The command-line option for synthetic data uses the name of the training setting.
    given = dict(run.command_line)
    if "loader.synthetic" in given:
        given["synthetic"] = given.pop("loader.synthetic")
    over = request.own_layers(given, _FILES)
    layers, files = _for_engine(layers, files, over, run.vendor_folder)
    resolved = resolve_inference(side, request.case_file, vendor=layers, over=over, reserved=option_names())
    settings = resolved.settings
    if side.iterative:
        _check_iterative(settings, resolved.provenance, run.vendor_folder)
    _check_precision(settings, resolved.provenance["precision"].layer, run.vendor_folder)
    data_dirs, warnings = _data(request, side, settings)
    _check_benchmarks(request, settings, resolved.provenance["compiler"].layer, data_dirs)
    if request.key.nproc > 1 and (settings.synthetic or side.weights is None or "weights" in data_dirs):
        _check_split(request, settings, data_dirs)
    if problems := list(_unusable(request, settings, resolved.provenance)):
        raise SpecError(problems)
    _check_device(request, settings, resolved.provenance["compiler"].layer)
    notes = [note.what for note in resolved.notes if note.severity == "warning"]
    notes += _unknown_options(settings, resolved.provenance, run.vendor_folder)
    of_case = {
        name: getattr(side, name)
        for name in (
            "unit", "metric", "metric_title", "tolerance", "reference", "min_agreement", "benchmarks", "parameters",
            "iterative",
        )
    }  # fmt: skip
    return PlannedWork(
        work=InferJob(**of_case, settings=settings, notes=resolved.notes),
        directory=_directory(request.key, settings),
        data_dirs=data_dirs,
        provenance=resolved.provenance,
        layer_files=files,
        requires=_requires(request, data_dirs, settings),
        engine=settings.compiler,
        warnings=(*notes, *warnings),
    )


def _for_engine(
    layers: Sequence[Layer], files: Sequence[LayerFile], over: Sequence[Layer], vendor_folder: Path
) -> tuple[list[Layer], tuple[LayerFile, ...]]:
    """Leave out the vendor's files with a precision in which the engine that a run chooses itself does not compute."""
    chosen = next((str(layer.values["compiler"]) for layer in reversed(over) if "compiler" in layer.values), "")
    engine = engine_specs(vendor_folder).get(chosen)
    if engine is None or not engine.precisions:
        return list(layers), tuple(files)
    reasons = {
        layer.name: f"{chosen} does not compute in {layer.values['precision']}"
        for layer in layers
        if layer.values.get("precision", engine.precisions[0]) not in engine.precisions
    }
    noted = (
        file.model_copy(update={"applied": False, "reason": reasons[file.file]}) if file.file in reasons else file
        for file in files
    )
    return [layer for layer in layers if layer.name not in reasons], tuple(noted)


def _unknown_options(settings: InferSettings, layers: Mapping[str, Provenance], vendor_folder: Path) -> Iterator[str]:
    """Yield the options that the engine does not declare; those of engines that declare none are not known."""
    engine = engine_specs(vendor_folder).get(settings.compiler or "")
    known = engine.options if engine is not None else {}
    for name in settings.engine_options if known else ():
        if name not in known:
            where = f"{layers[f'engine_options.{name}'].layer}: engine_options.{name}"
            yield f"{where}: {settings.compiler} has no such option ({nearest(name, known)})"


def _unusable(request: KeyRequest, settings: InferSettings, layers: Mapping[str, Provenance]) -> Iterator[Problem]:
    """Yield settings that the engine does not take, as far as it declares that; files are looked for here."""
    engines = engine_specs(request.run.vendor_folder)
    engine = engines.get(settings.compiler or "")
    if engine is None:
        return
    is_here = request.run.launcher.is_localhost
    for name, value in settings.engine_options.items():
        if name in engine.options and (wrong := engine.options[name].problem(value)) is not None:
            key = f"engine_options.{name}"
            yield Problem(layers[key].layer, key, f"{wrong}, found {value!r}")
    compiled = settings.exist_compiler_path
    if compiled is not None and engine.loads is False:
        what = f"{settings.compiler} cannot load a compiled engine"
        yield Problem(layers["exist_compiler_path"].layer, "exist_compiler_path", what, "take the setting out")
    elif compiled is not None and is_here and not Path(compiled).expanduser().exists():
        yield Problem(layers["exist_compiler_path"].layer, "exist_compiler_path", f"{compiled} does not exist")
    if settings.generate_batches and not engine.generates:
        able = ", ".join(name for name, each in engines.items() if each.generates)
        hint = f"engines that generate: {able}; or set generate_batches to []"
        yield Problem(layers["compiler"].layer, "compiler", f"{settings.compiler} generates no text", hint)
    named, onnx = settings.exist_onnx_path, any(each.startswith("onnxscript") for each in engine.requires)
    file = Path(named or "").expanduser()
    if named is not None and compiled is None and onnx and is_here and not (file.is_absolute() and file.is_file()):
        what = f"{settings.compiler} compiles an ONNX file, and {named!r} is none"
        hint = "null exports the model; or name a file"
        yield Problem(layers["exist_onnx_path"].layer, "exist_onnx_path", what, hint)
    if settings.no_validation and not onnx and (engine.loads is False or (engine.loads and compiled is None)):
        what = f"leaves {settings.compiler} without the PyTorch model that it compiles"
        loads = ", or name its compiled engine (exist_compiler_path)" if engine.loads else ""
        yield Problem(layers["no_validation"].layer, "no_validation", what, f"set it to false{loads}")


def _check_device(request: KeyRequest, settings: InferSettings, layer: str) -> None:
    """Note that the engine computes on other devices than the vendor's."""
    engines = engine_specs(request.run.vendor_folder)
    engine, declared = engines.get(settings.compiler or ""), request.run.vendor.frameworks.get(request.key.framework)
    if engine is None or declared is None or declared.device_type in (engine.device_types or (declared.device_type,)):
        return
    device = declared.device_type
    what = f"{settings.compiler} computes on {', '.join(engine.device_types)}, the vendor's device is {device}"
    able = ", ".join(name for name, each in engines.items() if device in (each.device_types or (device,)))
    request.missing.append(Problem(layer, "compiler", what, f"engines for it: {able}"))


def _check_precision(settings: InferSettings, layer: str, vendor_folder: Path) -> None:
    """Reject an engine that does not compute in the precision; those that declare none refuse it when they compile."""
    engine = engine_specs(vendor_folder).get(settings.compiler or "")
    if engine is not None and engine.precisions and settings.precision not in engine.precisions:
        what = f"{settings.compiler} does not compute in {settings.precision}"
        raise SpecError([Problem(layer, "precision", what, f"it computes in: {', '.join(engine.precisions)}")])


def _check_iterative(settings: InferSettings, layers: Mapping[str, Provenance], vendor_folder: Path) -> None:
    """Reject engines and options that need one static graph, where answers take steps that depend on each other."""
    engines = engine_specs(vendor_folder)
    engine, why = engines.get(settings.compiler or ""), "an answer of this case takes steps that depend on each other"
    problems: list[Problem] = []
    if engine is not None and not engine.iterates:
        able = ", ".join(name for name, each in engines.items() if each.iterates)
        what = f"{settings.compiler} compiles one static graph, and {why}"
        problems.append(Problem(layers["compiler"].layer, "compiler", what, f"engines that compute it: {able}"))
    if settings.engine_options.get("cuda_graphs"):
        layer = layers["engine_options.cuda_graphs"].layer
        what = f"a recorded graph holds one call, and {why}"
        problems.append(Problem(layer, "engine_options.cuda_graphs", what, "leave the option out"))
    if problems:
        raise SpecError(problems)


def _check_benchmarks(request: KeyRequest, settings: InferSettings, layer: str, data: Mapping[str, Path]) -> None:
    """Reject accuracy benchmarks of an engine that generates no text; those without data are missing data."""
    if settings.synthetic:
        return
    request.missing.extend(benchmark_problems(request, settings, data))
    engines = engine_specs(request.run.vendor_folder)
    engine = engines.get(settings.compiler or "")
    if settings.benchmarks and engine is not None and not engine.generates:
        what = f"{settings.compiler} generates no text and cannot answer {', '.join(settings.benchmarks)}"
        able = ", ".join(name for name, each in engines.items() if each.generates)
        raise SpecError([Problem(layer, "compiler", what, f"engines that generate: {able}")])


def _requires(request: KeyRequest, data: dict[str, Path], settings: InferSettings) -> dict[str, tuple[str, ...]]:
    """Return the packages that LoadGen's scenarios and the reader of packaged or given weights need."""
    has_scenarios = settings.scenarios or settings.generate_scenarios
    found: dict[str, tuple[str, ...]] = {"scenarios": ("mlcommons-loadgen>=5.1",)} if has_scenarios else {}
    if request.case.infer is not None and request.case.infer.generates:
        found["generation"] = ("transformers>=5.20", "tokenizers>=0.20", "safetensors>=0.4")
    if settings.benchmarks:
        found["benchmarks"] = BENCHMARK_REQUIRES
    if any(request.folder.path.glob("*.safetensors")) or "weights" in data:
        found["weights of the case"] = ("safetensors>=0.4",)
    return found


def _inference_side(request: KeyRequest) -> InferCaseSpec:
    key, where = request.key, request.run.where
    side = require_task(request, "infer", request.case.infer)
    problems: list[Problem] = []
    if not (request.folder.path / f"infer_{key.framework}.py").is_file():
        present = [file.stem.removeprefix("infer_") for file in request.folder.path.glob("infer_*.py")]
        what = f"the case {key.model!r} has no inference in framework {key.framework!r}"
        problems.append(Problem(where, str(key), what, nearest(key.framework, present)))
    if problems:
        raise SpecError(problems)
    return side


def _check_scale(request: KeyRequest, side: InferCaseSpec) -> None:
    """Reject several hosts, and several devices for a model that is not split over them."""
    key = request.key
    if key.nnodes != 1:
        what = f"requests {key.nnodes} hosts; inference runs on one"
    elif key.nproc != 1 and not side.generates:
        what = f"requests {key.nproc} devices; only language models are split over several devices"
    else:
        return
    raise SpecError([Problem(request.run.where, str(key), what, f"write {key.model}:{key.framework}")])


def _check_split(request: KeyRequest, settings: InferSettings, data: Mapping[str, Path]) -> None:
    """Reject engines that compute on fewer devices, and numbers of devices that do not divide the model's heads."""
    key, where = request.key, request.run.where
    engines = engine_specs(request.run.vendor_folder)
    engine = engines.get(settings.compiler or "")
    able = [name for name, each in engines.items() if each.uses(key.nproc)]
    if settings.compiler is None or (engine is not None and settings.compiler not in able):
        what = f"{settings.compiler or 'the framework'} computes on one device, the key requests {key.nproc}"
        raise SpecError([Problem(where, "compiler", what, f"engines of several devices: {', '.join(able) or 'none'}")])
    file = data.get("weights", request.folder.path) / HF_CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError([Problem(str(file), str(key), f"the model's configuration cannot be read: {error}")]) from error
    named = {name: config.get(name) for name in ("num_attention_heads", "num_key_value_heads")}
    sizes = {name: size for name, size in named.items() if isinstance(size, int)}
    if wrong := [f"{name} {size}" for name, size in sizes.items() if size % key.nproc]:
        fits = ", ".join(map(str, fitting(0, sizes)))
        what = f"{key.nproc} devices do not divide the model's {' and '.join(wrong)}"
        raise SpecError([Problem(where, str(key), what, f"numbers of devices that fit: {fits}")])


def _data(request: KeyRequest, side: InferCaseSpec, settings: InferSettings) -> tuple[dict[str, Path], list[str]]:
    """Return the directories of the required data and weights, and warnings about missing ones."""
    if settings.synthetic:
        return {}, ["synthetic data: the figures are of speed only"]
    named = request.request.data
    warnings: list[str] = []
    wanted = set(side.data)
    for name in side.optional_data:
        if named is not None and (named / name).is_dir():
            wanted.add(name)
        else:
            warnings.append(f"runs without {name}: name a directory that contains {name}/")
    if side.optional_data and not wanted:
        warnings = []  # it does not run at all
        missing = " or ".join(f"{name}/" for name in side.optional_data)
        where = f"{named} has no {missing}" if named is not None else f"no {missing}"
        remedy = f"--data DIRECTORY, the one that contains {missing}, or --synthetic for speed only"
        request.missing.append(Problem(request.run.where, str(request.key), f"no data: {where}", remedy))
    found = request.data_of(wanted)
    if side.weights is not None:
        file = named / side.weights if named is not None else None
        if file is not None and (file.is_file() or (file / HF_CONFIG).is_file()):
            found["weights"] = file.absolute()
        elif side.generates:
            what = f"no weights: {file if file is not None else side.weights}/ has to be a directory with {HF_CONFIG}"
            remedy = f"--data DIRECTORY, the one that contains {side.weights}/ in Hugging Face's layout"
            request.missing.append(Problem(request.run.where, str(request.key), what, remedy))
        else:
            place = file if file is not None else f"{side.weights} below --data"
            warnings.append(f"no trained weights ({place}): the figures are of speed only")
    return found | benchmark_dirs(request, settings), warnings


def _directory(key: CaseKey, settings: InferSettings) -> str:
    """Return the directory of a key's rounds, which differs by engine, precision, batch size and engine options."""
    return f"{key.slug}-infer-{engine_words(settings)}"


def engine_words(settings: InferSettings) -> str:
    """Return engine, precision, batch size and a hash of the engine options, as a part of a directory's name."""
    name = f"{settings.compiler or 'none'}-{settings.precision}-b{settings.batch_size}"
    if not settings.engine_options:
        return name
    options = json.dumps(settings.model_dump(mode="json")["engine_options"], sort_keys=True)
    return f"{name}-o{hashlib.sha256(options.encode()).hexdigest()[:6]}"
