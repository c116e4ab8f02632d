"""Verbs that read runs: report, verify, evaluate, bundle, export of one; results, compare, view of many."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from accelmark.cli import options
from accelmark.cli.options import Output, argument, flag, option
from accelmark.results.store.files import write_atomic
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, RequestError
from accelmark.spec.number_format import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from accelmark.audit.verify import CheckedAgain, Verification
    from accelmark.results.comparison import Pair

_PIPE_WIDTH: Final = 260
"""Columns of a table of runs in output that is not a terminal."""
_COMPARISON_WIDTH: Final = 140
Format = Literal["csv", "parquet", "markdown"]


def report(
    run: options.RunPath = options.LATEST,
    output: options.OutputFile = None,
    recompute: Annotated[bool, flag("--recompute", "Recompute figures from events and telemetry.")] = False,
    markdown: Annotated[bool, flag("--markdown", "Also print the results as a Markdown table.")] = False,
    mllog: Annotated[bool, flag("--mllog", "Also write mllog.log (MLPerf log lines) for each training round.")] = False,
    mllog_as: Annotated[str | None, option("BENCHMARK", "Name of the MLPerf benchmark in them.")] = None,
    flagperf_names: Annotated[
        bool, flag("--flagperf-names", "Also write each rank's events with FlagPerf's names for their values.")
    ] = False,
    show: Annotated[bool, flag("--open", "Open the page in a browser.")] = False,
    prices: options.PricesFile = None,
    as_json: options.AsJson = False,
) -> Output:
    """Write the report page of a run. A run without a summary is summarised first."""
    from accelmark.report.run_page import write_page
    from accelmark.results.export import write_flagperf_logs, write_mllog
    from accelmark.results.prices import read_prices
    from accelmark.results.store.loaded_run import SUMMARY_FILE, is_in_progress, load_run, require_ended
    from accelmark.run.record.directory import measure_run

    run, costs = options.own_run(run), read_prices(prices)
    if run.is_file():
        raise RequestError(f"{run}: is a bundle: its page is shown by 'accelmark view {run.parent}'")
    has_summary = (run / SUMMARY_FILE).is_file()
    if has_summary or is_in_progress(run):
        require_ended(run)
    if recompute:
        _require_unedited(run)
    if recompute or not has_summary:
        measure_run(run, recompute=recompute)
    logs = write_mllog(run, benchmark=mllog_as) if mllog or mllog_as is not None else []
    logs += write_flagperf_logs(run) if flagperf_names else []
    page = write_page(run, output, costs)
    loaded = load_run(run)
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())

    def print_paths() -> None:
        if markdown:
            from accelmark.report.tables import results_table

            typer.echo(results_table([loaded]))
        for problem in loaded.problems:
            options.warn(problem)
        for path in (*logs, page):
            typer.echo(str(path))

    problems = [*loaded.summary.problems, *loaded.problems]
    return Output({"page": str(page), "problems": problems, "summary": loaded.summary}, print_paths)


def _require_unedited(run: Path) -> None:
    """Raise RequestError for a run whose files changed since its end, or that could not be signed again."""
    from accelmark.results.store.bundle import KEY_VARIABLE, SIGNATURE_FILE, edits, signing_key
    from accelmark.results.store.loaded_run import MANIFEST_FILE

    if (run / MANIFEST_FILE).is_file() and (changed := edits(run)):
        what = f"its files changed since its end: {_some(changed, 3, '; ')}"
        raise RequestError(f"{run}: is not recomputed because {what}: restore the files, see 'accelmark verify {run}'")
    if (run / SIGNATURE_FILE).is_file() and signing_key() is None:
        how = f"set {KEY_VARIABLE} to sign the new results, or use 'accelmark verify {run}', which changes nothing"
        raise RequestError(f"{run}: is signed, and recomputed results would not be: {how}")


def _some(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{separator.join(texts[:most])}{more}"


def verify(
    target: Annotated[
        Path, argument("RUN|BUNDLE", "Run directory, its name in runs/, 'latest' there, or a bundle.")
    ] = options.LATEST,
    key: Annotated[Path | None, option("FILE", "Require a signature with this public SSH key.")] = None,
    allowed_signers: Annotated[
        Path | None, option("FILE", "Require a signature of one of these signers (ssh-keygen).")
    ] = None,
    replay: Annotated[
        str | None, option("NONCE", "Also replay steps that this text chooses, or `all`; needs the run.")
    ] = None,
    data: Annotated[
        Path | None, option("DIR", "Also compare samples of the data with your copy in this directory.")
    ] = None,
    as_json: options.AsJson = False,
) -> Output:
    """Recompute and audit the results of a run. Compares figures with its records, checks hashes and signature."""
    from accelmark.audit.verify import verify_run
    from accelmark.results.store.bundle import Trust, unpack

    if key is not None and allowed_signers is not None:
        raise RequestError("--key and --allowed-signers: give one of the two")
    if data is not None and not data.is_dir():
        raise RequestError(f"--data {data}: no such directory")
    for name, file in (("--key", key), ("--allowed-signers", allowed_signers)):
        if file is not None and not file.is_file():
            raise RequestError(f"{name} {file}: no such file")
    target = options.own_run(target)
    if replay is not None and not target.is_dir():
        raise RequestError(f"{target}: --replay needs the run's directory, since bundles have no checkpoints")
    trust = Trust(key, allowed_signers)
    checked = _checked(target, replay, offline=True) if replay is not None else []
    with tempfile.TemporaryDirectory(prefix="accelmark-verify-") as directory:
        archive: list[str] = []
        run_dir = target
        if not target.is_dir():
            run_dir, archive = unpack(target, Path(directory))
        verified, other_data = verify_run(run_dir, trust), list(_other_data(run_dir, data))
    facts = (*verified.figure_differences, *other_data)
    verification = verified._replace(changed=(*archive, *verified.changed), figure_differences=facts)
    is_trusted = trust == Trust() or verified.signature.status == "trusted"
    reproduced = verification.is_intact and all(again.is_reproduced for again in checked)
    invalid = any(case.verdict == "INVALID" for case in verification.summary.cases)

    def show() -> None:
        _show_verification(verification)
        _show_again(checked)
        if not is_trusted:
            required = f"--key {key}" if key is not None else f"--allowed-signers {allowed_signers}"
            options.echo_error(f"error: the run is not signed as {required} requires", fg="red")

    content = {
        "intact": verification.is_intact,
        "changed": verification.changed,
        "differences": verification.differences,
        "num_figures": verification.num_figures,
        "signature": verified.signature._asdict(),
        "cases": verification.summary.cases,
        "replayed": [again.values() for again in checked],
    }
    return Output(content, show, EXIT_OK if reproduced and is_trusted and not invalid else EXIT_FAILED)


def _other_data(run_dir: Path, own: Path | None) -> Iterator[str]:
    """Yield the places of the data that rounds read with other contents than in the reader's copy ``own``."""
    from accelmark.datasets.verify import sample_differences
    from accelmark.results.read.round_dir import rank_logs
    from accelmark.spec.log.events import DataRead, Event
    from accelmark.spec.log.perflog import PerfLogReader

    if own is None:
        return
    logs = (log for place in sorted(run_dir.glob("*/*round*")) for log in rank_logs(place).values())
    events = ((log, record) for log in logs for record in PerfLogReader(log) if record.event == Event.DATA_READ)
    read = [(log, *entry) for log, record in events for entry in record.value_as(DataRead).sample.items() if entry[1]]
    for log, name, sample in read:
        place = own / name if (own / name).is_dir() else own
        for differing in sample_differences(sample, place):
            yield f"{log.relative_to(run_dir)}: {name}: {differing} has other contents than in {place}"
    if not read:
        yield f"no round recorded contents of its data, so that nothing was compared with {own}"


