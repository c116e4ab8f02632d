"""Verbs about folders and files that users write: cases, new, check, import."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer
from typer import Argument, Option

from accelmark.cli import completion, options
from accelmark.cli.help import Output
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, AccelmarkError, RequestError, nearest
from accelmark.spec.number_format import limit_percent

if TYPE_CHECKING:
    from accelmark.cli.checks import Check
    from accelmark.compat.flagperf.convert import Converted
    from accelmark.compat.flagperf.parse import Coverage as Carried
    from accelmark.spec.plugins.case import CaseSpec, TrainCaseSpec
    from accelmark.spec.plugins.catalog import Folder

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATES: Final = Path(__file__).parent / "templates"
_WIDE: Final = 110
"""Columns of a terminal from which the list of cases shows families."""
_SIZES: Final = {"mini": "on two CPU cores:", "standard": "on accelerators:"}
"""Size of a case -> its heading in the list of cases, in their order there."""
_ADAPTATION: Final = "adaptation"
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
) -> Output:
    """List the cases with their families, tasks, sizes and targets, or show one."""
    if flagperf:
        if name or family:
            raise RequestError("--flagperf lists all models of FlagPerf: give neither a case nor --family")
        from accelmark.compat.flagperf.parse import coverage

        carried = coverage()
        return Output(carried, lambda: _list_flagperf(carried))
    from accelmark.spec.plugins.case import Family
    from accelmark.spec.plugins.catalog import find, folders, load_case, load_trainer, readable

    if family is not None and family not in get_args(Family):
        raise RequestError(f"--family: unknown family {family!r} ({nearest(family, get_args(Family))})")
    trainers, unreadable = readable("trainers", load_trainer)
    for problem in unreadable:
        options.warn(f"a trainer is left out: {problem}")
    rows: list[dict[str, Any]] = []
    for case_name, folder in ({name: find("cases", name)} if name else folders("cases")).items():
        try:
            case = load_case(case_name)
            if family in (None, case.family):
                trained_by = [trainer for trainer, known in trainers.items() if case.name in known.cases]
                rows.append(_row(case, folder) | {"trainers": trained_by})
        except AccelmarkError as error:
            if name:
                raise
            rows.append({"name": case_name, "problem": str(error), "from": folder.origin})
    exit_code = EXIT_FAILED if any("problem" in row for row in rows) else EXIT_OK
    return Output(rows, lambda: _show_case(load_case(name), rows[0]) if name else _list_cases(rows), exit_code)


def _row(case: CaseSpec, folder: Folder) -> dict[str, Any]:
    from accelmark.spec.plugins.catalog import frameworks_of, inference_frameworks_of

    return case.model_dump(include={"name", "version", "title", "family", "size"}) | {
        "tasks": list(case.tasks),
        "frameworks": sorted({*frameworks_of(case), *inference_frameworks_of(case)}),
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
    for size, title in _SIZES.items():
        table.add_row(f"[bold]{title}[/bold]")
        for row in rows:
            if row.get("size") == size:
                shown = (*(row[head] or "-" for head in heads), ", ".join(row["tasks"]), row["target"] or "-")
                table.add_row(row["name"], *shown, row["title"])
        table.add_section()
    console.print(table)
    for row in rows:
        if "problem" in row:
            options.warn(f"case {row['name']} ({row['from']}) is left out: {row['problem']}")


def _list_flagperf(carried: Sequence[Carried]) -> None:
    table = options.plain_table("FlagPerf", "task", "case", "note")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in carried:
        table.add_row(row.model, row.task, row.case or "-", row.note)
    options.print_table(table)


def _show_case(case: CaseSpec, row: dict[str, Any]) -> None:
    typer.secho(f"{case.name}, version {case.version}: {case.title}", bold=True)
    listed = {"frameworks": row["frameworks"], "data": case.data_names, "requires": case.requires}
    listed |= {"external trainers": row["trainers"]} if row["trainers"] else {}
    for line in (case.description, f"licence: {case.licence}"):
        options.echo_wrapped(f"  {line}")
    for title, names in listed.items():
        options.echo_wrapped(f"  {title}: {', '.join(names) or 'none'}")
    if (train := case.train) is not None:
        options.echo_wrapped(f"train: {row['target']}" + (f" ({train.target.why})" if train.target else ""))
        _show_settings(train.settings, train.mutable)
    if (infer := case.infer) is not None:
        options.echo_wrapped(f"infer: {infer.metric}, tolerance {infer.tolerance:g} ({infer.tolerance_why})")
        _show_settings({**infer.configurations, **infer.parameters})
    if (serve := case.serve) is not None:
        options.echo_wrapped(f"serve: agreement >= {serve.min_agreement:g} ({serve.agreement_why})")
        _show_settings(serve.settings, serve.mutable)


def _show_settings(settings: Mapping[str, Any], mutable: Sequence[str] | None = None) -> None:
    """Print settings, and which of them are not ``mutable``, where a list is given."""
    from accelmark.spec.layers import flatten, may_change

    for key, value in flatten(settings).items():
        is_fixed = mutable is not None and not may_change(key, mutable)
        typer.echo(f"  {key:<38} {options.setting_text(value)}{'  (immutable)' if is_fixed else ''}")


def _criterion(train: TrainCaseSpec) -> str:
    """Return the criterion of correct training in a few words."""
    target, reference = train.target, train.reference_loss
    if target is not None:
        return target.text
    return (
        f"loss curve within {limit_percent(reference.max_mean_relative_error)}"
        if reference is not None
        else "speed only"
    )


def new(
    kind: Kind,
    name: Annotated[str, Argument(metavar="NAME", help="Lower-case letters, digits and underscores.")],
    into: Annotated[Path, Option(metavar="DIR", help="Directory of vendors/ and cases/.")] = Path(),
    kit: Annotated[
        bool, Option("--kit", help="Add a stand-in accelerator, on which the vendor's folder runs without hardware.")
    ] = False,
) -> None:
    """Create the folder of a vendor or a case from a template.

    A vendor has a chip description and an adaptation of resnet_mini; a case can be trained unchanged.
    """
    if kit and kind != "vendor":
        raise RequestError("--kit is for the folder of a vendor: accelmark new vendor NAME --kit")
    typer.echo(f"{new_folder('vendors' if kind == 'vendor' else 'cases', name, into, kit=kit)}\n")
    follow = f"accelmark check {kind} {name}{' --kit' if kit else ''}"
    typer.echo(f"Next:  export ACCELMARK_PLUGINS={into.absolute()}\n       {follow}")


def new_folder(kind: Literal["cases", "vendors"], name: str, into: Path, *, kit: bool = False) -> Path:
    """Create ``into/<kind>/<name>`` and return it; raise RequestError if the name is invalid or taken.

    ``kit``: a vendor's folder with a stand-in accelerator, which its ``vendor.yaml`` describes.
    """
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
    for parts, source in _template_files(kind, *(["kit"] if kit else [])):
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


def _template_files(*templates: str) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield the files of templates with their places below the new folder; those of later templates replace earlier."""
    files = {
        (*path.relative_to(template).parts[:-1], path.name.removesuffix(_CODE)): path
        for template in (_TEMPLATES / name for name in templates)
        for path in template.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    yield from sorted(files.items())


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
    kit: Annotated[
        bool, Option("--kit", help="Train on the stand-in accelerator of the vendor's folder, with planted faults.")
    ] = False,
    environment: Annotated[
        Path | None, Option(metavar="DIR", help="With --kit: environment with the PyTorch to use.")
    ] = None,
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
) -> Output:
    """Check the folder of a vendor or a case for completeness.

    A vendor: description, peak rates with their sources, telemetry, adaptations of cases, devices of this machine.
    With --kit: whether the vendor's folder survives a hung, lost or slow device, too little memory, another unit of
    power. Takes minutes, and a C++ compiler.
    A case: description, code, training and inference on synthetic data. With --frameworks: whether each framework, on
    one rank and on two, computes the same outputs, losses and weights as PyTorch from the same weights and batches.
    """
    if kit:
        if kind != "vendor" or not run or frameworks or data or vendor or settings or synthetic or out:
            raise RequestError("--kit is for a vendor, without other options: accelmark check vendor NAME --kit")
        return _check_kit(name, environment, as_json=as_json)
    if environment:
        raise RequestError("--environment is for --kit: accelmark check vendor NAME --kit --environment DIR")
    if frameworks is not None:
        if kind != "case":
            raise RequestError("--frameworks compares the frameworks of a case: accelmark check case NAME")
        from accelmark.cli.equivalence import compare_frameworks

        return compare_frameworks(
            name, frameworks, data, vendor, settings or (), steps, out, synthetic=synthetic, as_json=as_json
        )
    if data or vendor or settings or synthetic or out:
        raise RequestError(
            "--data, --vendor, --set, --synthetic and --out are for --frameworks; other checks do not use them"
        )
    from accelmark.cli.checks import case_checks, vendor_checks

    started = (vendor_checks if kind == "vendor" else case_checks)(name, run=run)
    checks = list(started if as_json else _shown(started, "training on synthetic data" if run else "checking"))
    exit_code = EXIT_FAILED if any(check.state == "missing" for check in checks) else EXIT_OK
    return Output(checks, lambda: None, exit_code)


