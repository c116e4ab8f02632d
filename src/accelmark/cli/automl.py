"""``accelmark automl``: search networks, and score the machine by the operations of the search."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from accelmark.cli import completion, options
from accelmark.cli.machine import detect_devices
from accelmark.cli.options import Output, Verb, argument, flag, group, option
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, RequestError, nearest

if TYPE_CHECKING:
    from accelmark.automl.journal import SearchDirectory
    from accelmark.results.rounds.search import SearchSummary

app = group("automl", "Search networks; score the operations per second.")

_RESUME: Final = "Continue with: accelmark automl resume"
_HELP_OF_CONFIG: Final = "Search file, AIPerf's config.yml, or a shipped search: fashion."
RunName = Annotated[str, argument("RUN", "A search's directory, its name below --runs, or 'latest'.")]
Runs = Annotated[Path, option("DIR", "Directory of runs.", "--runs")]


@app.command(cls=Verb)
def run(
    config: Annotated[Path, option("FILE", _HELP_OF_CONFIG, "--config", "-c", complete=completion.searches)],
    runs: Runs = Path("runs"),
    data: Annotated[Path | None, option("DIR", "Directory of the data set.")] = None,
    cluster: Annotated[Path | None, option("FILE", "Hosts: a cluster file, or AIPerf's servers.json.")] = None,
    dry_run: Annotated[
        bool, flag("--dry-run", "Check the request and its data, which are fetched once; start nothing.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run a search until its time or trials are used up."""
    from accelmark.run.preflight.checks import require_here

    require_here("accelmark automl run", "accelmark[automl]")  # before the imports below, which need its packages
    from accelmark.compat.aiperf import load_search

    devices = detect_devices(None).num_devices or 1
    loaded, unused = load_search(options.shipped_file(config, "searches"), cluster, devices)
    if data is not None:
        given = {"directory": data.resolve(), "train_directory": None, "held_out_directory": None}
        loaded = loaded.model_copy(update={"dataset": loaded.dataset.model_copy(update=given)})
    for line in unused:
        typer.secho(f"note: {line}", fg="yellow", err=True)
    if dry_run:
        from accelmark.automl.controller import check_without_start
        from accelmark.spec.layers import flatten

        if as_json:
            typer.echo(loaded.model_dump_json(indent=2))
        values = {} if as_json else flatten(loaded.model_dump(mode="json"))
        for key, value in values.items():
            typer.echo(f"{key:<32}  {options.setting_text(value)}")
        try:
            dataset, unchecked = check_without_start(loaded)
        except AccelmarkError as error:
            if not as_json:
                raise
            dataset, unchecked = None, [str(error)]  # the configuration is for another machine
        if dataset is not None:
            sizes = f"{len(dataset.training):,} training, {len(dataset.validation):,} validation"
            typer.echo(f"{dataset.name}: {sizes}, {len(dataset.held_out):,} held-out images", err=True)
        for line in unchecked:
            typer.echo(f"not checked: {line}", err=True)
        return
    with _shown(as_json) as (announce, observer):
        from accelmark.automl.controller import start_search  # takes a second

        search = start_search(loaded, runs, announce, observer)
    _finish(search, as_json)


@app.command(cls=Verb)
def resume(name: RunName, runs: Runs = Path("runs"), as_json: options.AsJson = False) -> None:
    """Continue a search that was stopped or killed."""
    from accelmark.run.preflight.checks import require_here

    require_here("accelmark automl resume", "accelmark[automl]")
    search = _find(name, runs)
    with _shown(as_json) as (announce, observer):
        from accelmark.automl.controller import resume_search  # takes a second

        announce(search)
        resume_search(search, observer)
    _finish(search, as_json)


@app.command(cls=Verb)
def status(name: RunName = "latest", runs: Runs = Path("runs"), as_json: options.AsJson = False) -> None:
    """Show trials, score, error, idle share and failures of a search."""
    _show(_find(name, runs), as_json)


@app.command(cls=Verb)
def stop(name: RunName = "latest", runs: Runs = Path("runs")) -> None:
    """Ask a running search to cut its trials, write its figures and end; it can be resumed."""
    search = _find(name, runs)
    if not search.is_running():
        raise RequestError(f"{search.path}: no search is running here; see 'accelmark automl status {name}'")
    search.stop_mark.touch()
    typer.echo(f"{search.path}: asked to stop")


