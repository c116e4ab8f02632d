"""``accelmark probe``: measure hardware ceilings."""

from __future__ import annotations

from typing import Annotated

import typer

from accelmark.cli import options


def probe(
    vendor: options.Vendor = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Number of devices to measure together.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="matmul, memory, copies or collectives. Repeatable.")
    ] = None,
    budget: Annotated[float, typer.Option("--budget", min=0.1, help="Approximate duration in seconds.")] = 60.0,
    as_json: options.AsJson = False,
) -> None:
    """Measure matmul, memory, copy and collective rates. Later runs also report MFU against the measured rate."""
    from typing import cast, get_args

    from accelmark.cli.run import detect_devices
    from accelmark.run.controller.probe import probe as measure
    from accelmark.spec.catalog import load_vendor
    from accelmark.spec.errors import RequestError, nearest
    from accelmark.spec.number_format import quantity
    from accelmark.spec.records import ProbeItem

    items = only or list(get_args(ProbeItem))
    for item in items:
        if item not in get_args(ProbeItem):
            raise RequestError(f"--only {item}: unknown item ({nearest(item, get_args(ProbeItem))})")
    here = detect_devices(vendor)
    if here.num_devices is not None and nproc > here.num_devices:
        raise RequestError(f"--nproc {nproc}: this machine has {here.num_devices} devices of {here.vendor}")
    found = measure(load_vendor(here.vendor), here.hardware, nproc, cast("list[ProbeItem]", items), budget)
    if found.disturbed:
        busy = f"the host was busy: {'; '.join(found.disturbed)}"
        effect = "these rates are not used for MFU, earlier undisturbed ones are kept"
        typer.secho(f"warning: {busy}; {effect}. Repeat on an idle host.", fg="yellow", err=True)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("operation", "rate", "size or reason"):
        table.add_column(heading, overflow="fold")
    for kind in ("matmul", "memory", "copies", "collectives"):
        for name, rate in getattr(found, kind).items():
            value = quantity(rate.value, rate.unit)
            table.add_row(f"{kind} {name}", value, rate.size or rate.reason or "")
    console = Console()
    console.print(f"{found.device_name}, {found.world_size} ranks, {found.framework}", highlight=False)
    console.print(table)
