"""``accelmark vendors``: list the supported chip vendors and the devices of this machine."""

from __future__ import annotations

import json
from typing import Any

import typer

from accelmark.cli import options


def vendors(as_json: options.AsJson = False) -> None:
    """List vendors, their chips and their devices on this machine."""
    from accelmark.spec.errors import AccelmarkError
    from accelmark.spec.plugins.catalog import folders, load_vendor
    from accelmark.telemetry.declaration import telemetry_of
    from accelmark.telemetry.detect import detect
    from accelmark.telemetry.sources import MODULE_FILE

    present = {entry.vendor: entry for entry in detect()}
    rows: list[dict[str, Any]] = []
    for name, folder in folders("vendors").items():
        try:
            spec = load_vendor(name)
            telemetry = telemetry_of(spec, str(folder.path))
        except AccelmarkError as error:
            rows.append({"name": name, "problem": str(error), "from": folder.origin})
            continue
        found = present.get(name)
        sources = ["library"] if (folder.path / MODULE_FILE).is_file() else []
        sources += [telemetry.tool.command[0]] if telemetry.tool else []
        sources += [telemetry.script.file] if telemetry.script else []
        rows.append(
            {
                "name": name,
                "title": spec.title,
                "frameworks": {framework: device.device_type for framework, device in spec.frameworks.items()},
                "chips": sorted({chip.name for chip in spec.chips}),
                "read_by": sources,
                "here": found is not None,
                "devices": [device.name for device in found.devices] if found else [],
                "hardware": found.hardware if found else None,
                "cannot_run": spec.cannot_run,
                "problem": found.problem if found else None,
                "from": folder.origin,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("vendor", "device", "on this machine", "telemetry", "chips"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        if "title" not in row:
            table.add_row(row["name"], "", "", "", f"[red]{row['problem']}[/red]")
            continue
        state = ", ".join(dict.fromkeys(row["devices"])) or (row["problem"] or "yes") if row["here"] else "-"
        chips = ", ".join(row["chips"]) or "-"
        device = ", ".join(dict.fromkeys(row["frameworks"].values())) or "-"
        table.add_row(row["name"], device, state, ", ".join(row["read_by"]) or "-", chips)
    console = Console(highlight=False)
    console.print(table)
    for row in rows:
        if row.get("cannot_run"):
            console.print(Padding(f"{row['name']}: cannot run cases: {row['cannot_run']}", (1, 0, 0, 0)), markup=False)