def _check_kit(name: str, environment: Path | None, *, as_json: bool) -> Output:
    """Train on the stand-in of a vendor's folder with each fault: print a line after each, then the table."""
    from accelmark.cli.kit import FAULTS, check_kit

    outcomes = []
    with options.working("training on the stand-in") as show_line:
        for number, outcome in enumerate(check_kit(name, environment), start=1):
            outcomes.append(outcome)
            if not as_json:
                state = "survived" if outcome.survived else "not survived"
                show_line(f"{number} of {len(FAULTS)}: {outcome.fault}: {state}")

    def show() -> None:
        table = options.plain_table("fault", "survived", "AccelMark reports")
        for outcome in outcomes:
            expected = "" if outcome.survived else f" (expected: {outcome.expected})"
            table.add_row(outcome.fault, "yes" if outcome.survived else "no", f"{outcome.reported}{expected}")
        options.print_table(table)

    return Output(outcomes, show, EXIT_OK if all(outcome.survived for outcome in outcomes) else EXIT_FAILED)


def _shown(checks: Iterator[Check], doing: str) -> Iterator[Check]:
    """Print each check when it is done; meanwhile a terminal shows what is being done."""
    from rich.console import Console
    from rich.text import Text

    from accelmark.run.display.displays import print_hanging

    console = Console(highlight=False)
    signs = {"good": ("✓", "green"), "missing": ("✕", "red"), "advice": ("!", "yellow")}
    with console.status(f"{doing} …"):
        for check in checks:
            what, do = Text.assemble(signs[check.state], " ", check.what), Text(f"    {check.do}")
            print_hanging(console, *([what, do] if check.do else [what]))
            yield check


