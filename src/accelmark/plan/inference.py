"""Plan inference and serving: settings, data and weights, and the one process of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from accelmark.plan.plan import LayerFile
from accelmark.plan.request import KeyRequest, PlannedWork, require_task, vendor_layers
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.job import InferJob, ServeJob
from accelmark.spec.layers import Layer, Resolved, resolve, resolve_inference
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins import catalog
from accelmark.spec.plugins.catalog import EngineSpec, engine_specs, find, known_engines, load_server, readable
from accelmark.spec.plugins.launcher import option_names
from accelmark.spec.plugins.programs import ServerAdaptation, ServerSpec
from accelmark.spec.settings.inference import ENGINE_ALIASES, InferCaseSpec, InferSettings
from accelmark.spec.settings.serving import SLO_PRESETS, ServeSettings

REQUIRES: Final = {"scenarios": ("mlcommons-loadgen>=5.1",), "benchmarks": ("lm-eval>=0.4.9", "tenacity", "aiohttp")}
"""Setting of inference and serving -> the packages that it needs."""
MODEL_FILE: Final = "serve.py"
"""File of a case with packaged weights: ``write_model`` and ``prompt_text``."""
_FILES_OF_SERVING: Final = ("prompts.file", "load.trace")
"""Settings of serving that name a file."""
HF_CONFIG: Final = "config.json"
"""A directory with this file has weights in Hugging Face's layout."""
_FILES: Final = {"exist_compiler_path": False, "exist_onnx_path": True}
"""Settings that name a file -> whether they may also be another word."""
_OF_CASE: Final = (
    "unit", "metric", "metric_title", "tolerance", "reference", "min_agreement", "benchmarks", "parameters",
    "iterative", "generates",
)  # fmt: skip
"""Fields of a job that are the case's."""


def plan_inference(request: KeyRequest) -> PlannedWork:
    """Merge the inference settings of a key, and find its data and weights."""
    case, run, key = require_task(request, "infer", request.case.infer), request.run, request.key
    if key.nnodes != 1 or (key.nproc != 1 and not case.generates):
        one_device = f"{key.nproc} devices; only language models are split over several devices"
        what = f"requests {f'{key.nnodes} hosts; inference runs on one' if key.nnodes != 1 else one_device}"
        request.problems.append(Problem(request.where, str(key), what, f"write {key.model}:{key.framework}"))
    frameworks = catalog.inference_frameworks_of(request.case)
    if key.framework not in frameworks:
        what = f"the case {key.model!r} has no inference in framework {key.framework!r}"
        request.problems.append(Problem(request.where, str(key), what, nearest(key.framework, frameworks)))
    # The command-line option for synthetic data uses the name of the training setting.
    named = {"synthetic" if name == "loader.synthetic" else name: value for name, value in run.command_line.items()}
    over = request.user_layers(named, _FILES)
    engines = engine_specs(run.vendor_folder)
    chosen = next((layer.values["compiler"] for layer in reversed(over) if "compiler" in layer.values), None)
    chosen = ENGINE_ALIASES.get(str(chosen), chosen)
    layers, files = _layers(request, str(chosen), engines.get(str(chosen)))
    resolved = resolve_inference(case, request.case_file, vendor=layers, over=over, reserved=option_names())
    settings = resolved.settings
    warnings = [*_unknown_engine(request, settings.compiler)]
    warnings += [note.what for note in resolved.notes if note.severity == "warning"]
    data_dirs, data_warnings = _data(request, case, settings)
    engine = engines.get(settings.compiler or "")
    if engine is not None:
        request.problems.extend(_engine_problems(request, case, resolved, engine, engines))
        for name in settings.engine_options if engine.options else ():  # an engine that declares none accepts any
            if name not in engine.options:
                where = f"{resolved.provenance[f'engine_options.{name}'].layer}: engine_options.{name}"
                what = f"{settings.compiler} has no such option ({nearest(name, engine.options)})"
                warnings.append(f"{where}: {what}")
    if key.nproc > 1 and (settings.synthetic or case.weights is None or "weights" in data_dirs):
        able = [name for name, spec in engines.items() if spec.uses(key.nproc)]
        if settings.compiler is None or (engine is not None and settings.compiler not in able):
            what = f"{settings.compiler or 'the framework'} computes on one device, the key requests {key.nproc}"
            hint = f"engines of several devices: {', '.join(able) or 'none'}"
            request.problems.append(Problem(request.where, "compiler", what, hint))
    device = run.vendor.frameworks.get(key.framework)
    device_type = device.device_type if device is not None else "cpu"
    required = engine.requires_on(device_type, settings.engine_options) if engine is not None else ()
    has_weights = "weights" in data_dirs or any(request.folder.path.glob("*.safetensors"))
    needs = (
        (settings.scenarios or settings.generate_scenarios, "scenarios", REQUIRES["scenarios"]),
        (case.generates, "generation", ("transformers>=5.20", "tokenizers>=0.20", "safetensors>=0.4")),
        (settings.benchmarks, "benchmarks", REQUIRES["benchmarks"]),
        (has_weights, "weights of the case", ("safetensors>=0.4",)),
        (engine, f"engine {settings.compiler}", required),
    )
    return PlannedWork(
        work=InferJob(**{name: getattr(case, name) for name in _OF_CASE}, settings=settings, notes=resolved.notes),
        directory=f"{key.slug}-infer-{engine_words(settings)}",
        data_dirs=data_dirs,
        provenance=resolved.provenance,
        layer_files=files,
        requires={needed_by: requirements for is_used, needed_by, requirements in needs if is_used},
        sdks=engine.sdks if engine is not None else {},
        warnings=(*warnings, *data_warnings),
    )


