"""Verbs about folders and files that users write: cases, new, check, import."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer
from typer import Argument, Option

from accelmark.cli import completion, options
from accelmark.spec.errors import EXIT_FAILED, AccelmarkError, RequestError, nearest
from accelmark.spec.number_format import limit_percent

if TYPE_CHECKING:
    from accelmark.cli.checks.trial import Check
    from accelmark.compat.flagperf.convert import Converted
    from accelmark.spec.plugins.case import CaseSpec, TrainCaseSpec
    from accelmark.spec.plugins.catalog import Folder

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATES: Final = Path(__file__).parent / "templates"
_WIDE: Final = 110
"""Columns of a terminal from which the list of cases shows families."""
_SIZES: Final = {"mini": "on two CPU cores:", "standard": "on accelerators:"}
"""Size of a case -> its heading in the list of cases, in their order there."""
_ADAPTATION: Final = "adaptation"
_FLAGPERF: Final = "flagperf"
_CODE: Final = ".in"
"""Suffix of template files, so that they are not treated as code of this package."""

Kind = Annotated[Literal["vendor", "case"], Argument(metavar="vendor|case", help="What the folder describes.")]


def cases(
    name: Annotated[
        str | None,
        Argument(metavar="NAME", help="Show this case with its settings and data.", autocompletion=completion.cases),
    ] = None,
    family: Annotated[
        str | None,
        Option(
            metavar="FAMILY",
            help="List only this family: vision, language, speech, recommendation, generation, graph or multimodal.",
        ),
    ] = None,
    flagperf: Annotated[
        bool, Option("--flagperf", help="List FlagPerf's models with the cases that carry them.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """List the cases with their families, tasks, sizes and targets, or show one."""
    if flagperf:
        if name or family:
            raise RequestError("--flagperf lists all models of FlagPerf: give neither a case nor --family")
        _list_flagperf(as_json=as_json)
        return
    from accelmark.spec.plugins.case import Family
    from accelmark.spec.plugins.catalog import find, folders, load_case, load_trainer, readable

    if family is not None and family not in get_args(Family):
        raise RequestError(f"--family: unknown family {family!r} ({nearest(family, get_args(Family))})")
    trainers, unreadable = readable("trainers", load_trainer)
    for problem in unreadable:
        options.warn(f"a trainer is left out: {problem}")
    rows: list[dict[str, Any]] = []
    for each, folder in ({name: find("cases", name)} if name else folders("cases")).items():
        try:
            case = load_case(each)
            if family in (None, case.family):
                own = [trainer for trainer, known in trainers.items() if case.name in known.cases]
                rows.append(_row(case, folder) | {"trainers": own})
        except AccelmarkError as error:
            if name:
                raise
            rows.append({"name": each, "problem": str(error), "from": folder.origin})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif name:
        _show_case(load_case(name), rows[0])
    else:
        _list_cases(rows)
    if any("problem" in row for row in rows):
        raise typer.Exit(EXIT_FAILED)


def _row(case: CaseSpec, folder: Folder) -> dict[str, Any]:
    from accelmark.spec.plugins.catalog import folders

    files = {file.stem.removeprefix("infer_").removeprefix("serve_") for file in folder.path.glob("*.py")}
    return {
        "name": case.name,
        "version": case.version,
        "title": case.title,
        "family": case.family,
        "size": case.size,
        "tasks": list(case.tasks),
        "frameworks": sorted(files & folders("frameworks").keys()),
        "target": _criterion(case.train) if case.train else None,
        "data": list(case.data_names),
        "from": folder.origin,
    }


def _list_cases(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console

    console = Console()
    heads = ("family",) if console.width >= _WIDE else ()
    table = options.plain_table("case", *heads, "tasks", "target", "description")
    for column in table.columns[:-1]:
        column.no_wrap = bool(heads) or column.header != "tasks"
        column.max_width = None if column.no_wrap else len("train, infer,")
    good = [row for row in rows if "problem" not in row]
    for size, title in _SIZES.items():
        chosen = [row for row in good if row["size"] == size]
        if chosen:
            table.add_row(f"[bold]{title}[/bold]")
        for row in chosen:
            shown = (*(row[head] or "-" for head in heads), ", ".join(row["tasks"]), row["target"] or "-")
            table.add_row(row["name"], *shown, row["title"])
        table.add_section()
    console.print(table)
    for row in rows:
        if "problem" in row:
            options.warn(f"case {row['name']} ({row['from']}) is left out: {row['problem']}")


def _list_flagperf(*, as_json: bool) -> None:
    from rich.console import Console

    from accelmark.compat.flagperf.coverage import coverage

    if as_json:
        typer.echo(json.dumps([asdict(row) for row in coverage()], indent=2))
        return
    table = options.plain_table("FlagPerf", "task", "case", "note")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in coverage():
        table.add_row(row.model, row.task, row.case or "-", row.note)
    Console().print(table)


def _show_case(case: CaseSpec, row: dict[str, Any]) -> None:
    from accelmark.spec.layers import flatten, may_change

    typer.secho(f"{case.name}, version {case.version}: {case.title}", bold=True)
    options.echo_wrapped(f"  {case.description}")
    options.echo_wrapped(f"  licence: {case.licence}")
    listed = {"frameworks": row["frameworks"], "data": case.data_names, "requires": case.requires}
    for title, names in (listed | ({"external trainers": row["trainers"]} if row["trainers"] else {})).items():
        options.echo_wrapped(f"  {title}: {', '.join(names) or 'none'}")
    if case.train is not None:
        target = case.train.target
        options.echo_wrapped(f"train: {row['target']}" + (f" ({target.why})" if target else ""))
        for key, value in flatten(case.train.settings).items():
            typer.echo(
                f"  {key:<38} {options.setting_text(value)}"
                + ("" if may_change(key, case.train.mutable) else "  (immutable)")
            )
    if case.infer is not None:
        options.echo_wrapped(
            f"infer: {case.infer.metric}, tolerance {case.infer.tolerance:g} ({case.infer.tolerance_why})"
        )
        for key, value in flatten({**case.infer.configurations, **case.infer.parameters}).items():
            typer.echo(f"  {key:<38} {options.setting_text(value)}")
    if case.serve is not None:
        options.echo_wrapped(f"serve: agreement >= {case.serve.min_agreement:g} ({case.serve.agreement_why})")
        for key, value in flatten(case.serve.settings).items():
            typer.echo(
                f"  {key:<38} {options.setting_text(value)}"
                + ("" if may_change(key, case.serve.mutable) else "  (immutable)")
            )


def _criterion(train: TrainCaseSpec) -> str:
    """Return the criterion of correct training in a few words."""
    target, reference = train.target, train.reference_loss
    if target is not None:
        return f"{target.metric} {'>=' if target.direction == 'at_least' else '<='} {target.value:g}"
    return (
        f"loss curve within {limit_percent(reference.max_mean_relative_error)}"
        if reference is not None
        else "no reference yet"
    )


def new(
    kind: Kind,
    name: Annotated[str, Argument(metavar="NAME", help="Lower-case letters, digits and underscores.")],
    into: Annotated[Path, Option(metavar="DIR", help="Directory of vendors/ and cases/.")] = Path(),
) -> None:
    """Create the folder of a vendor or a case from a template.

    A vendor has a chip description and an adaptation of resnet_mini; a case can be trained as it is.
    """
    typer.echo(f"{new_folder('vendors' if kind == 'vendor' else 'cases', name, into)}\n")
    typer.echo(f"Next:  export ACCELMARK_PLUGINS={into.absolute()}\n       accelmark check {kind} {name}")


def new_folder(kind: Literal["cases", "vendors"], name: str, into: Path) -> Path:
    """Create ``into/<kind>/<name>`` and return it; raise RequestError if the name is invalid or taken."""
    from accelmark.explain.schemas import schema_line
    from accelmark.spec.plugins.catalog import folders, look_again

    if not _NAME.fullmatch(name):
        raise RequestError(f"{name!r} cannot be a name: lower-case letters, digits and underscores, a letter first")
    known = folders(kind)
    if name in known:
        raise RequestError(f"{name!r} is taken: {known[name].path} ({known[name].origin})")
    folder = into / kind / name
    if folder.exists():
        raise RequestError(f"{folder}: exists already; choose another name or remove it")
    template = _TEMPLATES / kind
    for source in sorted(path for path in template.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        parts = (*source.relative_to(template).parts[:-1], source.name.removesuffix(_CODE))
        if parts[0] == _ADAPTATION:
            parts = ("cases", "resnet_mini-pytorch", *parts[1:])
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")
        if parts == (f"{kind[:-1]}.yaml",):
            text = f"{schema_line(kind[:-1])}\n{text}"
        target.write_text(text.replace("@NAME@", name).replace("@UPPER@", name.upper()), encoding="utf-8")
    look_again()
    return folder


def check(
    kind: Kind,
    name: Annotated[
        str,
        Argument(
            metavar="NAME",
            help="Name in 'accelmark vendors' or 'accelmark cases'.",
            autocompletion=completion.vendors_and_cases,
        ),
    ],
    run: Annotated[bool, Option("--run/--no-run", help="Also read devices and train a few steps.")] = True,
    frameworks: Annotated[
        str | None,
        Option(
            "--frameworks",
            metavar="A,B",
            help="Compare the case's first steps in these frameworks.",
            autocompletion=completion.listed_frameworks,
        ),
    ] = None,
    steps: Annotated[int, Option("--steps", min=1, help="Optimizer steps to compare.")] = 8,
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    out: Annotated[
        Path | None, Option("--out", metavar="DIR", help="Keep the compared weights and outputs here.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check the folder of a vendor or a case for completeness.

    A vendor: description, peak rates with their sources, telemetry, adaptations of cases, devices of this machine.
    A case: description, code, and training on synthetic data. With --frameworks: whether each framework, on one rank
    and on two, computes the same outputs, losses and weights as PyTorch from the same weights and batches.
    """
    if frameworks is not None:
        if kind != "case":
            raise RequestError("--frameworks compares the frameworks of a case: accelmark check case NAME")
        from accelmark.cli.checks.equivalence import CheckRequest, compare_frameworks

        request = CheckRequest(name, frameworks, data, vendor, settings or (), synthetic, steps)
        with _stop_told(f"{out} has what was computed" if out is not None else "nothing was kept"):
            is_equivalent = compare_frameworks(request, out, as_json=as_json)
        if not is_equivalent:
            raise typer.Exit(EXIT_FAILED)
        return
    if data or vendor or settings or synthetic or out:
        raise RequestError(
            "--data, --vendor, --set, --synthetic and --out are for --frameworks; other checks do not use them"
        )
    from accelmark.cli.checks.conformance import case_checks, vendor_checks

    started = (vendor_checks if kind == "vendor" else case_checks)(name, run=run)
    with _stop_told("nothing was kept"):
        if as_json:
            checks = list(started)
            typer.echo(json.dumps([asdict(found) for found in checks], indent=2))
        else:
            checks = list(_shown(started, "training three steps on synthetic data" if run else "checking"))
    if any(found.state == "missing" for found in checks):
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def _stop_told(kept: str) -> Iterator[None]:
    """Where the user ends a check, print that it is not complete, and what was kept."""
    try:
        yield
    except KeyboardInterrupt:
        options.echo_error(f"the check was stopped before its end; {kept}", fg="yellow")
        raise