def import_files(
    origin: Annotated[
        Literal["flagperf", "claims"],
        Argument(metavar="flagperf|claims", help="flagperf: FlagPerf's configuration; claims: published results."),
    ],
    files: Annotated[
        list[Path],
        Argument(
            metavar="FILE",
            help="cluster_conf.py, test_conf.py, host.yaml, config_*.py, configuration.yaml; training/VENDOR or "
            "result/run<time> of FlagPerf; for claims: MLPerf's result files and summaries, FlagPerf's READMEs.",
        ),
    ],
    out: Annotated[Path, Option("--out", metavar="DIR", help="Directory to write to.")] = Path(),
    url: Annotated[str | None, Option("--url", metavar="URL", help="Where the file of claims is published.")] = None,
    is_open: Annotated[
        bool, Option("--open", help="Also import what a case fixes; the run is declared open, its results are OPEN.")
    ] = False,
    force: Annotated[bool, Option("--force", help="Overwrite existing files.")] = False,
    as_json: options.AsJson = False,
) -> Output:
    """Convert another benchmark's configuration. Files are not executed; unconverted settings are listed.

    Only what a run accepts is written.
    """
    from accelmark.compat.flagperf.convert import convert, convert_tree, is_tree
    from accelmark.compat.flagperf.old_run import is_run, read_run

    if origin == "claims":
        import yaml

        from accelmark.compat.published import read_published

        if url is None:
            raise RequestError("a claim names its source: give its address with --url")
        claims = [claim for file in files for claim in read_published(file, url)]
        texts = {
            f"{name}.yaml": yaml.safe_dump(
                claim.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True
            )
            for name, claim in claims
        }
        return Output({"written": _written(texts, out, force=force)}, lambda: typer.echo("\n".join(texts)))
    if len(files) > 1 and any(is_run(file) or is_tree(file) for file in files):
        raise RequestError("a vendor's directory of FlagPerf, and one of its logs, is imported alone")
    if any(is_run(file) for file in files):
        from accelmark.results.store.bundle import write_manifest

        results = _written(read_run(files[0]), out, force=force)
        run = Path(results[-1]).parent
        write_manifest(run)
        return Output({"written": results}, lambda: typer.echo(f"wrote {run}\nNext:  accelmark report {run}"))
    copied: dict[str, str] = {}
    if any(is_tree(file) for file in files):
        copied, converted = convert_tree(files[0], out.absolute().name, is_open=is_open)
    else:
        converted = convert(files, is_open=is_open)
    written = _written(copied | _files(converted), out, force=force)
    left = [{"file": item.where, "key": item.key, "why": item.what} for item in converted.left_over]
    return Output({"written": written, "left_over": left}, lambda: _show_import(converted, written))


def _written(texts: Mapping[str, str], out: Path, *, force: bool) -> list[str]:
    """Write files to a directory; return their paths. Raises RequestError where one exists and ``force`` is not set."""
    from accelmark.results.store.files import make_directory, write_atomic

    if (taken := [name for name in texts if (out / name).exists()]) and not force:
        raise RequestError(f"{out}: files exist: {', '.join(taken)}; use --force to overwrite them, or another --out")
    if texts:
        make_directory(out)
    for name, text in texts.items():
        make_directory((out / name).parent)
        write_atomic(out / name, text)
    return [str(out / name) for name in texts]


def _show_import(converted: Converted, written: Sequence[str]) -> None:
    for path in written:
        typer.echo(f"wrote {path}")
    if not written:
        typer.echo("wrote nothing: the files contain no setting that AccelMark has")
    if converted.left_over:
        typer.echo("not converted, or changed:")
    for item in converted.left_over:
        options.echo_wrapped(f"  {item}")
    if any("/" not in name for name in converted.configs):
        place = f"vendors/{converted.cluster.get('vendor', '<vendor>')}/cases/<case>-<framework>/"
        options.echo_wrapped(f"runs read {', '.join(converted.configs)} from {place} of a clone or of your own vendor")
    for path in written:
        if Path(path).name == "run.yaml":
            typer.echo(f"Next:  accelmark run {path} --dry-run")


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