@app.command(cls=Verb)
def report(
    name: RunName = "latest",
    runs: Runs = Path("runs"),
    logs: Annotated[bool, flag("--logs", "Also write an archive of the search's logs.")] = False,
    as_json: options.AsJson = False,
) -> Output:
    """Write a search's report: HTML, JSON and CSV."""
    from accelmark.report.search_page import write_report

    written = [str(path) for path in write_report(_find(name, runs), logs=logs)]
    return Output(written, lambda: typer.echo("\n".join(written)))


@app.command(cls=Verb)
def verify(name: RunName = "latest", runs: Runs = Path("runs"), as_json: options.AsJson = False) -> Output:
    """Recompute a search's figures from its journal, count its networks again, and apply its rules."""
    from accelmark.automl.scoring import verify_search

    verified = verify_search(_find(name, runs))

    def show() -> None:
        options.echo_wrapped(f"{verified.verdict} by {verified.by_rules}")
        reasons = (f"not valid: {reason}" for reason in verified.reasons)
        for line in (*reasons, *verified.disclosures, *verified.checked):
            options.echo_wrapped(f"  {line}")

    return Output(verified, show, EXIT_OK if verified.verdict == "VALID" else EXIT_FAILED)


@app.command(cls=Verb)
def count(
    network: Annotated[str, argument("NETWORK", "A network's JSON file, or a seed network's name such as resnet50.")],
    mode: Annotated[str, typer.Option(help="aiperf-v1 or accelmark.")] = "accelmark",
    layers: Annotated[bool, flag("--layers", "Print every layer too.")] = False,
    as_json: options.AsJson = False,
) -> Output:
    """Count the operations of one image: forward, backward and update."""
    from accelmark.automl.model.counting import MODES, count
    from accelmark.automl.model.seeds import resolve_network

    if mode not in MODES:
        raise RequestError(f"no counting mode is called {mode!r} ({nearest(mode, MODES)})")
    counted = count(resolve_network(network), mode)
    figures = {"network": counted.network, "mode": counted.mode} | asdict(counted)
    by_layer, figures["update_per_step"] = figures.pop("layers"), figures.pop("update")
    kinds: Counter[str] = Counter()
    for layer in counted.layers:
        kinds[layer.kind] += layer.forward

    def show() -> None:
        for key, value in figures.items():
            typer.echo(f"{key:<20} {value:>24,}" if isinstance(value, int) else f"{key:<20} {value:>24}")
        for kind, operations in kinds.items():
            typer.echo(f"  forward, {kind:<14} {operations:>22,}")
        for layer in counted.layers if layers else ():
            typer.echo(f"  {layer.name:<24} {layer.kind:<14} {layer.forward:>16,} {layer.backward:>16,}")

    return Output({**figures, "forward_by_kind": kinds} | ({"layers": by_layer} if layers else {}), show)


def _find(name: str, runs: Path) -> SearchDirectory:
    from accelmark.automl.journal import find_search

    return find_search(name, runs)


@contextmanager
def _shown(as_json: bool) -> Iterator[tuple[Callable[[SearchDirectory], None], Any]]:
    """Provide a function that announces a search, and an observer; after an interruption show how to resume."""
    announced: list[SearchDirectory] = []

    def announce(search: SearchDirectory) -> None:
        announced.append(search)
        print(f"search: {search.path}", file=sys.stderr)  # not typer's echo, which a live display does not see

    try:
        if as_json or not sys.stderr.isatty():
            yield announce, None
        else:
            from accelmark.report.search_terminal import live_view

            with live_view() as observer:
                yield announce, observer
    except KeyboardInterrupt:
        for search in announced:
            typer.echo(f"{_RESUME} {search.path}", err=True)
        raise typer.Exit(EXIT_CANCELLED) from None


def _show(search: SearchDirectory, as_json: bool) -> SearchSummary:
    from accelmark.report.search_terminal import show_summary

    if (summary := search.status()) is None:
        from accelmark.automl.scoring import summarise  # takes half a second

        summary = summarise(search)
    if as_json:
        typer.echo(summary.to_json())
    else:
        show_summary(summary)
    return summary


def _finish(search: SearchDirectory, as_json: bool) -> None:
    from accelmark.report.search_page import write_report

    written = write_report(search)
    summary = _show(search, as_json)
    if not as_json:
        typer.echo(f"report: {written[0]}")
    if summary.ended_because == "asked":
        if not as_json:
            typer.echo(f"{_RESUME} {search.path}")
        raise typer.Exit(EXIT_CANCELLED)
    if summary.judgement.verdict != "VALID":
        raise typer.Exit(EXIT_FAILED)