def _checked(run: Path, nonce: str | None = None, *, offline: bool) -> list[CheckedAgain]:
    """Evaluate each round, or replay the steps that ``nonce`` chooses; a first evaluation is kept in the run."""
    from accelmark.audit.verify import checked_again
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.controller.evaluate import evaluated_run

    with (
        options.rich_console(stderr=True).status("starting a fresh process …") as status,
        evaluated_run(run, DataFetcher(offline), lambda text: status.update(f"{text} …"), nonce) as places,
    ):
        return checked_again(places)


def _show_verification(verification: Verification) -> None:
    from rich.text import Text

    from accelmark.report.tables import adaptation_rows
    from accelmark.results.schema import with_marks
    from accelmark.run.display.displays import print_hanging

    console = options.rich_console()
    styles = {"error": "red", "open": "yellow", "warning": "yellow", "info": "dim"}
    for case in verification.summary.cases:
        style = {"VALID": "bold green", "OPEN": "bold yellow", "INVALID": "bold red"}[case.verdict]
        console.print(Text.assemble((case.verdict, style), f"  {with_marks(str(case.key), case.marks)}"))
        for finding in case.findings:
            text = Text.assemble("  ", (f"{finding.severity:7}", styles[finding.severity]), f" {finding}")
            print_hanging(console, text)
        if changes := adaptation_rows(case.adaptation) if case.adaptation is not None else []:
            console.print(_table(("change", "name", "value or place"), changes))
        elif case.adaptation is not None:
            console.print(Text("  Adaptation cost: none", style="dim"))
    for what in (*verification.changed, *verification.differences):
        print_hanging(console, Text(f"differs: {what}", style="red"))
    signature = verification.signature
    style = {"trusted": "green", "signed": "green", "broken": "red", "untrusted": "red"}.get(signature.status, "yellow")
    console.print(Text(f"{signature.text[0].upper()}{signature.text[1:]}.", style=style))
    if signature.changed:
        what = "Not as signed, since bundling removes secrets and user names in addresses"
        console.print(Text(f"{what}: {_some(signature.changed, 5)}", style="yellow"))
    conclusion = (
        "Files intact. The differences above come from another AccelMark or copy of the case than the ones that ran, "
        "or from another copy of the data."
    )
    if verification.is_intact:
        conclusion = f"All {verification.num_figures} figures match the events and telemetry; no file was changed."
    elif verification.changed:
        conclusion = "Files were changed since the run ended."
    elif verification.signature.status == "broken":
        conclusion = "The signature does not belong to these files."
    console.print(Text(conclusion, style="green" if verification.is_intact else "red"))


