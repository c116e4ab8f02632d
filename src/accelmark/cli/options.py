"""Options that several verbs share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Vendor = Annotated[str | None, typer.Option("--vendor", help="Chip maker to measure; detected when left out.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. optimizer.lr=0.1.")
]
Synthetic = Annotated[bool, typer.Option("--synthetic", help="Made-up data: speed only, and marked so.")]
Open = Annotated[bool, typer.Option("--open", help="Allow changes to fixed settings; marks the result for ever.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse to start where a warning would be given.")]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="Start nothing after a failure.")]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Longest seconds one round may take.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Run directory; a new one below runs/ when left out.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch no data; use what is in the cache.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines for programs.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]
