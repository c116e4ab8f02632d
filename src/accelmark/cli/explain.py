"""The verbs ``explain`` and ``init``: explain a name; write a run file and a cluster file."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from accelmark.cli import completion, options
from accelmark.cli.machine import detect_devices
from accelmark.cli.options import Output, argument, flag, option
from accelmark.cli.runs import plan_request
from accelmark.spec.errors import RequestError, nearest

if TYPE_CHECKING:
    from accelmark.spec.cluster import ClusterSpec

RUN_FILE: Final = "run.yaml"
CLUSTER_FILE: Final = "cluster.yaml"


def explain(
    name: Annotated[
        str | None,
        argument(
            "NAME",
            "A figure, setting, key of a file, audit rule, verdict, state, end reason or mark: mfu, optimizer.lr.",
            completion.explained,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> Output:
    """Explain a figure, setting, key of a file, rule, verdict, end reason or mark. Without a name, list all."""
    from accelmark.explain.entries import entries
    from accelmark.explain.entries import explain as find

    explained = list(entries()) if name is None else find(name)

    def show() -> None:
        for kind, group in groupby(explained if name is None else (), key=lambda entry: entry.kind):
            typer.secho(f"{kind.capitalize()}:", bold=True)
            options.echo_wrapped(f"  {', '.join(entry.name for entry in group)}")
        for entry in explained if name is not None else ():
            typer.secho(f"{entry.name} ({entry.kind})", bold=True)
            for label, text in (("", entry.text), ("Why it matters: ", entry.why), ("What to do: ", entry.remedy)):
                if text:
                    options.echo_wrapped(f"  {label}{text.replace('``', '`')}")

    return Output(explained, show)


def init(
    hosts: Annotated[list[str] | None, argument("HOST", "Hosts reached by SSH; none: this machine.")] = None,
    into: Annotated[Path, option("DIR", "Where to write run.yaml and cluster.yaml.")] = Path(),
    vendor: options.Vendor = None,
    chip: Annotated[str | None, typer.Option(help="Chip; default: this machine's, or the vendor's first.")] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Devices of each host, or ranks on a CPU; default: this machine's, 1 on hosts or a CPU."
        ),
    ] = None,
    force: Annotated[bool, flag("--force", "Overwrite existing files.")] = False,
) -> None:
    """Write a run file for this machine, or a run file and a cluster file for the given hosts."""
    from accelmark.spec.plugins.catalog import load_vendor

    if hosts:
        texts = _files_for_hosts(hosts, vendor, chip, devices or 1)
    else:
        if vendor is not None:
            load_vendor(vendor)
        here = detect_devices(vendor)
        if not here.is_present or here.num_devices == 0:
            what = "can be read" if here.is_present else "was found"
            raise RequestError(
                f"--vendor {vendor}: no device of it {what} on this machine; `accelmark doctor` lists what was found, "
                "and `accelmark init HOST...` writes files for other machines"
            )
        texts = {RUN_FILE: _run_file(chip or here.hardware, devices or here.num_devices or 1, vendor=vendor)}
    for path in options.write_new(texts, into, "--into", force=force):
        typer.echo(f"wrote {path}")
    if hosts:
        typer.echo(f"\nNext:  edit {into / CLUSTER_FILE}: user, key and Python of the hosts")
        typer.echo(f"       accelmark preflight {into / CLUSTER_FILE}   # checks the hosts")
        typer.echo(f"       accelmark run {into / RUN_FILE}")
    else:
        typer.echo(f"\nNext:  accelmark run {into / RUN_FILE}")


def _files_for_hosts(hosts: list[str], vendor: str | None, chip: str | None, devices: int) -> dict[str, str]:
    """Return file name -> text."""
    import yaml

    from accelmark.explain.schemas import schema_line
    from accelmark.spec.plugins.catalog import load_vendor
    from accelmark.spec.plugins.launcher import parse_cluster

    if vendor is None:
        raise RequestError("name the vendor of the hosts' chips with --vendor; `accelmark vendors` lists them")
    chips = load_vendor(vendor).chips
    if chip is not None and chips and not any(chip.lower() in known.key_names for known in chips):
        hint = nearest(chip, (known.name for known in chips))
        raise RequestError(f"--chip {chip}: vendor {vendor} describes no such chip ({hint})")
    hardware = chip or (chips[0].name if chips else vendor.upper())
    if chip is None and len(chips) > 1:
        options.warn(f"{RUN_FILE} names the chip {hardware}, the first of {vendor}: correct it there, or give --chip")
    given = {"launcher": "ssh", "vendor": vendor, "hosts": [{"address": host} for host in hosts]}
    text = _run_file(hardware, devices, cluster=parse_cluster(given, "HOST"))
    entries = "".join("  - " + yaml.safe_dump({"address": host}, default_flow_style=True) for host in hosts)
    cluster = (
        f"{schema_line('cluster')}\n"
        "launcher: ssh\n"
        f"vendor: {vendor}\n"
        "# user: bench       # unless these are set, SSH uses your user, keys, agent and known_hosts\n"
        "# key: ~/.ssh/bench\n"
        "# python: /opt/venv/bin/python    # of ranks outside containers; needs psutil, pydantic, PyYAML and PyTorch\n"
        "#     all hosts get one by: accelmark env create pytorch --hosts FILE --path /opt/venv\n"
        f"hosts:\n{entries}"
    )
    return {RUN_FILE: text, CLUSTER_FILE: cluster}


def _run_file(hardware: str, devices: int, *, vendor: str | None = None, cluster: ClusterSpec | None = None) -> str:
    """Return a run file for hosts or this machine. Raises RequestError: no run can be planned from it."""
    import yaml

    from accelmark.explain.schemas import schema_line
    from accelmark.spec.model import parse
    from accelmark.spec.runfile import RunSpec

    lines = [schema_line("run"), "name: first"]
    lines += [f"cluster: {CLUSTER_FILE}"] if cluster is not None else []
    lines += [f"vendor: {vendor}"] if vendor is not None else []
    lines.append("# case:framework:chip:hosts:devices per host:rounds; see `accelmark cases` and `accelmark vendors`")
    lines.append("cases:")
    scales = dict.fromkeys([(1, 1), (1, devices), (len(cluster.hosts) if cluster is not None else 1, devices)])
    for case in ("resnet_mini", "llama_mini"):
        for nodes, per_node in scales:
            lines.append(f"  - key: {case}:pytorch:{hardware}:{nodes}:{per_node}")
    text = "".join(f"{line}\n" for line in lines)
    values = yaml.safe_load(text) | ({"cluster": cluster} if cluster is not None else {})
    plan_request(parse(RunSpec, values, RUN_FILE), [], synthetic=False, where=RUN_FILE)
    return text
