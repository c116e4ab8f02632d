"""The verb ``serve``: measure a server of language models under load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from accelmark.cli import completion, options
from accelmark.cli.execution import execute
from accelmark.cli.runs import plan_request, run_name


def serve(
    key: Annotated[
        str,
        Argument(
            metavar="KEY",
            help="model[:framework[:hardware[:1[:devices[:repeat]]]]]",
            autocompletion=completion.keys_to_infer,
        ),
    ],
    server: Annotated[
        str | None,
        Option(metavar="NAME", help="Server to start; default: the case's.", autocompletion=completion.servers),
    ] = None,
    endpoint: Annotated[
        str | None, Option(metavar="URL", help="Base URL of a running server instead; needs --model.")
    ] = None,
    model: Annotated[str | None, Option("--model", metavar="NAME", help="Model name in requests.")] = None,
    concurrency: Annotated[
        list[int] | None, Option(min=1, help="Closed load: requests in progress in a stage. Repeatable.")
    ] = None,
    rate: Annotated[
        list[float] | None, Option(min=0.001, help="Open load, Poisson: requests per second in a stage. Repeatable.")
    ] = None,
    duration: Annotated[
        float | None, Option("--duration", min=0.1, help="Seconds in which requests of a stage are started.")
    ] = None,
    ttft: Annotated[float | None, Option(min=0.001, metavar="MS", help="SLO: greatest time to first token.")] = None,
    tpot: Annotated[float | None, Option(min=0.001, metavar="MS", help="SLO: greatest time per output token.")] = None,
    slo: Annotated[
        str | None, Option(metavar="PRESET", help="SLO: MLPerf's limits of a model, for example llama3_1_8b.")
    ] = None,
    search: Annotated[bool, Option("--search", help="Search the highest rate that holds the SLO.")] = False,
    scenario: Annotated[
        list[str] | None,
        Option(
            help="LoadGen scenario with token latencies: server or offline. Repeatable.",
            autocompletion=completion.token_scenarios,
        ),
    ] = None,
    precision: Annotated[str | None, Option("--precision", help="fp32, bf16, fp16 or int8.")] = None,
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    is_open: options.Open = False,
    strict: options.Strict = False,
    timeout: options.Timeout = None,
    out: options.Out = None,
    offline: options.Offline = False,
    dry_run: options.DryRun = False,
    commands: options.Commands = False,
    as_json: options.AsJson = False,
) -> None:
    """Serve a language model under load: latencies, throughput, goodput. Starts the server or takes a running one."""
    from accelmark.spec.errors import RequestError
    from accelmark.spec.runfile import CaseRequest, RunSpec

    if Path(key).is_dir():
        raise RequestError(f"{key}: is a directory; the web pages over many runs are: accelmark view {key}")
    if concurrency and rate:
        raise RequestError("--concurrency is a closed load, --rate an open one: name one of them")
    given = {
        "server": server, "endpoint": endpoint, "served_model": model, "precision": precision,
        "load.concurrency": tuple(concurrency or ()) or None, "load.rates": tuple(rate or ()) or None,
        "load.arrival": "poisson" if rate else None, "load.duration_s": duration, "load.search": search or None,
        "slo.preset": slo, "slo.ttft_ms": ttft, "slo.tpot_ms": tpot, "scenarios": tuple(scenario or ()) or None,
    }  # fmt: skip
    named: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    case = CaseRequest(key=key, task="serve", data=data and data.expanduser(), settings=named)
    request = RunSpec(
        name=f"{run_name(key)}-serve", vendor=vendor, open=is_open, strict=strict, timeout_s=timeout, cases=(case,)
    )
    plan = plan_request(request, settings or (), synthetic=False, allow_missing_data=dry_run or commands)
    execute(plan, out, offline=offline, dry_run=dry_run, with_commands=commands, as_json=as_json)