def _layers(request: KeyRequest, name: str, engine: EngineSpec | None) -> tuple[list[Layer], tuple[LayerFile, ...]]:
    """Return the vendor's layers but for those with a precision in which the chosen engine does not compute."""
    vendor, precisions = request.run.vendor.name, engine.precisions if engine is not None else ()
    layers, files = vendor_layers(request.adaptations, vendor, request.key, request.capabilities, "infer")
    refused = {
        layer.name: {"applied": False, "reason": f"{name} does not compute in {layer.values['precision']}"}
        for layer in layers
        if precisions and layer.values.get("precision", precisions[0]) not in precisions
    }
    files = tuple(file.model_copy(update=refused.get(file.file, {})) for file in files)
    return [layer for layer in layers if layer.name not in refused], files


def _unknown_engine(request: KeyRequest, name: str | None) -> Iterator[str]:
    """Append a problem for an unknown engine; yield a warning where the ranks' Python environment may have it."""
    known = known_engines(request.run.vendor_folder)
    if name is None or name in known:
        return
    hint = nearest(name, known)
    if request.run.launcher.is_localhost and request.run.cluster.container is None:
        request.problems.append(Problem(request.where, "compiler", f"unknown engine {name!r}", hint))
    else:
        yield f"no engine {name!r} is known here ({hint}): the hosts must have it"