def evaluate(
    run: options.RunPath = options.LATEST, offline: options.Offline = False, as_json: options.AsJson = False
) -> Output:
    """Evaluate the final weights of a run again. A fresh process uses the case's own code, and replays steps."""
    from accelmark.results.store.bundle import KEY_VARIABLE, SIGNATURE_FILE, signing_key
    from accelmark.run.record.directory import measure_run

    run = options.own_run(run)
    checked = _checked(run, offline=offline)
    if any(again.counts for again in checked):
        was_signed = (run / SIGNATURE_FILE).is_file()
        measure_run(run, recompute=True)
        if was_signed and signing_key() is None:
            what = "it was measured again; its signature was removed, because it is no longer valid"
            options.warn(f"{run}: {what}; set {KEY_VARIABLE} and use 'accelmark report --recompute' to sign it")
    is_reproduced = all(again.is_reproduced for again in checked)
    content = [again.values() for again in checked]
    return Output(content, lambda: _show_again(checked), EXIT_OK if is_reproduced else EXIT_FAILED)


def _show_again(checked: Sequence[CheckedAgain]) -> None:
    for again in checked:
        took = f" in {again.found.duration_s:.1f} s" if again.found.duration_s is not None else ""
        replayed = "".join(f", {replay.what} replayed" for replay in again.found.replays)
        options.echo_wrapped(f"{again.round}: evaluated{took}{replayed}")
        for finding in again.findings:
            options.echo_wrapped(f"  {finding}", fg="red" if finding.severity == "error" else "yellow")
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in (again.found.metrics or {}).items() if value)
        if again.is_reproduced:
            options.echo_wrapped(f"  reproduced: {metrics or 'losses and updates'}", fg="green")


