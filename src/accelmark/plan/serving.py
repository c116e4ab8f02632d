"""Plan serving: the server or endpoint, its settings, data and weights, and its one process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from accelmark.plan.adaptation import vendor_layers
from accelmark.plan.benchmarks import BENCHMARK_REQUIRES, benchmark_dirs, benchmark_problems
from accelmark.plan.request import KeyRequest, PlannedWork, require_task
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.job import ServeJob
from accelmark.spec.layers import Layer, Resolved, resolve_as
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import find, load_server, readable
from accelmark.spec.plugins.server import ServerAdaptation, ServerSpec
from accelmark.spec.settings.serving import SLO_PRESETS, ServeCaseSpec, ServeSettings

MODEL_FILE: Final = "serve.py"
"""File of a case with packaged weights: ``write_model`` and ``prompt_text``."""
_FILES: Final = ("prompts.file", "load.trace")
"""Settings that name a file."""


def plan_serving(request: KeyRequest) -> PlannedWork:
    """Merge the serving settings of a key, and find its data and weights."""
    run = request.run
    side = require_task(request, "serve", request.case.serve)
    given = request.own_layers(run.command_line, dict.fromkeys(_FILES, False))
    base = Layer.of(request.case_file, side.settings)
    adapted, files = vendor_layers(request.adaptation, run.vendor.name, request.key, request.capabilities, "serve")
    over = [each for layer in (*adapted, *given) for each in (*_preset(layer), layer)]
    server = _server([base, *over], run.where)
    if server is not None:
        server, options = adapted_server(server, run.vendor_folder)
        over = [*options, *over]
    resolved = resolve_as(
        ServeSettings, base, over, mutable=side.mutable, is_open=run.options.open, beneath=option_layer(server)
    )
    settings = resolved.settings
    data_dirs = _data(request, side, settings)
    request.missing.extend(benchmark_problems(request, settings, data_dirs))
    if server is not None and "weights" not in data_dirs and not (request.folder.path / MODEL_FILE).is_file():
        what = f"no weights: {side.weights or 'weights'}/ is expected below the directory given with --data"
        request.missing.append(Problem(run.where, str(request.key), what, "a directory in Hugging Face's layout"))
    if problems := list(_problems(request, server, resolved)):
        raise SpecError(problems)
    requires: dict[str, tuple[str, ...]] = {"accelmark serve": ("httptools>=0.6.2", "tokenizers>=0.20")}
    if settings.scenarios:
        requires["scenarios"] = ("mlcommons-loadgen>=5.1",)
    if settings.benchmarks:
        requires["benchmarks"] = BENCHMARK_REQUIRES
    if server is not None:
        requires[f"server {server.name}"] = server.requires
    return PlannedWork(
        work=ServeJob(server=server, settings=settings, min_agreement=side.min_agreement, benchmarks=side.benchmarks),
        directory=_directory(request.key.slug, settings),
        data_dirs=data_dirs,
        provenance=resolved.provenance,
        layer_files=files,
        requires=requires,
        warnings=tuple(_warnings(server, settings)),
    )


def servers_of(num_devices: int) -> list[str]:
    """Return the servers that use ``num_devices`` devices for one model."""
    found = readable("servers", load_server)[0]
    return sorted(name for name, one in found.items() if one.max_devices is None or one.max_devices >= num_devices)


def _server(layers: Sequence[Layer], where: str) -> ServerSpec | None:
    """Return the server that the strongest layer names; None with an endpoint."""
    values: dict[str, Any] = {}
    for layer in layers:
        values |= layer.values
    if values.get("endpoint") is not None:
        return None
    name = values.get("server")
    if not isinstance(name, str):
        what = "names neither a server nor an endpoint"
        raise SpecError([Problem(where, "server", what, "--server transformers, or --endpoint URL --model NAME")])
    find("servers", name, where)
    return load_server(name)


def _preset(layer: Layer) -> Iterator[Layer]:
    """Yield the layer with the limits that ``slo.preset`` names, weaker than the one that names it."""
    if (limits := SLO_PRESETS.get(str(layer.values.get("slo.preset")))) is not None:
        values = {f"slo.{name}": limit for name, limit in limits._asdict().items()}
        yield Layer(f"MLPerf's limits ({layer.values['slo.preset']})", values | {"slo.share": 0.99})


def adapted_server(server: ServerSpec, vendor_folder: Path) -> tuple[ServerSpec, list[Layer]]:
    """Return the server with what the vendor adds to it, and the layer of the vendor's options.

    Raises:
        SpecError: the vendor's file has an unknown key or option.
    """
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


def _problems(request: KeyRequest, server: ServerSpec | None, resolved: Resolved[ServeSettings]) -> Iterator[Problem]:
    key, settings, where = request.key, resolved.settings, request.run.where
    if key.nnodes != 1:
        yield Problem(where, str(key), f"requests {key.nnodes} hosts; a server runs on one host")
    for setting, file in zip(_FILES, (settings.prompts.file, settings.load.trace), strict=True):
        if file is not None and request.run.is_here and not Path(file).is_file():
            yield Problem(resolved.provenance[setting].layer, setting, f"{file} is not a file")
    if server is None:
        if settings.served_model is None:
            yield Problem(where, "served_model", "is needed with an endpoint", "--model NAME, as the server lists it")
        if not str(settings.endpoint).startswith(("http://", "https://")):
            yield Problem(where, "endpoint", f"{settings.endpoint!r} is not a URL", "http://HOST:PORT")
        return
    if server.max_devices is not None and key.nproc > server.max_devices:
        what = f"requests {key.nproc} devices; {server.title} uses {server.max_devices}"
        yield Problem(where, str(key), what, f"servers of {key.nproc} devices: {', '.join(servers_of(key.nproc))}")
    if settings.api not in server.apis:
        yield Problem(where, "api", f"{server.title} has no {settings.api} API", f"it has: {', '.join(server.apis)}")
    if settings.is_pinned and not server.can_pin:
        what = f"{server.title} cannot pin the length of answers"
        yield Problem(where, "prompts.output_length", what, "set it to natural")
    precisions = server.flags["precision"].values if "precision" in server.flags else {}
    if precisions and settings.precision not in precisions:
        layer = resolved.provenance["precision"].layer
        yield Problem(
            layer, "precision", f"{server.title} has no {settings.precision}", f"has: {', '.join(precisions)}"
        )


def _data(request: KeyRequest, side: ServeCaseSpec, settings: ServeSettings) -> dict[str, Path]:
    """Return the directories of the required data and weights."""
    given = request.request.data
    wanted = set(side.data) if settings.prompts.source == "text" else set()
    found = request.data_of(wanted)
    if given is not None and side.weights is not None and (given / side.weights / "config.json").is_file():
        found["weights"] = (given / side.weights).absolute()
    return found | benchmark_dirs(request, settings)


def _warnings(server: ServerSpec | None, settings: ServeSettings) -> Iterator[str]:
    if server is not None and server.tried is None:
        yield f"servers/{server.name}/server.yaml follows the documentation of {server.title} and was never run"
    if settings.endpoint is not None:
        yield "server, hardware and weights of the endpoint are stated by its operator: the result is OPEN at best"


def _directory(slug: str, settings: ServeSettings) -> str:
    """Return the directory of a key's rounds, which differs by server, precision, load and options."""
    served_by = "endpoint" if settings.endpoint is not None else settings.server
    name = f"{slug}-serve-{served_by}-{settings.precision}"
    varied = settings.model_dump(
        mode="json", include={"endpoint", "served_model", "api", "load", "scenarios", "server_options"}
    )
    if varied == ServeSettings().model_dump(mode="json", include=set(varied)):
        return name
    return f"{name}-{hashlib.sha256(json.dumps(varied, sort_keys=True).encode()).hexdigest()[:6]}"
