"""``accelmark view [DIR]``: web pages over many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Directory that contains the runs.")] = Path(
        "runs"
    ),
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that other machines can reach needs --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8710,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="File with the access token; created if it does not exist."),
    ] = None,
) -> None:
    """Show the runs below a directory in a browser. The pages are read-only and by default for this machine only."""
    from accelmark.spec.errors import RequestError
    from accelmark.spec.plugins.requirements import require

    require("accelmark view", "accelmark[view]")
    from accelmark.report.view.access import Access, is_loopback, read_or_create_token
    from accelmark.report.view.app import listen, make_app, server_for
    from accelmark.report.view.index import RunIndex

    if token_file is None and not is_loopback(host):
        raise RequestError(f"{host} can be reached from other machines: name a file for the token with --token-file")
    token = read_or_create_token(token_file) if token_file else None
    app = make_app(RunIndex(directory), Access.to(host, token))
    with listen(host, port) as listener:
        where = f"[{host}]" if ":" in host else host
        typer.echo(f"http://{where}:{listener.getsockname()[1]}/")
        if token_file:
            typer.echo(f"The access token is in {token_file}. Press Ctrl-C to stop.")
        server_for(app).run(sockets=[listener])


def serve_renamed(
    directory: Annotated[Path | None, typer.Argument(metavar="[DIR]", hidden=True)] = None,
) -> None:
    """Name the verb that shows the runs now: 'accelmark view'."""
    from accelmark.spec.errors import RequestError

    raise RequestError(f"'serve' no longer shows runs: use accelmark view {directory or 'runs'}")
