"""``accelmark probe``: what the devices here can really do."""

from __future__ import annotations

from typing import Annotated

import typer

from accelmark.cli import options


def probe(
    vendor: options.Vendor = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Devices to probe together.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="matmul, memory, copies or collectives; may be repeated.")
    ] = None,
    budget: Annotated[float, typer.Option("--budget", min=0.1, help="About how many seconds to measure.")] = 60.0,
    as_json: options.AsJson = False,
) -> None:
    """Measure the ceilings of this machine's devices; later runs give MFU against them too."""
    from typing import cast, get_args

    from accelmark.cli.request import detected
    from accelmark.run.controller.probe import probe as measure
    from accelmark.spec.catalog import load_vendor
    from accelmark.spec.ceilings import ProbeItem
    from accelmark.spec.errors import RequestError, nearest

    items = only or list(get_args(ProbeItem))
    for item in items:
        if item not in get_args(ProbeItem):
            raise RequestError(
                f"--only {item}: there is nothing of that name to probe ({nearest(item, get_args(ProbeItem))})"
            )
    here = detected(vendor)
    if here.num_devices is not None and nproc > here.num_devices:
        raise RequestError(f"--nproc {nproc}: this machine has {here.num_devices} devices of {here.vendor}")
    found = measure(load_vendor(here.vendor), here.hardware, nproc, cast("list[ProbeItem]", items), budget)
    if found.disturbed:
        busy = "; ".join(found.disturbed)
        told = f"the host was busy: {busy}. MFU against these ceilings stays null, and earlier ones of a quiet host are"
        typer.secho(f"warning: {told} kept: probe again while it is quiet", fg="yellow", err=True)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("what", "rate", "at"):
        table.add_column(heading, overflow="fold")
    for kind in ("matmul", "memory", "copies", "collectives"):
        for name, rate in getattr(found, kind).items():
            value = f"{rate.value:.4g} {rate.unit}" if rate.value is not None else "-"
            table.add_row(f"{kind} {name}", value, rate.size or rate.reason or "")
    console = Console()
    console.print(f"{found.device_name}, {found.world_size} rank(s), {found.framework}", highlight=False)
    console.print(table)
