"""``accelmark cases``: list the cases."""

from __future__ import annotations

import json

import typer

from accelmark.cli import options


def cases(as_json: options.AsJson = False) -> None:
    """List the cases with their tasks, sizes and targets."""
    from accelmark.spec.plugins.catalog import folders, load_case

    rows = []
    for name, folder in folders("cases").items():
        case = load_case(name)
        target = case.train.target if case.train else None
        symbol = {"at_least": ">=", "at_most": "<="}
        rows.append(
            {
                "name": name,
                "version": case.version,
                "title": case.title,
                "size": case.size,
                "tasks": [task for task, side in (("train", case.train), ("infer", case.infer)) if side],
                "frameworks": sorted(
                    {file.stem for file in folder.path.glob("*.py") if not file.stem.startswith(("_", "infer"))}
                ),
                "target": f"{target.metric} {symbol[target.direction]} {target.value:g}" if target else None,
                "data": list(case.data_names),
                "from": folder.origin,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("case", "tasks", "size", "target", "description"):
        table.add_column(heading, no_wrap=heading != "description")
    for row in rows:
        tasks = ", ".join(row["tasks"])  # type: ignore[arg-type]
        table.add_row(str(row["name"]), tasks, str(row["size"]), str(row["target"] or "-"), str(row["title"]))
    Console().print(table)