def bundle(run: options.RunPath = options.LATEST, output: options.OutputFile = None) -> None:
    """Pack a run into one file. Contains results, events, configuration and logs, without secrets."""
    from accelmark.results.store.bundle import SUFFIX, write_bundle

    run = options.own_run(run)
    path = output or Path(f"{run.resolve().name}{SUFFIX}")
    if path.exists():
        raise RequestError(f"{path}: exists already; remove it, or choose another name with --output")
    write_bundle(run, path)
    typer.echo(str(path))


def export(
    run: Annotated[Path, argument("RUN|BUNDLE", "Run directory, search directory or bundle.")],
    tensorboard: Annotated[Path | None, option("DIR", "Write event files to this directory.")] = None,
    mlflow: Annotated[str | None, option("URI", "Log to this server or directory.")] = None,
    experiment: Annotated[str, typer.Option(help="Name of the MLflow experiment.")] = "accelmark",
    prometheus: Annotated[bool, flag("--prometheus", "Print the latest telemetry of a run in progress.")] = False,
    as_json: options.AsJson = False,
) -> Output:
    """Export a run to TensorBoard, MLflow or Prometheus. Prometheus gets the live telemetry of a run in progress."""
    if tensorboard is None and mlflow is None and not prometheus:
        raise RequestError("choose a format: --tensorboard DIR, --mlflow URI or --prometheus")
    run = options.existing_run(run)
    if prometheus:
        from accelmark.telemetry.exposition import expose

        if not run.is_dir():
            raise RequestError(f"{run}: --prometheus needs the directory of a run in progress")
        records = sorted(run.glob("*/round*/*/telemetry.jsonl"))
        text = expose([({"run": run.resolve().name}, record) for record in records], now_s=time.time())
        typer.echo(text, nl=False)
        if not text:
            why = "its telemetry has ended" if records else "it has no telemetry files"
            options.warn(f"{run}: no live telemetry: {why}")
    exported: dict[str, list[str]] = {}
    if tensorboard is not None or mlflow is not None:
        from accelmark.results.export import to_mlflow, to_tensorboard
        from accelmark.results.sources import load_source

        loaded = load_source(run)
        if tensorboard is not None:
            exported["tensorboard"] = [str(place) for place in to_tensorboard(loaded, tensorboard)]
        if mlflow is not None:
            exported["mlflow"] = to_mlflow(loaded, mlflow, experiment)

    def show() -> None:
        for tool, places in exported.items():
            for place in places:
                typer.echo(f"{tool}: {place}{f', experiment {experiment}' if tool == 'mlflow' else ''}")

    return Output(exported, show)


