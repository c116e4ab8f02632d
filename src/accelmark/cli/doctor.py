"""``accelmark doctor``: devices, frameworks and engines of this machine, and what can run."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import TYPE_CHECKING

import typer

from accelmark.cli import options

if TYPE_CHECKING:
    from accelmark.telemetry.inventory import Inventory


def doctor(as_json: options.AsJson = False) -> None:
    """Show devices, frameworks and engines, and what can run."""
    from accelmark.telemetry.inventory import inventory

    seen = inventory()
    if as_json:
        from accelmark.telemetry.host.sysinfo import collect

        devices = [device for entry in seen.found for device in entry.devices]
        typer.echo(json.dumps({"machine": collect(devices), **seen.to_json()}, indent=2))
        return
    width = shutil.get_terminal_size().columns
    for line in report(seen):
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        for part in textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]:
            typer.echo(part)


def report(seen: Inventory) -> list[str]:
    """Return the inventory as text lines."""
    lines = ["Devices"]
    for entry in seen.found:
        for device, chip in zip(entry.devices, entry.chips, strict=True):
            known = f"chip {chip.name} {chip.variant}".rstrip() if chip else "unknown chip"
            memory = f", {device.memory_gib:.0f} GiB" if device.memory_gib else ""
            driver = f", driver {device.driver}" if device.driver else ""
            lines.append(f"  {entry.vendor} {device.index}: {device.name}{memory}{driver} ({known})")
        if entry.problem:
            lines.append(f"  {entry.vendor}: {entry.evidence}, but cannot be read: {entry.problem}")
    for heading, installed in (("Frameworks", seen.frameworks), ("Engines", seen.engines)):
        present = [f"{one.name} {one.version}" for one in installed if one.version]
        absent = [one.name for one in installed if not one.version]
        lines += [
            heading,
            f"  installed: {', '.join(present) or 'none'}",
            f"  not installed: {', '.join(absent) or 'none'}",
        ]
    containers = [name for name, path in seen.containers.items() if path]
    lines += ["Containers", f"  {', '.join(containers) or 'neither docker nor podman is on the PATH'}"]
    lines.append("What can run")
    lines += [f"  {'yes' if each.works else 'no '} {each.what}: {each.why}" for each in seen.support]
    if seen.problems:
        lines += ["Problems", *(f"  {line}" for problem in seen.problems for line in problem.splitlines())]
    return lines
