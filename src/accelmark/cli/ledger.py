"""Verbs about ledgers, directories of verified results: ledger add, check, site, withdraw."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from accelmark.cli import options
from accelmark.cli.options import Output, Verb, argument, flag, group, option
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK
from accelmark.spec.number_format import counted

app = group("ledger", "Publish verified results in a directory that anyone can check.")

_DEFAULT: Final = Path("ledger")
Directory = Annotated[Path, option("DIR", "Directory of the ledger.", "--ledger")]
By = Annotated[str, option("NAME", "Who you are: a person or an organisation.", "--by")]


@app.command(cls=Verb)
def add(
    bundle: Annotated[Path, argument("BUNDLE", "A bundle of 'accelmark bundle'.")],
    by: By,
    ledger: Directory = _DEFAULT,
    at: Annotated[str | None, option("URL", "Where the bundle is published; default: a copy in the ledger.")] = None,
    note: Annotated[str, option("TEXT", "A remark in the record.")] = "",
    unverified: Annotated[
        bool, flag("--unverified", "The file is a result.json without a bundle; the record says so.")
    ] = False,
    as_json: options.AsJson = False,
) -> Output:
    """Verify a bundle and add its record. Refuses edited, unregistered and INVALID runs, and unknown signers."""
    from accelmark.ledger.ledger import add_bundle, add_result

    path = (add_result if unverified else add_bundle)(ledger, bundle, by=by, at=at, note=note)
    return Output({"record": path.stem, "path": str(path)}, lambda: typer.echo(str(path)))


@app.command(cls=Verb)
def check(
    ledger: Directory = _DEFAULT,
    since: Annotated[str | None, option("COMMIT", "Require that records were only added since then.")] = None,
    as_json: options.AsJson = False,
) -> Output:
    """Verify all records of a ledger again. Recomputes each from its bundle."""
    from accelmark.ledger.ledger import check_ledger

    checked = check_ledger(ledger, since)

    def show() -> None:
        for problem in checked.problems:
            options.echo_wrapped(problem, fg="red")
        parts = {
            "recomputed from their bundles": checked.num_verified,
            "of them with a verdict that only the version that ran repeats": checked.num_other_version,
            "with a bundle elsewhere": checked.num_elsewhere,
            "of result files, which cannot be verified": checked.num_result_files,
            "made up": checked.num_made_up,
            "withdrawn": checked.num_withdrawn,
        }
        shown = ", ".join(f"{number} {what}" for what, number in parts.items() if number)
        typer.echo(f"{counted(checked.num_records, 'record')}: {shown}")

    return Output(checked._asdict(), show, EXIT_FAILED if checked.problems else EXIT_OK)


@app.command(cls=Verb)
def site(
    out: Annotated[Path, argument("OUT", "File of the page, or a directory for index.html.")],
    ledger: Directory = _DEFAULT,
    prices: options.PricesFile = None,
    as_json: options.AsJson = False,
) -> Output:
    """Write a static page of a ledger: table, charts, history, and two chips side by side."""
    from accelmark.ledger.ledger import open_ledger
    from accelmark.report.ledger_page import render_ledger
    from accelmark.results.prices import read_prices

    page = out if out.suffix == ".html" else out / "index.html"
    text = render_ledger(open_ledger(ledger), read_prices(prices))
    make_directory(page.parent)
    write_atomic(page, text)
    return Output({"page": str(page)}, lambda: typer.echo(str(page)))


@app.command(cls=Verb)
def withdraw(
    record: Annotated[str, argument("RECORD", "Name of the record.")],
    by: By,
    why: Annotated[str, option("TEXT", "The reason.")],
    ledger: Directory = _DEFAULT,
    as_json: options.AsJson = False,
) -> Output:
    """Withdraw a record. Adds a second record; nothing is removed."""
    from accelmark.ledger.ledger import withdraw as take_back

    path = take_back(ledger, record, by=by, why=why)
    return Output({"record": path.stem, "path": str(path)}, lambda: typer.echo(str(path)))