def results(
    places: Annotated[
        list[Path] | None, argument("DIR", "Runs, bundles or directories of runs; default: runs/.")
    ] = None,
    where: Annotated[
        list[str] | None, option("COLUMN=VALUE", "Filter rows, e.g. chip=H100,H200; repeat for AND.")
    ] = None,
    group_by: Annotated[str | None, option("COLUMN,…", "Group rows by columns: chip, case, scale, …")] = None,
    sql: Annotated[str | None, typer.Option(help="Query the table 'results' with a SELECT (DuckDB).")] = None,
    output_format: Annotated[Format | None, typer.Option("--format", help="Output format.")] = None,
    output: options.OutputFile = None,
    readme: Annotated[list[Path] | None, option("FILE", "Update the table in a case's README. Repeatable.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show all runs and bundles as one table. Runs that cannot be read are listed."""
    from accelmark.report.tables import group_title, markdown, plain_markdown, shown_table, write_readme_table
    from accelmark.results.sources import open_sources
    from accelmark.results.table import COLUMNS, column, grouped, matching, rows_of, run_query, to_csv, write_parquet

    forms = {"--readme": readme, "--json": as_json, "--format": output_format}
    if len(given := [form for form, value in forms.items() if value]) > 1:
        raise RequestError(f"{' and '.join(given)}: give one of them")
    if readme and (sql is not None or output is not None):
        raise RequestError("--readme writes the table of a case: remove --sql and --output")
    if group_by and (readme or as_json or sql is not None or output_format not in (None, "markdown")):
        raise RequestError("--group-by is for tables in the terminal and in Markdown: remove it")
    groups = [column(name.strip()) for name in (group_by or "").split(",") if name.strip()]
    wanted = [text.partition("=")[::2] for text in where or ()]
    if malformed := [text for text in where or () if not text.partition("=")[0] or "=" not in text]:
        raise RequestError(f"--where {malformed[0]!r}: write COLUMN=VALUE, e.g. chip=H100")
    runs, problems = open_sources([options.existing_run(place) for place in places] if places else [Path("runs")])
    for problem in problems:
        options.warn(problem)
    runs = matching(runs, [(name.strip(), value) for name, value in wanted])
    if wanted and not runs:
        options.warn("no result matches --where")
    if readme:
        measured = {case.key.model for run in runs for case in run.summary.cases}
        for page in readme:
            if (model := page.resolve().parent.name) not in measured:
                raise RequestError(f"{page}: not changed: there is no run of {model}")
            write_readme_table(page, runs, model)
            typer.echo(str(page))
        return
    rows = rows_of(runs)
    answer = run_query(rows, sql) if sql is not None else None
    if output_format == "parquet" and output is not None and answer is None:
        write_parquet(rows, output)
        typer.echo(str(output))
        return
    if output_format == "parquet" or (output is not None and not output_format and not as_json):
        raise RequestError("--output needs --format csv, markdown or parquet; parquet needs --output and has no --sql")
    if as_json:
        content = {"results": rows, "problems": problems} if answer is None else {"results": answer.records()}
        text = json.dumps(content, default=str, allow_nan=False)
    elif output_format == "csv":
        cells = [[row[name] for name in COLUMNS] for row in rows]
        text = to_csv(list(COLUMNS), cells) if answer is None else to_csv(answer.columns, answer.rows)
    elif output_format == "markdown":
        text = markdown(rows, groups) if answer is None else plain_markdown(answer.columns, answer.rows)
    else:
        console = _console()
        if answer is not None:
            console.print(_table(answer.columns, answer.rows))
        elif not rows:
            typer.echo("no results")
        else:
            for values, part in grouped(rows, groups).items():
                if groups:
                    typer.secho(printable(group_title(groups, values)), bold=True)
                console.print(_table(*shown_table(part)))
        return
    text = text if text.endswith("\n") else f"{text}\n"
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_atomic(output, text)
        typer.echo(str(output))


def _console(pipe_width: int = _PIPE_WIDTH) -> Console:
    console = options.rich_console()
    return console if console.is_terminal else options.rich_console(width=pipe_width)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(_text(head), overflow="fold")
    for row in rows:
        table.add_row(*(_text("–" if value is None else str(value)) for value in row))
    return table


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


def compare(
    runs: Annotated[list[Path], argument("RUN", "Runs, bundles or directories of runs; the first is the baseline.")],
    output: Annotated[Path | None, option("FILE", "Write a self-contained HTML page.", "--output", "-o")] = None,
    across_scales: Annotated[
        bool, flag("--across-scales", "Compare runs on different numbers of hosts and ranks.")
    ] = False,
    force: Annotated[bool, flag("--force", "Compare runs that are not comparable.")] = False,
    prices: options.PricesFile = None,
    as_json: options.AsJson = False,
) -> Output:
    """Compare runs with the first one. Shows differences with 95 % intervals, and changed settings and software."""
    from accelmark.report.comparison import buyer_lines, render_comparison
    from accelmark.results import comparison as comparing
    from accelmark.results.prices import read_prices
    from accelmark.results.sources import open_sources

    loaded, problems = open_sources([options.existing_run(run) for run in runs])
    costs = read_prices(prices)
    comparison = comparing.compare(loaded, across_scales=across_scales, force=force, problems=problems)
    buyer = buyer_lines(comparison, costs)
    if output is not None:
        write_atomic(output, render_comparison(comparison, prices=costs))

    def show() -> None:
        for problem in problems:
            options.warn(problem)
        for line in buyer:
            options.echo_wrapped(printable(f"{line.case}, {line.chips}: faster by {line.faster}; energy {line.energy}"))
            for title, one, two in line.costs:
                options.echo_wrapped(f"  {title}: {one} and {two}")
            options.echo_wrapped(printable(f"  changed by the vendor: {line.changed}"))
        for pair in comparison.pairs:
            _print_pair(pair)
        for unmatched in comparison.unmatched:
            options.echo_wrapped(f"not compared: {printable(unmatched)}")
        if output is not None:
            typer.echo(str(output))

    content = comparison.model_dump(mode="json") | ({"buyer": [line._asdict() for line in buyer]} if buyer else {})
    return Output(content, show)


def _print_pair(pair: Pair) -> None:
    from accelmark.report.comparison import lines_of, summary_line
    from accelmark.report.run_page import scale_text
    from accelmark.results.comparison import context_lines
    from accelmark.results.schema import with_marks
    from accelmark.run.display.displays import print_hanging

    console = _console(_COMPARISON_WIDTH)
    for word, side in (("baseline", pair.baseline), ("compared", pair.other)):
        verdict = with_marks(side.verdict, side.marks)
        scale = scale_text(side.key, side.variant)
        print_hanging(console, _text(f"{word}: {side.run}  {side.key.model} · {scale} · {verdict}"))
    for reason in pair.not_comparable:
        console.print(_text(f"NOT COMPARABLE: {reason}", "bold red"))
    if pair.differences:
        table = _table(("figure", "baseline", "compared", "difference", "95 % interval", "effect"), ())
        for column in table.columns[1:5]:
            column.justify = "right"
        styles = {"better": "green", "worse": "red", "different": "yellow"}
        for line in lines_of(pair):
            cells = (line.title, line.baseline, line.other, line.change, line.interval)
            table.add_row(*map(_text, cells), _text(line.effect, styles.get(line.css_class, "dim")))
        console.print(table)
    console.print(summary_line(pair), markup=False)
    for text in context_lines(pair.differing):
        print_hanging(console, _text(f"  {text}"))
    for text in pair.one_sided:
        print_hanging(console, _text(f"  only one run has: {text}"))
    console.print()


def view(
    directory: Annotated[Path, argument("DIR", "Directory that contains the runs.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address; if other machines can reach it, give --token-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8710,
    token_file: Annotated[Path | None, option("FILE", "File of the access token; created if missing.")] = None,
) -> None:
    """Show the runs below a directory in a browser. The pages are read-only and by default for this machine only."""
    from accelmark.spec.plugins.requirements import require

    require("accelmark view", "accelmark[view]")
    from accelmark.report.view import RunIndex, is_loopback, listen, make_app, read_or_create_token, server_for

    if token_file is None and not is_loopback(host):
        raise RequestError(f"{host} can be reached from other machines: name a file for the token with --token-file")
    token = read_or_create_token(token_file) if token_file else None
    app = make_app(RunIndex(directory), host, token)
    with listen(host, port) as listener:
        # No browser can open the address that means all interfaces.
        where = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host  # noqa: S104
        typer.echo(f"http://{where}:{listener.getsockname()[1]}/")
        if token_file:
            typer.echo(f"The page asks for the access token, which is in {token_file}.")
        typer.echo("Press Ctrl-C to stop.")
        server_for(app).run(sockets=[listener])
