"""Options, arguments and output that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from accelmark.cli import completion
from accelmark.report.printable import printable

if TYPE_CHECKING:
    from rich.table import Table

Data = Annotated[Path | None, Option("--data", metavar="DIR", help="Directory with the data sets and weights.")]
Vendor = Annotated[
    str | None, Option("--vendor", help="Chip vendor; default: the one detected.", autocompletion=completion.vendors)
]
Settings = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a setting: optimizer.lr=0.1.")
]
Synthetic = Annotated[bool, Option("--synthetic", help="Use synthetic data; marks the result as such.")]
BadSamples = Annotated[
    int | None,
    Option("--tolerate-bad-samples", metavar="N", min=0, help="Replace up to N unreadable training samples a rank."),
]
Open = Annotated[bool, Option("--open", help="Allow changes to immutable settings; permanently marks the result OPEN.")]
Strict = Annotated[bool, Option("--strict", help="Treat warnings as errors: do not start.")]
FailFast = Annotated[bool, Option("--fail-fast", help="Start no further round after a failure.")]
Timeout = Annotated[float | None, Option("--timeout", min=0.001, help="Time limit of one round in seconds.")]
Out = Annotated[Path | None, Option("--out", metavar="DIR", help="Run directory; default: a new one in runs/.")]
Offline = Annotated[bool, Option("--offline", help="Download nothing; use cached data.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the jobs, commands and settings; start nothing.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
Output = Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Write to this file.")]
RunPath = Annotated[Path, Argument(metavar="RUN", help="Run directory.", autocompletion=completion.runs)]
RunOrBundle = Annotated[
    Path, Argument(metavar="RUN|BUNDLE", help="Run directory or bundle.", autocompletion=completion.runs)
]


def shipped_file(given: Path, folder: str) -> Path:
    """Return ``given``, or AccelMark's own file of that name in ``folder`` (``suites``, ``searches``).

    Raises:
        RequestError: there is neither; names the nearest one.
    """
    from accelmark.spec.errors import RequestError, nearest

    own = {path.stem: path for path in (Path(__file__).parents[1] / folder).glob("*.yaml")}
    if given.exists() or given.suffix or len(given.parts) > 1:
        return given
    if given.name not in own:
        raise RequestError(f"{given}: neither a file here nor one of AccelMark's {folder}; {nearest(given.name, own)}")
    return own[given.name]


def warn(text: str) -> None:
    """Print a warning to stderr."""
    typer.secho(f"warning: {printable(text)}", fg="yellow", err=True)


def plain_table(*headings: str) -> Table:
    """Return an empty table without borders, whose cells wrap."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
