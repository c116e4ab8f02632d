"""Verbs about folders and files that users write: cases, new, check, import, init, and explain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import typer

from accelmark.cli import completion, options
from accelmark.cli.machine import detect_devices
from accelmark.cli.options import Output, argument, flag, option
from accelmark.cli.runs import plan_request
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, AccelmarkError, RequestError, nearest
from accelmark.spec.number_format import limit_percent

if TYPE_CHECKING:
    from accelmark.cli.checks import Check
    from accelmark.spec.cluster import ClusterSpec
    from accelmark.spec.plugins.case import CaseSpec, TrainCaseSpec

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_TEMPLATES: Final = Path(__file__).parent / "templates"
RUN_FILE: Final = "run.yaml"
CLUSTER_FILE: Final = "cluster.yaml"
_SIZES: Final = {"mini": "on two CPU cores:", "standard": "on accelerators:"}
"""Size of a case -> its heading in the list of cases, in their order there."""

Kind = Annotated[Literal["vendor", "case"], argument("vendor|case", "What the folder describes.")]


def cases(
    name: Annotated[
        str | None, argument("NAME", "Show this case with its settings and data.", completion.cases)
    ] = None,
    family: Annotated[
        str | None,
        option(
            "FAMILY",
            "List only this family: vision, language, speech, recommendation, generation, graph or multimodal.",
        ),
    ] = None,
    flagperf: Annotated[bool, flag("--flagperf", "List FlagPerf's models with the cases that carry them.")] = False,
    as_json: options.AsJson = False,
) -> Output:
    """List the cases with their families, tasks, sizes and targets, or show one."""
    if flagperf:
        if name or family:
            raise RequestError("--flagperf lists all models of FlagPerf: give neither a case nor --family")
        from accelmark.compat.flagperf.parse import coverage

        carried = coverage()
        lines = [(row.model, row.task, row.case or "-", row.note) for row in carried]
        return Output(carried, lambda: options.print_table(("FlagPerf", "task", "case", "note"), lines, fixed=3))
    from accelmark.spec.plugins import catalog
    from accelmark.spec.plugins.case import Family

    if family is not None and family not in get_args(Family):
        raise RequestError(f"--family: unknown family {family!r} ({nearest(family, get_args(Family))})")
    trainers, unreadable = catalog.readable("trainers", catalog.load_trainer)
    for problem in unreadable:
        options.warn(f"a trainer is left out: {problem}")
    rows: list[dict[str, Any]] = []
    for case_name, folder in ({name: catalog.find("cases", name)} if name else catalog.folders("cases")).items():
        try:
            case = catalog.load_case(case_name)
            if family not in (None, case.family):
                continue
            frameworks = {*catalog.frameworks_of(case), *catalog.inference_frameworks_of(case)}
            row = case.model_dump(include={"name", "version", "title", "family", "size"}) | {
                "tasks": list(case.tasks), "frameworks": sorted(frameworks),
                "target": _criterion(case.train) if case.train else None, "data": list(case.data_names),
                "from": folder.origin,
                "trainers": [trainer for trainer, known in trainers.items() if case.name in known.cases],
            }  # fmt: skip
            rows.append(row)
        except AccelmarkError as error:
            if name:
                raise
            rows.append({"name": case_name, "problem": str(error), "from": folder.origin})
    exit_code = EXIT_FAILED if any("problem" in row for row in rows) else EXIT_OK
    return Output(rows, lambda: _show_case(catalog.load_case(name), rows[0]) if name else _list_cases(rows), exit_code)


def _list_cases(rows: list[dict[str, Any]]) -> None:
    console = options.rich_console(highlight=True)
    heads = ("family",) if console.width >= options.WIDE else ()
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
    if train.target is not None:
        return train.target.text
    if train.reference_loss is None:
        return "speed only"
    return f"loss curve within {limit_percent(train.reference_loss.max_mean_relative_error)}"


def new(
    kind: Kind,
    name: Annotated[str, argument("NAME", "Lower-case letters, digits and underscores.")],
    into: Annotated[Path, option("DIR", "Directory of vendors/ and cases/.")] = Path(),
    kit: Annotated[
        bool, flag("--kit", "Add a stand-in accelerator, on which the vendor's folder runs without hardware.")
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
    """Create ``into/<kind>/<name>``, with ``kit`` for a stand-in accelerator, and return it."""
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
    files = {
        path.relative_to(template): path
        for template in (_TEMPLATES / name for name in [kind, *(["kit"] if kit else [])])
        for path in sorted(template.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for place, source in files.items():
        # Templates of code end in .in, so that they are not treated as code of this package.
        target = folder / str(place).removesuffix(".in").replace("adaptation/", "cases/resnet_mini-pytorch/")
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8").replace("@NAME@", name).replace("@UPPER@", name.upper())
        head = f"{schema_line(kind[:-1])}\n" if target.name == f"{kind[:-1]}.yaml" else ""
        target.write_text(head + text, encoding="utf-8")
    look_again()
    return folder


def check(
    kind: Kind,
    name: Annotated[str, argument("NAME", "Name in 'accelmark vendors' or 'accelmark cases'.")],
    run: Annotated[bool, flag("--run/--no-run", "Also read devices and train a few steps.")] = True,
    kit: Annotated[
        bool, flag("--kit", "Train on the stand-in accelerator of the vendor's folder, with planted faults.")
    ] = False,
    environment: Annotated[Path | None, option("DIR", "With --kit: environment with the PyTorch to use.")] = None,
    frameworks: Annotated[str | None, option("A,B", "Compare the case's first steps in these frameworks.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 8,
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    out: Annotated[Path | None, option("DIR", "Keep the compared weights and outputs here.")] = None,
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

        given = (name, frameworks, data, vendor, settings or (), steps, out)
        return compare_frameworks(*given, synthetic=synthetic, as_json=as_json)
    if data or vendor or settings or synthetic or out:
        what = "--data, --vendor, --set, --synthetic and --out are for --frameworks"
        raise RequestError(f"{what}; other checks do not use them")
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
    lines = []
    for outcome in outcomes:
        expected = "" if outcome.survived else f" (expected: {outcome.expected})"
        lines.append((outcome.fault, "yes" if outcome.survived else "no", f"{outcome.reported}{expected}"))
    show = partial(options.print_table, ("fault", "survived", "AccelMark reports"), lines)
    return Output(outcomes, show, EXIT_OK if all(outcome.survived for outcome in outcomes) else EXIT_FAILED)


def _shown(checks: Iterator[Check], doing: str) -> Iterator[Check]:
    """Print each check when it is done; meanwhile a terminal shows what is being done."""
    from rich.text import Text

    from accelmark.run.display.displays import print_hanging

    console = options.rich_console()
    signs = {"good": ("✓", "green"), "missing": ("✕", "red"), "advice": ("!", "yellow")}
    with console.status(f"{doing} …"):
        for check in checks:
            what, do = Text.assemble(signs[check.state], " ", check.what), Text(f"    {check.do}")
            print_hanging(console, *([what, do] if check.do else [what]))
            yield check


def import_files(
    origin: Annotated[
        Literal["flagperf", "claims"],
        argument("flagperf|claims", "flagperf: FlagPerf's configuration; claims: published results."),
    ],
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="cluster_conf.py, test_conf.py, host.yaml, config_*.py, configuration.yaml; training/VENDOR or "
            "result/run<time> of FlagPerf; for claims: MLPerf's result files and summaries, FlagPerf's READMEs.",
        ),
    ],
    out: Annotated[Path, option("DIR", "Directory to write to.")] = Path(),
    url: Annotated[str | None, option("URL", "Where the file of claims is published.")] = None,
    is_open: Annotated[
        bool, flag("--open", "Also import what a case fixes; the run is declared open, its results are OPEN.")
    ] = False,
    force: Annotated[bool, flag("--force", "Overwrite existing files.")] = False,
    as_json: options.AsJson = False,
) -> Output:
    """Convert another benchmark's configuration. Files are not executed; unconverted settings are listed.

    Only what a run accepts is written.
    """
    from accelmark.compat.flagperf.convert import convert, convert_tree, is_tree
    from accelmark.compat.flagperf.old_run import is_run, read_run

    if origin == "claims":
        from accelmark.compat.published import read_published

        if url is None:
            raise RequestError("a claim names its source: give its address with --url")
        claims = [claim for file in files for claim in read_published(file, url)]
        values = {f"{name}.yaml": claim.model_dump(mode="json", exclude_defaults=True) for name, claim in claims}
        written = _write(values, out, force=force)
        return Output({"written": written}, lambda: typer.echo("\n".join(values)))
    if len(files) > 1 and any(is_run(file) or is_tree(file) for file in files):
        raise RequestError("a vendor's directory of FlagPerf, and one of its logs, is imported alone")
    if any(is_run(file) for file in files):
        from accelmark.results.store.bundle import write_manifest

        results = options.write_new(read_run(files[0]), out, "--out", force=force)
        run = Path(results[-1]).parent
        write_manifest(run)
        return Output({"written": results}, lambda: typer.echo(f"wrote {run}\nNext:  accelmark report {run}"))
    copied: dict[str, str] = {}
    if any(is_tree(file) for file in files):
        copied, converted = convert_tree(files[0], out.absolute().name, is_open=is_open)
    else:
        converted = convert(files, is_open=is_open)
    values = {"cluster.yaml": converted.cluster} if converted.cluster else {}
    if converted.run:
        values["run.yaml"] = ({"cluster": "cluster.yaml"} if converted.cluster else {}) | converted.run
    written = _write(values | converted.configs, out, copied, force=force)

    def show() -> None:
        for path in written:
            typer.echo(f"wrote {path}")
        if not written:
            typer.echo("wrote nothing: the files contain no setting that AccelMark has")
        if converted.left_over:
            typer.echo("not converted, or changed:")
        for item in converted.left_over:
            options.echo_wrapped(f"  {item}")
        if any("/" not in name for name in converted.configs):
            names, vendor = ", ".join(converted.configs), converted.cluster.get("vendor", "<vendor>")
            place = f"vendors/{vendor}/cases/<case>-<framework>/ of a clone or of your own vendor"
            options.echo_wrapped(f"runs read {names} from {place}")
        for path in written:
            if Path(path).name == "run.yaml":
                typer.echo(f"Next:  accelmark run {path} --dry-run")

    left = [{"file": item.where, "key": item.key, "why": item.what} for item in converted.left_over]
    return Output({"written": written, "left_over": left}, show)


def _write(
    values: Mapping[str, dict[str, Any]], out: Path, copied: Mapping[str, str] | None = None, *, force: bool
) -> list[str]:
    import yaml

    texts = {name: yaml.safe_dump(item, sort_keys=False, allow_unicode=True) for name, item in values.items()}
    return options.write_new({**(copied or {}), **texts}, out, "--out", force=force)


def explain(
    name: Annotated[
        str | None,
        argument(
            "NAME",
            "A figure, setting, key of a file, audit rule, verdict, state, end reason or mark: mfu, optimizer.lr.",
            completion.explained,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> Output:
    """Explain a figure, setting, key of a file, rule, verdict, end reason or mark. Without a name, list all."""
    from accelmark.explain.entries import entries
    from accelmark.explain.entries import explain as find

    explained = list(entries()) if name is None else find(name)

    def show() -> None:
        for kind, group in groupby(explained if name is None else (), key=lambda entry: entry.kind):
            typer.secho(f"{kind.capitalize()}:", bold=True)
            options.echo_wrapped(f"  {', '.join(entry.name for entry in group)}")
        for entry in explained if name is not None else ():
            typer.secho(f"{entry.name} ({entry.kind})", bold=True)
            for label, text in (("", entry.text), ("Why it matters: ", entry.why), ("What to do: ", entry.remedy)):
                if text:
                    options.echo_wrapped(f"  {label}{text.replace('``', '`')}")

    return Output(explained, show)


def init(
    hosts: Annotated[list[str] | None, argument("HOST", "Hosts reached by SSH; none: this machine.")] = None,
    into: Annotated[Path, option("DIR", "Where to write run.yaml and cluster.yaml.")] = Path(),
    vendor: options.Vendor = None,
    chip: Annotated[str | None, typer.Option(help="Chip; default: this machine's, or the vendor's first.")] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Devices of each host, or ranks on a CPU; default: this machine's, 1 on hosts or a CPU."
        ),
    ] = None,
    force: Annotated[bool, flag("--force", "Overwrite existing files.")] = False,
) -> None:
    """Write a run file for this machine, or a run file and a cluster file for the given hosts."""
    from accelmark.spec.plugins.catalog import load_vendor

    if hosts:
        texts = _files_for_hosts(hosts, vendor, chip, devices or 1)
    else:
        if vendor is not None:
            load_vendor(vendor)
        here = detect_devices(vendor)
        if not here.is_present or here.num_devices == 0:
            what = "can be read" if here.is_present else "was found"
            raise RequestError(
                f"--vendor {vendor}: no device of it {what} on this machine; `accelmark doctor` lists what was found, "
                "and `accelmark init HOST...` writes files for other machines"
            )
        texts = {RUN_FILE: _run_file(chip or here.hardware, devices or here.num_devices or 1, vendor=vendor)}
    for path in options.write_new(texts, into, "--into", force=force):
        typer.echo(f"wrote {path}")
    if hosts:
        typer.echo(f"\nNext:  edit {into / CLUSTER_FILE}: user, key and Python of the hosts")
        typer.echo(f"       accelmark preflight {into / CLUSTER_FILE}   # checks the hosts")
        typer.echo(f"       accelmark run {into / RUN_FILE}")
    else:
        typer.echo(f"\nNext:  accelmark run {into / RUN_FILE}")


def _files_for_hosts(hosts: list[str], vendor: str | None, chip: str | None, devices: int) -> dict[str, str]:
    """Return file name -> text."""
    import yaml

    from accelmark.explain.schemas import schema_line
    from accelmark.spec.plugins.catalog import load_vendor
    from accelmark.spec.plugins.launcher import parse_cluster

    if vendor is None:
        raise RequestError("name the vendor of the hosts' chips with --vendor; `accelmark vendors` lists them")
    chips = load_vendor(vendor).chips
    if chip is not None and chips and not any(chip.lower() in known.key_names for known in chips):
        hint = nearest(chip, (known.name for known in chips))
        raise RequestError(f"--chip {chip}: vendor {vendor} describes no such chip ({hint})")
    hardware = chip or (chips[0].name if chips else vendor.upper())
    if chip is None and len(chips) > 1:
        options.warn(f"{RUN_FILE} names the chip {hardware}, the first of {vendor}: correct it there, or give --chip")
    given = {"launcher": "ssh", "vendor": vendor, "hosts": [{"address": host} for host in hosts]}
    text = _run_file(hardware, devices, cluster=parse_cluster(given, "HOST"))
    entries = "".join("  - " + yaml.safe_dump({"address": host}, default_flow_style=True) for host in hosts)
    cluster = (
        f"{schema_line('cluster')}\n"
        "launcher: ssh\n"
        f"vendor: {vendor}\n"
        "# user: bench       # unless these are set, SSH uses your user, keys, agent and known_hosts\n"
        "# key: ~/.ssh/bench\n"
        "# python: /opt/venv/bin/python    # of ranks outside containers; needs psutil, pydantic, PyYAML and PyTorch\n"
        "#     all hosts get one by: accelmark env create pytorch --hosts FILE --path /opt/venv\n"
        f"hosts:\n{entries}"
    )
    return {RUN_FILE: text, CLUSTER_FILE: cluster}


def _run_file(hardware: str, devices: int, *, vendor: str | None = None, cluster: ClusterSpec | None = None) -> str:
    """Return a run file for hosts or this machine. Raises RequestError: no run can be planned from it."""
    import yaml

    from accelmark.explain.schemas import schema_line
    from accelmark.spec.model import parse
    from accelmark.spec.runfile import RunSpec

    lines = [schema_line("run"), "name: first"]
    lines += [f"cluster: {CLUSTER_FILE}"] if cluster is not None else []
    lines += [f"vendor: {vendor}"] if vendor is not None else []
    lines.append("# case:framework:chip:hosts:devices per host:rounds; see `accelmark cases` and `accelmark vendors`")
    lines.append("cases:")
    scales = dict.fromkeys([(1, 1), (1, devices), (len(cluster.hosts) if cluster is not None else 1, devices)])
    for case in ("resnet_mini", "llama_mini"):
        for nodes, per_node in scales:
            lines.append(f"  - key: {case}:pytorch:{hardware}:{nodes}:{per_node}")
    text = "".join(f"{line}\n" for line in lines)
    values = yaml.safe_load(text) | ({"cluster": cluster} if cluster is not None else {})
    plan_request(parse(RunSpec, values, RUN_FILE), [], synthetic=False, where=RUN_FILE)
    return text