def _engine_problems(
    request: KeyRequest,
    case: InferCaseSpec,
    resolved: Resolved[InferSettings],
    engine: EngineSpec,
    engines: Mapping[str, EngineSpec],
) -> Iterator[Problem]:
    """Yield the settings that the engine does not support, as far as it declares them."""
    settings, name, is_here = resolved.settings, resolved.settings.compiler, request.run.launcher.is_localhost
    layer_of = {key: origin.layer for key, origin in resolved.provenance.items()}
    device = request.run.vendor.frameworks.get(request.key.framework)
    compiled, onnx_file = settings.exist_compiler_path, Path(settings.exist_onnx_path or "").expanduser()
    compiles_onnx = any(requirement.startswith("onnxscript") for requirement in engine.requires)
    is_onnx_file = settings.exist_onnx_path is None or (onnx_file.is_absolute() and onnx_file.is_file())
    has_no_model = engine.loads is False or (engine.loads is True and compiled is None)

    def able(supports: Callable[[EngineSpec], object]) -> str:
        return f"engines that do: {', '.join(other for other, spec in engines.items() if supports(spec)) or 'none'}"

    steps = "an answer of this case takes steps that depend on each other"
    rules = (
        (
            bool(engine.precisions) and settings.precision not in engine.precisions,
            "precision", f"{name} does not compute in {settings.precision}", f"choose {' or '.join(engine.precisions)}",
        ),
        (
            case.iterative and not engine.iterates,
            "compiler", f"{name} compiles one static graph, and {steps}", able(lambda spec: spec.iterates),
        ),
        (
            case.iterative and bool(settings.engine_options.get("cuda_graphs")),
            "engine_options.cuda_graphs", f"a recorded graph holds one call, and {steps}", "remove the option",
        ),
        (
            bool(settings.generate_batches) and not engine.generates,
            "compiler", f"{name} generates no text", f"{able(lambda spec: spec.generates)}; or generate_batches: []",
        ),
        (
            compiled is not None and engine.loads is False,
            "exist_compiler_path", f"{name} cannot load a compiled engine", "remove the setting",
        ),
        (
            compiled is not None and engine.loads is not False and is_here and not Path(compiled).expanduser().exists(),
            "exist_compiler_path", f"{compiled} does not exist", "",
        ),
        (
            compiled is None and compiles_onnx and is_here and not is_onnx_file,
            "exist_onnx_path", f"{settings.exist_onnx_path!r} is not an ONNX file", "name one; null exports the model",
        ),
        (
            settings.no_validation and not compiles_onnx and has_no_model,
            "no_validation", f"{name} compiles the PyTorch model, which no_validation leaves out",
            "set it to false" + (", or name a compiled engine (exist_compiler_path)" if engine.loads else ""),
        ),
    )  # fmt: skip
    for is_wrong, key, what, hint in rules:
        if is_wrong:
            yield Problem(layer_of.get(key, request.where), key, what, hint)
    for option, value in settings.engine_options.items():
        if option in engine.options and (wrong := engine.options[option].problem(value)) is not None:
            key = f"engine_options.{option}"
            yield Problem(layer_of[key], key, f"{wrong}, found {value!r}")
    if device is not None and engine.device_types and device.device_type not in engine.device_types:
        what = f"{name} computes on {', '.join(engine.device_types)}, the vendor's device is {device.device_type}"
        hint = able(lambda spec: not spec.device_types or device.device_type in spec.device_types)
        request.missing.append(Problem(layer_of["compiler"], "compiler", what, hint))


def _data(request: KeyRequest, case: InferCaseSpec, settings: InferSettings) -> tuple[dict[str, Path], list[str]]:
    """Return the directories of the required data and weights, and warnings about missing ones."""
    if settings.synthetic:
        return {}, ["synthetic data: the figures are of speed only"]
    given, key = request.request.data, str(request.key)
    optional = {name for name in case.optional_data if given is not None and (given / name).is_dir()}
    absent = [name for name in case.optional_data if name not in optional]
    warnings = [f"runs without {name}: name a directory that contains {name}/" for name in absent]
    if absent and not optional and not case.data:
        warnings = []  # it does not run at all
        listed = " or ".join(f"{name}/" for name in absent)
        what = f"no data: {given} has no {listed}" if given is not None else f"no data: no {listed}"
        hint = f"--data DIRECTORY, the one that contains {listed}, or --synthetic for speed only"
        request.missing.append(Problem(request.where, key, what, hint))
    dirs = request.data_of({*case.data, *optional}) | request.benchmark_dirs(settings)
    if case.weights is None:
        return dirs, warnings
    file = given / case.weights if given is not None else None
    if file is not None and (file.is_file() or (file / HF_CONFIG).is_file()):
        dirs["weights"] = file.absolute()
    elif case.generates:
        what = f"no weights: {file or case.weights}/ must be a directory with {HF_CONFIG}"
        hint = f"--data DIRECTORY, the one that contains {case.weights}/ in Hugging Face's layout"
        request.missing.append(Problem(request.where, key, what, hint))
    else:
        place = file or f"{case.weights} below --data"
        warnings.append(f"no trained weights ({place}): the figures are of speed only")
    return dirs, warnings


