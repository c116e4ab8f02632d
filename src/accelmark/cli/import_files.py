"""``accelmark import flagperf FILE...``: convert another benchmark's configuration."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelmark.cli import options

if TYPE_CHECKING:
    from accelmark.compat.flagperf import Converted


class Origin(StrEnum):
    """The benchmark that the files belong to."""

    FLAGPERF = "flagperf"


def import_files(
    origin: Annotated[Origin, typer.Argument(help="The benchmark that the files belong to.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="cluster_conf.py, test_conf.py, host.yaml, config_*.py ...")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory to write to.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Convert another benchmark's configuration. Files are not executed; unconverted settings are listed."""
    from accelmark.compat.flagperf import convert
    from accelmark.results.store.files import make_directory, write_atomic
    from accelmark.spec.errors import RequestError

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
    texts: dict[str, str] = {}
    if converted.cluster:
        texts["cluster.yaml"] = _yaml(converted.cluster)
    if converted.run:
        beside: dict[str, Any] = {"cluster": "cluster.yaml"} if converted.cluster else {}
        texts["run.yaml"] = _yaml({**beside, **converted.run})
    for name, settings in converted.configs.items():
        texts[name] = _yaml(settings)
    return texts


def _yaml(values: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
