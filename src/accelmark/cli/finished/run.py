"""Verbs on a finished run: report, verify, evaluate, bundle, export."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from accelmark.cli import completion, options
from accelmark.cli.help import Output
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from accelmark.audit.verify import CheckedAgain, Verification
    from accelmark.results.schema import AdaptationCost


def report(
    run: options.RunPath = options.LATEST,
    output: options.Output = None,
    recompute: Annotated[bool, Option("--recompute", help="Recompute figures from events and telemetry.")] = False,
    markdown: Annotated[bool, Option("--markdown", help="Also print the results as a Markdown table.")] = False,
    mllog: Annotated[
        bool, Option("--mllog", help="Also write mllog.log (MLPerf log lines) for each training round.")
    ] = False,
    mllog_as: Annotated[str | None, Option(metavar="BENCHMARK", help="Name of the MLPerf benchmark in them.")] = None,
    flagperf_names: Annotated[
        bool, Option("--flagperf-names", help="Also write each rank's events with FlagPerf's names for their values.")
    ] = False,
    show: Annotated[bool, Option("--open", help="Open the page in a browser.")] = False,
    prices: options.PricesFile = None,
    as_json: options.AsJson = False,
) -> Output:
    """Write the report page of a run. A run without a summary is summarised first."""
    from accelmark.report.run_page import write_page
    from accelmark.results.prices import read_prices
    from accelmark.results.store.loaded_run import SUMMARY_FILE, is_in_progress, load_run, require_ended
    from accelmark.run.record.directory import measure_run

    run, costs = options.own_run(run), read_prices(prices)
    if run.is_file():
        raise RequestError(f"{run}: is a bundle: its page is shown by 'accelmark view {run.parent}'")
    if (run / SUMMARY_FILE).is_file() or is_in_progress(run):
        require_ended(run)
    if recompute:
        from accelmark.results.store.bundle import edits
        from accelmark.results.store.loaded_run import MANIFEST_FILE
        from accelmark.results.store.signature import KEY_VARIABLE, SIGNATURE_FILE, signing_key

        if (run / MANIFEST_FILE).is_file() and (changed := edits(run)):
            more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
            what = f"its files changed since its end: {'; '.join(changed[:3])}{more}"
            raise RequestError(
                f"{run}: is not recomputed because {what}: restore the files, see 'accelmark verify {run}'"
            )
        if (run / SIGNATURE_FILE).is_file() and signing_key() is None:
            how = f"set {KEY_VARIABLE} to sign the new results, or use 'accelmark verify {run}', which changes nothing"
            raise RequestError(f"{run}: is signed, and recomputed results would not be: {how}")
    if recompute or not (run / SUMMARY_FILE).is_file():
        measure_run(run, recompute=recompute)
    logs: list[Path] = []
    if mllog or mllog_as is not None:
        from accelmark.results.export import write_mllog

        logs = write_mllog(run, benchmark=mllog_as)
    if flagperf_names:
        from accelmark.results.export import write_flagperf_logs

        logs += write_flagperf_logs(run)
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


def verify(
    target: options.RunOrBundle = options.LATEST,
    key: Annotated[
        Path | None, Option("--key", metavar="FILE", help="Require a signature with this public SSH key.")
    ] = None,
    allowed_signers: Annotated[
        Path | None,
        Option("--allowed-signers", metavar="FILE", help="Require a signature of one of these signers (ssh-keygen)."),
    ] = None,
    replay: Annotated[
        str | None,
        Option("--replay", metavar="NONCE", help="Also replay steps that this text chooses, or `all`; needs the run."),
    ] = None,
    data: Annotated[
        Path | None,
        Option("--data", metavar="DIR", help="Also compare samples of the data with your copy in this directory."),
    ] = None,
    as_json: options.AsJson = False,
) -> Output:
    """Recompute and audit the results of a run. Compares figures with its records, checks hashes and signature."""
    from accelmark.audit.verify import verify_run
    from accelmark.results.store.bundle import unpack
    from accelmark.results.store.signature import Trust

    if key is not None and allowed_signers is not None:
        raise RequestError("--key and --allowed-signers: give one of the two")
    if data is not None and not data.is_dir():
        raise RequestError(f"--data {data}: no such directory")
    for option, file in (("--key", key), ("--allowed-signers", allowed_signers)):
        if file is not None and not file.is_file():
            raise RequestError(f"{option} {file}: no such file")
    target = options.own_run(target)
    trust = Trust(key, allowed_signers)
    checked = _replayed(target, replay) if replay is not None else []
    if target.is_dir():
        archive: list[str] = []
        verified, other_data = verify_run(target, trust), list(_other_data(target, data))
    else:
        with tempfile.TemporaryDirectory(prefix="accelmark-verify-") as directory:
            run_dir, archive = unpack(target, Path(directory))
            verified, other_data = verify_run(run_dir, trust), list(_other_data(run_dir, data))
    facts = (*verified.figure_differences, *other_data)
    verification = verified._replace(changed=(*archive, *verified.changed), figure_differences=facts)
    is_trusted = trust == Trust() or verified.signature.status == "trusted"
    reproduced = verification.is_intact and all(again.is_reproduced for again in checked)
    invalid = any(case.verdict == "INVALID" for case in verification.summary.cases)

    def show() -> None:
        _show(verification)
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


def _replayed(target: Path, nonce: str) -> list[CheckedAgain]:
    """Replay the steps of each round that the nonce chooses, and remove what that wrote."""
    if not target.is_dir():
        raise RequestError(f"{target}: --replay needs the run's directory, since bundles have no checkpoints")
    return _checked(target, nonce, offline=True)


def _checked(run: Path, nonce: str | None = None, *, offline: bool) -> list[CheckedAgain]:
    """Evaluate or replay each round; only the evaluation of a round that had none is kept in the run."""
    from rich.console import Console

    from accelmark.audit.verify import checked_again
    from accelmark.run.controller.data import DataFetcher
    from accelmark.run.controller.evaluate import evaluate_run, remove_repeated

    with Console(stderr=True, highlight=False).status("starting a fresh process …") as status:
        places = evaluate_run(run, DataFetcher(offline), lambda text: status.update(f"{text} …"), nonce)
    try:
        return checked_again(places)
    finally:
        remove_repeated(places)


def _show(verification: Verification) -> None:
    from rich.console import Console
    from rich.text import Text

    from accelmark.results.schema import with_marks
    from accelmark.run.display.displays import print_hanging

    console = Console(highlight=False)
    styles = {"error": "red", "open": "yellow", "warning": "yellow", "info": "dim"}
    for case in verification.summary.cases:
        style = {"VALID": "bold green", "OPEN": "bold yellow", "INVALID": "bold red"}[case.verdict]
        console.print(Text.assemble((case.verdict, style), f"  {with_marks(str(case.key), case.marks)}"))
        for finding in case.findings:
            text = Text.assemble("  ", (f"{finding.severity:7}", styles[finding.severity]), f" {finding}")
            print_hanging(console, text)
        if case.adaptation is not None:
            console.print(_cost_table(case.adaptation))
    for what in (*verification.changed, *verification.differences):
        print_hanging(console, Text(f"differs: {what}", style="red"))
    signature = verification.signature
    style = {"trusted": "green", "signed": "green", "broken": "red", "untrusted": "red"}.get(signature.status, "yellow")
    console.print(Text(f"{signature.text[0].upper()}{signature.text[1:]}.", style=style))
    if signature.changed:
        listed = ", ".join(signature.changed[:5])
        more = f" and {len(signature.changed) - 5} more" if len(signature.changed) > 5 else ""
        what = f"Not as signed, since bundling removes secrets and user names in addresses: {listed}{more}"
        console.print(Text(what, style="yellow"))
    console.print(Text(_conclusion(verification), style="green" if verification.is_intact else "red"))


def _conclusion(verification: Verification) -> str:
    if verification.is_intact:
        return f"All {verification.num_figures} figures match the events and telemetry; no file was changed."
    if verification.changed:
        return "Files were changed since the run ended."
    if verification.signature.status == "broken":
        return "The signature does not belong to these files."
    return (
        "Files intact. The differences above come from another AccelMark or copy of the case than the ones that ran, "
        "or from another copy of the data."
    )


def _cost_table(cost: AdaptationCost) -> RenderableType:
    """Return a table of the vendor's changes to the standard case."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from accelmark.report.tables import adaptation_rows

    rows = adaptation_rows(cost)
    if not rows:
        return Text("  Adaptation cost: none", style="dim")
    table = Table("change", "name", "value or place", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def evaluate(
    run: options.RunPath = options.LATEST,
    offline: options.Offline = False,
    as_json: options.AsJson = False,
) -> Output:
    """Evaluate the final weights of a run again. A fresh process uses the case's own code, and replays steps."""
    from accelmark.results.store.signature import KEY_VARIABLE, SIGNATURE_FILE, signing_key
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


def bundle(run: options.RunPath = options.LATEST, output: options.Output = None) -> None:
    """Pack a run into one file. Contains results, events, configuration and logs, without secrets."""
    from accelmark.results.store.bundle import SUFFIX, write_bundle

    run = options.own_run(run)
    path = output or Path(f"{run.resolve().name}{SUFFIX}")
    if path.exists():
        raise RequestError(f"{path}: exists already; remove it, or choose another name with --output")
    write_bundle(run, path)
    typer.echo(str(path))


def export(
    run: Annotated[
        Path,
        Argument(
            metavar="RUN|BUNDLE",
            help="Run directory, search directory or bundle.",
            autocompletion=completion.results,
        ),
    ],
    tensorboard: Annotated[Path | None, Option(metavar="DIR", help="Write event files to this directory.")] = None,
    mlflow: Annotated[str | None, Option(metavar="URI", help="Log to this server or directory.")] = None,
    experiment: Annotated[str, Option("--experiment", help="Name of the MLflow experiment.")] = "accelmark",
    prometheus: Annotated[
        bool, Option("--prometheus", help="Print the latest telemetry of a run in progress.")
    ] = False,
    as_json: options.AsJson = False,
) -> Output:
    """Export a run to TensorBoard, MLflow or Prometheus. Prometheus gets the live telemetry of a run in progress."""
    if tensorboard is None and mlflow is None and not prometheus:
        raise RequestError("choose a format: --tensorboard DIR, --mlflow URI or --prometheus")
    run = options.existing_run(run)
    if prometheus:
        if not run.is_dir():
            raise RequestError(f"{run}: --prometheus needs the directory of a run in progress")
        from accelmark.telemetry.exposition import expose

        records = sorted(run.glob("*/round*/*/telemetry.jsonl"))
        text = expose([({"run": run.resolve().name}, record) for record in records], now_s=time.time())
        typer.echo(text, nl=False)
        if not text:
            why = "its telemetry has ended" if records else "it has no telemetry files"
            options.warn(f"{run}: no live telemetry: {why}")
    exported: dict[str, list[str]] = {}
    if tensorboard is not None or mlflow is not None:
        from accelmark.results.export import to_mlflow, to_tensorboard, tracking_uri_of
        from accelmark.results.sources import load_source

        loaded = load_source(run)
        if tensorboard is not None:
            exported["tensorboard"] = [str(place) for place in to_tensorboard(loaded, tensorboard)]
        if mlflow is not None:
            exported["mlflow"] = to_mlflow(loaded, tracking_uri_of(mlflow), experiment)

    def show() -> None:
        for tool, places in exported.items():
            for place in places:
                typer.echo(f"{tool}: {place}{f', experiment {experiment}' if tool == 'mlflow' else ''}")

    return Output(exported, show)
