"""Plan serving: the server or endpoint, its settings, data and weights, and its one process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from accelmark.plan.request import REQUIRES, KeyRequest, PlannedWork, require_task, vendor_layers
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.job import ServeJob
from accelmark.spec.layers import Layer, Resolved, resolve
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import find, load_server, readable
from accelmark.spec.plugins.programs import ServerAdaptation, ServerSpec
from accelmark.spec.settings.serving import SLO_PRESETS, ServeSettings

MODEL_FILE: Final = "serve.py"
"""File of a case with packaged weights: ``write_model`` and ``prompt_text``."""
_FILES: Final = ("prompts.file", "load.trace")
"""Settings that name a file."""


def plan_serving(request: KeyRequest) -> PlannedWork:
    """Merge the serving settings of a key, and find its data and weights."""
    run, case = request.run, require_task(request, "serve", request.case.serve)
    user = request.user_layers(run.command_line, dict.fromkeys(_FILES, False))
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
    if given is not None and case.weights is not None and (given / case.weights / "config.json").is_file():
        dirs["weights"] = (given / case.weights).absolute()
    if server is not None and "weights" not in dirs and not (request.folder.path / MODEL_FILE).is_file():
        what = f"no weights: {case.weights or 'weights'}/ is expected below the directory given with --data"
        hint = "a directory in Hugging Face's layout"
        request.missing.append(Problem(request.where, str(request.key), what, hint))
    request.problems.extend(_problems(request, server, resolved))
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
        directory=_directory(request.key.slug, settings),
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


def _problems(request: KeyRequest, server: ServerSpec | None, resolved: Resolved[ServeSettings]) -> Iterator[Problem]:
    key, settings, where = request.key, resolved.settings, request.where
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
