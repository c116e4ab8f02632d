"""``accelmark import flagperf FILE...``: another benchmark's configuration as AccelMark's."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from accelmark.compat.flagperf import Converted


class Origin(StrEnum):
    """Whose files."""

    FLAGPERF = "flagperf"


def import_files(
    origin: Annotated[Origin, typer.Argument(help="Whose files they are.")],
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="cluster_conf.py, test_conf.py, host.yaml, config_*.py ...")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the files go.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert another benchmark's files, by reading and never by running them; says what could not be carried over."""
    from accelmark.compat.flagperf import convert
    from accelmark.results.store.files import make_directory, write_atomic
    from accelmark.spec.errors import RequestError

    converted = convert(files)
    texts = _files(converted)
    taken = [name for name in texts if (out / name).exists()]
    if taken and not force:
        raise RequestError(f"{out}: there already: {', '.join(taken)}; give --force to replace, or another --out")
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
        typer.echo("wrote nothing: none of the files holds a setting that AccelMark has")
    if converted.left_over:
        typer.echo("could not be carried over:")
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
