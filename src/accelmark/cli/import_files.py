"""``accelmark import flagperf FILE...``: convert another benchmark's configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from accelmark.cli import options
from accelmark.spec.errors import RequestError

if TYPE_CHECKING:
    from accelmark.compat.flagperf.convert import Converted


def import_files(
    origin: Annotated[Literal["flagperf"], Argument(help="The benchmark that the files belong to.")],
    files: Annotated[
        list[Path], Argument(metavar="FILE...", help="cluster_conf.py, test_conf.py, host.yaml, config_*.py ...")
    ],
    out: Annotated[Path, Option("--out", metavar="DIR", help="Directory to write to.")] = Path(),
    force: Annotated[bool, Option("--force", help="Overwrite existing files.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Convert another benchmark's configuration. Files are not executed; unconverted settings are listed."""
    from accelmark.compat.flagperf.convert import convert
    from accelmark.results.store.files import make_directory, write_atomic

    converted = convert(files)
    texts = _files(converted)
    taken = [name for name in texts if (out / name).exists()]
    if taken and not force:
        raise RequestError(f"{out}: files exist: {', '.join(taken)}; use --force to overwrite them, or another --out")
    if texts:
        make_directory(out)
    for name, text in texts.items():
        write_atomic(out / name, text)
    if as_json:
        left = [{"file": item.where, "key": item.key, "why": item.what} for item in converted.left_over]
        typer.echo(json.dumps({"written": [str(out / name) for name in texts], "left_over": left}))
        return
    for name in texts:
        typer.echo(f"wrote {out / name}")
    if not texts:
        typer.echo("wrote nothing: the files contain no setting that AccelMark has")
    if converted.left_over:
        typer.echo("not converted:")
        for item in converted.left_over:
            typer.echo(f"  {item}")


def _files(converted: Converted) -> dict[str, str]:
    """Return the name and text of each file to write."""
    import yaml

    values: dict[str, dict[str, Any]] = {}
    if converted.cluster:
        values["cluster.yaml"] = converted.cluster
    if converted.run:
        values["run.yaml"] = ({"cluster": "cluster.yaml"} if converted.cluster else {}) | converted.run
    values |= converted.configs
    return {name: yaml.safe_dump(item, sort_keys=False, allow_unicode=True) for name, item in values.items()}