def engine_words(settings: InferSettings) -> str:
    """Return engine, precision, batch size and a hash of the engine options, as a part of a directory's name."""
    name = f"{settings.compiler or 'none'}-{settings.precision}-b{settings.batch_size}"
    if not settings.engine_options:
        return name
    options = json.dumps(settings.model_dump(mode="json")["engine_options"], sort_keys=True)
    return f"{name}-o{hashlib.sha256(options.encode()).hexdigest()[:6]}"


def plan_serving(request: KeyRequest) -> PlannedWork:
    """Merge the serving settings of a key, and find its data and weights."""
    run, case = request.run, require_task(request, "serve", request.case.serve)
    user = request.user_layers(run.command_line, dict.fromkeys(_FILES_OF_SERVING, False))
    base = Layer.of(request.case_file, case.settings)
    adapted, files = vendor_layers(request.adaptations, run.vendor.name, request.key, request.capabilities, "serve")
    over = [expanded for layer in (*adapted, *user) for expanded in (*_preset(layer), layer)]
    named: dict[str, Any] = {}
    for layer in (base, *over):
        named |= layer.values
    server = None
    if named.get("endpoint") is None:
        if not isinstance(name := named.get("server"), str):
            what = "names neither a server nor an endpoint"
            hint = "--server transformers, or --endpoint URL --model NAME"
            raise SpecError([Problem(request.where, "server", what, hint)])
        find("servers", name, request.where)
        server, options = adapted_server(load_server(name), run.vendor_folder)
        over = [*options, *over]
    resolved = resolve(
        ServeSettings, base, over, mutable=case.mutable, is_open=run.options.open, defaults=option_layer(server)
    )
    settings, given = resolved.settings, request.request.data
    dirs = request.data_of(case.data if settings.prompts.source == "text" else ()) | request.benchmark_dirs(settings)
    if given is not None and case.weights is not None and (given / case.weights / HF_CONFIG).is_file():
        dirs["weights"] = (given / case.weights).absolute()
    if server is not None and "weights" not in dirs and not (request.folder.path / MODEL_FILE).is_file():
        what = f"no weights: {case.weights or 'weights'}/ is expected below the directory given with --data"
        hint = "a directory in Hugging Face's layout"
        request.missing.append(Problem(request.where, str(request.key), what, hint))
    request.problems.extend(_refused(request, server, resolved))
    warnings = []
    if server is not None and server.tried is None:
        what = f"follows the documentation of {server.title} and was never run"
        warnings.append(f"servers/{server.name}/server.yaml {what}")
    if settings.endpoint is not None:
        what = "server, hardware and weights of the endpoint are stated by its operator"
        warnings.append(f"{what}: the result is OPEN at best")
    needs = (
        (True, "accelmark serve", ("httptools>=0.6.2", "tokenizers>=0.20")),
        (settings.scenarios, "scenarios", REQUIRES["scenarios"]),
        (settings.benchmarks, "benchmarks", REQUIRES["benchmarks"]),
        (server, f"server {settings.server}", server.requires if server is not None else ()),
    )
    return PlannedWork(
        work=ServeJob(server=server, settings=settings, min_agreement=case.min_agreement, benchmarks=case.benchmarks),
        directory=_serving_directory(request.key.slug, settings),
        data_dirs=dirs,
        provenance=resolved.provenance,
        layer_files=files,
        requires={needed_by: requirements for is_used, needed_by, requirements in needs if is_used},
        warnings=tuple(warnings),
    )