def _shown(checks: Iterator[Check], doing: str) -> Iterator[Check]:
    """Print each check when it is done; meanwhile a terminal shows what is being done."""
    from rich.console import Console
    from rich.text import Text

    from accelmark.run.display.rows import print_hanging

    console = Console(highlight=False)
    signs = {"good": ("✓", "green"), "missing": ("✕", "red"), "advice": ("!", "yellow")}
    with console.status(f"{doing} …"):
        for found in checks:
            sign, colour = signs[found.state]
            what, do = Text.assemble((sign, colour), " ", found.what), Text(f"    {found.do}")
            print_hanging(console, *([what, do] if found.do else [what]))
            yield found


def import_files(
    origin: Annotated[str, Argument(metavar="flagperf", help="The benchmark that the files belong to.")],
    files: Annotated[
        list[Path],
        Argument(metavar="FILE", help="cluster_conf.py, test_conf.py, host.yaml, config_*.py, configurations.yaml"),
    ],
    out: Annotated[Path, Option("--out", metavar="DIR", help="Directory to write to.")] = Path(),
    force: Annotated[bool, Option("--force", help="Overwrite existing files.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Convert another benchmark's configuration. Files are not executed; unconverted settings are listed."""
    from accelmark.compat.flagperf.convert import convert
    from accelmark.results.store.files import make_directory, write_atomic

    if origin != _FLAGPERF:
        what = f"cannot import files of {origin!r}, only those of {_FLAGPERF}"
        read = "; AIPerf's config.yml is read as it is: accelmark automl run -c config.yml"
        raise RequestError(what + (read if origin == "aiperf" else ""))
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
        typer.echo("not converted, or changed:")
        for item in converted.left_over:
            options.echo_wrapped(f"  {item}")
    if converted.configs:
        place = f"vendors/{converted.cluster.get('vendor', '<vendor>')}/cases/<case>-<framework>/"
        options.echo_wrapped(f"runs read {', '.join(converted.configs)} from {place} of a clone or of your own vendor")
    if "run.yaml" in texts:
        typer.echo(f"Next:  accelmark run {out / 'run.yaml'} --dry-run")


def _files(converted: Converted) -> dict[str, str]:
    """Return the name and text of each file to write."""
    import yaml

    values: dict[str, dict[str, Any]] = {}
    if converted.cluster:
        values["cluster.yaml"] = converted.cluster
    if converted.run:
        values["run.yaml"] = ({"cluster": "cluster.yaml"} if converted.cluster else {}) | converted.run
    values |= converted.configs
    return {name: yaml.safe_dump(item, sort_keys=False, allow_unicode=True) for name, item in values.items()}
