"""The verbs ``explain`` and ``init``: explain a name; write a run file and a cluster file."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Annotated, Final

import typer
from typer import Argument, Option

from accelmark.cli import completion, options

RUN_FILE: Final = "run.yaml"
CLUSTER_FILE: Final = "cluster.yaml"


def explain(
    name: Annotated[
        str | None,
        Argument(
            metavar="NAME",
            help="A figure, setting, key of a file, audit rule, verdict, state, end reason or mark: mfu, optimizer.lr.",
            autocompletion=completion.explained,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Explain a figure, setting, key of a file, audit rule, verdict, end reason or mark; without a name, list all."""
    from accelmark.explain.entries import entries
    from accelmark.explain.entries import explain as find

    if name is None:
        known = list(entries())
        if as_json:
            typer.echo(json.dumps([asdict(entry) for entry in known], indent=2))
            return
        for kind, group in groupby(known, key=lambda entry: entry.kind):
            names = _indented(", ".join(entry.name for entry in group))
            typer.secho(f"{kind.capitalize()}:", bold=True)
            typer.echo(names)
        return
    found = find(name)
    if as_json:
        typer.echo(json.dumps([asdict(entry) for entry in found], indent=2))
        return
    for entry in found:
        typer.secho(f"{entry.name} ({entry.kind})", bold=True)
        for text in filter(None, (entry.text, entry.remedy)):
            typer.echo(_indented(text.replace("``", "`")))


def _indented(text: str) -> str:
    width = get_terminal_size().columns
    indent = "  "
    return fill(
        text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def init(
    hosts: Annotated[
        list[str] | None, Argument(metavar="HOST", help="Hosts reached by SSH; none: this machine.")
    ] = None,
    into: Annotated[Path, Option(metavar="DIR", help="Where to write run.yaml and cluster.yaml.")] = Path(),
    vendor: options.Vendor = None,
    chip: Annotated[str | None, Option(help="Chip of the hosts; default: the vendor's first one.")] = None,
    devices: Annotated[int, Option(min=1, help="Devices of each host.")] = 1,
    force: Annotated[bool, Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a run file, and a cluster file for hosts, that fit this machine or the given hosts."""
    import yaml

    from accelmark.results.store.files import make_directory, write_atomic
    from accelmark.spec.errors import RequestError, nearest
    from accelmark.spec.plugins.catalog import load_vendor
    from accelmark.spec.plugins.launcher import parse_cluster
    from accelmark.telemetry.detect import detect

    if hosts:
        if vendor is None:
            raise RequestError("name the vendor of the hosts' chips with --vendor; `accelmark vendors` lists them")
        chips = [known.name for known in load_vendor(vendor).chips]
        if chip is not None and chips and chip not in chips:
            raise RequestError(f"--chip {chip}: vendor {vendor} describes no such chip ({nearest(chip, chips)})")
        hardware = chip or (chips[0] if chips else vendor.upper())
        if chip is None and len(chips) > 1:
            options.warn(
                f"{RUN_FILE} names the chip {hardware}, the first of {vendor}: correct it there, or give --chip"
            )
        texts = {RUN_FILE: _run_file(hardware, devices, len(hosts)), CLUSTER_FILE: _cluster_file(hosts, vendor)}
        parse_cluster(yaml.safe_load(texts[CLUSTER_FILE]), "HOST")
    else:
        found = next(here for here in detect() if vendor in (None, here.vendor))
        hardware = chip or found.hardware or found.vendor.upper()
        texts = {RUN_FILE: _run_file(hardware, 1 if found.fallback else len(found.devices), 0)}
    if (taken := [name for name in texts if (into / name).exists()]) and not force:
        raise RequestError(f"{into}: files exist: {', '.join(taken)}; use --force to overwrite them, or another --into")
    make_directory(into)
    for name, text in texts.items():
        write_atomic(into / name, text)
        typer.echo(f"wrote {into / name}")
    if hosts:
        typer.echo(f"\nNext:  edit {into / CLUSTER_FILE}: user, key and Python of the hosts")
        typer.echo(f"       accelmark preflight {into / CLUSTER_FILE}   # checks the hosts")
        typer.echo(f"       accelmark run {into / RUN_FILE}")
    else:
        typer.echo(f"\nNext:  accelmark run {into / RUN_FILE}")


def _run_file(hardware: str, devices: int, num_hosts: int) -> str:
    from accelmark.explain.schemas import schema_line

    scales = dict.fromkeys([(1, 1), (1, devices), (max(1, num_hosts), devices)])
    keys = [
        f"  - key: {case}:pytorch:{hardware}:{nodes}:{per_node}\n"
        for case in ("resnet_mini", "llama_mini")
        for nodes, per_node in scales
    ]
    return (
        f"{schema_line('run')}\n"
        "name: first\n"
        f"{f'cluster: {CLUSTER_FILE}{chr(10)}' if num_hosts else ''}"
        "# model:framework:chip:hosts:devices per host:rounds; see `accelmark cases` and `accelmark vendors`\n"
        f"cases:\n{''.join(keys)}"
    )


def _cluster_file(hosts: list[str], vendor: str) -> str:
    from accelmark.explain.schemas import schema_line

    return (
        f"{schema_line('cluster')}\n"
        "launcher: ssh\n"
        f"vendor: {vendor}\n"
        "# user: bench       # unless these are set, SSH uses your user, keys, agent and known_hosts\n"
        "# key: ~/.ssh/bench\n"
        "# python: /opt/venv/bin/python    # of ranks outside containers; needs psutil, pydantic, PyYAML and PyTorch\n"
        "#     all hosts get one by: accelmark env create pytorch --hosts FILE --path /opt/venv\n"
        f"hosts:\n{''.join(f'  - {{address: {host}}}{chr(10)}' for host in hosts)}"
    )
