"""``accelmark serve [DIR]``: a page over many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where the runs are.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on; beyond this machine a token is asked for.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8710,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="File with the token; made, for its owner only, if missing."),
    ] = None,
) -> None:
    """Show the runs below a directory to a browser: read-only, on this machine unless told otherwise."""
    from accelmark.report.serve.index import RunIndex
    from accelmark.report.serve.server import is_loopback, make_server
    from accelmark.report.serve.token import read_or_make
    from accelmark.spec.errors import RequestError

    if token_file is None and not is_loopback(host):
        raise RequestError(f"{host} can be reached from other machines: name a file for the token with --token-file")
    token = read_or_make(token_file) if token_file else None
    index = RunIndex(directory)
    try:
        server = make_server(index, host, port, token)
    except OSError as error:
        raise RequestError(f"{host}:{port}: cannot be listened on: {error.strerror}; try --port 0") from error
    where = f"[{host}]" if ":" in host else host
    with server:
        typer.echo(f"http://{where}:{server.server_address[1]}/")
        if token_file:
            typer.echo(f"the token is in {token_file}")
        server.serve_forever()