def _preset(layer: Layer) -> Iterator[Layer]:
    """Yield a layer with the limits that ``slo.preset`` names; it is weaker than ``layer``."""
    if (limits := SLO_PRESETS.get(str(layer.values.get("slo.preset")))) is not None:
        values = {"slo.ttft_ms": limits[0], "slo.tpot_ms": limits[1], "slo.share": 0.99}
        yield Layer(f"MLPerf's limits ({layer.values['slo.preset']})", values)


def adapted_server(server: ServerSpec, vendor_folder: Path) -> tuple[ServerSpec, list[Layer]]:
    """Return the server with the vendor's additions, and the layer of the vendor's options."""
    file = vendor_folder / "servers" / f"{server.name}.yaml"
    if not file.is_file():
        return server, []
    name = f"vendors/{vendor_folder.name}/servers/{file.name}"
    adaptation = parse(ServerAdaptation, read_yaml(file), name)
    values = {f"server_options.{option}": value for option, value in adaptation.options.items()}
    return server.adapted(adaptation), [Layer(name, values)]


def option_layer(server: ServerSpec | None) -> Layer | None:
    """Return the layer with the defaults of a server's options; None without a server."""
    if server is None:
        return None
    values = {f"server_options.{name}": value for name, value in server.options.items()}
    return Layer(f"servers/{server.name}/server.yaml", values)


def _refused(request: KeyRequest, server: ServerSpec | None, resolved: Resolved[ServeSettings]) -> Iterator[Problem]:
    key, settings, where = request.key, resolved.settings, request.where
    if key.nnodes != 1:
        yield Problem(where, str(key), f"requests {key.nnodes} hosts; a server runs on one host")
    for setting, file in zip(_FILES_OF_SERVING, (settings.prompts.file, settings.load.trace), strict=True):
        if file is not None and request.run.is_here and not Path(file).is_file():
            yield Problem(resolved.provenance[setting].layer, setting, f"{file} is not a file")
    if server is None:
        if settings.served_model is None:
            yield Problem(where, "served_model", "is needed with an endpoint", "--model NAME, as the server lists it")
        if not str(settings.endpoint).startswith(("http://", "https://")):
            yield Problem(where, "endpoint", f"{settings.endpoint!r} is not a URL", "http://HOST:PORT")
        return
    precisions = server.flags["precision"].values if "precision" in server.flags else {}
    rules = (
        (settings.api not in server.apis, "api", f"has no {settings.api} API", f"it has: {', '.join(server.apis)}"),
        (
            settings.is_pinned and not server.can_pin,
            "prompts.output_length", "cannot pin the length of answers", "set it to natural",
        ),
        (
            bool(precisions) and settings.precision not in precisions,
            "precision", f"has no {settings.precision}", f"it has: {', '.join(precisions)}",
        ),
    )  # fmt: skip
    for is_wrong, setting, what, hint in rules:
        if is_wrong:
            yield Problem(resolved.provenance[setting].layer, setting, f"{server.title} {what}", hint)
    if not server.uses(key.nproc):
        servers = readable("servers", load_server)[0]
        able = sorted(name for name, other in servers.items() if other.uses(key.nproc))
        what = f"requests {key.nproc} devices; {server.title} uses {server.max_devices}"
        yield Problem(where, str(key), what, f"servers of {key.nproc} devices: {', '.join(able)}")


def _serving_directory(slug: str, settings: ServeSettings) -> str:
    """Return the directory of a key's rounds, which differs by server, precision, load and options."""
    served_by = "endpoint" if settings.endpoint is not None else settings.server
    name = f"{slug}-serve-{served_by}-{settings.precision}"
    varied = settings.model_dump(
        mode="json", include={"endpoint", "served_model", "api", "load", "scenarios", "server_options"}
    )
    if varied == ServeSettings().model_dump(mode="json", include=set(varied)):
        return name
    return f"{name}-{hashlib.sha256(json.dumps(varied, sort_keys=True).encode()).hexdigest()[:6]}"
