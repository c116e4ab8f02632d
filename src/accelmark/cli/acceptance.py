"""Verbs that judge runs: accept by FlagPerf's rules, reproduce by a published figure, demo audit by a cheat."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from accelmark.cli import completion, options
from accelmark.cli.machine import detect_devices
from accelmark.cli.options import Output, Verb, argument, flag, group, option
from accelmark.cli.runs import execute, plan_request, run_name
from accelmark.results.store.files import make_directory, write_atomic
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, RequestError
from accelmark.spec.number_format import digits, quantity

if TYPE_CHECKING:
    from accelmark.audit.acceptance import Scale
    from accelmark.results.claims import Claim
    from accelmark.results.store.loaded_run import LoadedCase, LoadedRun

demo = group("demo", "Show a cheat that the audit finds.")

BEGIN: Final = "<!-- acceptance {} -->"
END: Final = "<!-- /acceptance -->"
_HEADINGS: Final = ("scale", "rule", "expected", "measured", "accepted", "run")
_CHINESE: Final = {
    "Scale": "规模", "Rule": "规则", "Expected": "要求", "Measured": "实测", "Accepted": "通过", "Run": "运行",
    "a run at this scale": "该规模的运行", "run": "运行", "target": "收敛目标", "adaptation": "适配",
    "telemetry": "监控", "of every device": "每个设备", "present": "有", "missing": "缺失", "repeats": "重复",
    "at least": "至少", "round": "轮", "rounds": "轮", "speed-up": "加速比", "of ideal": "（相对理想值）",
    "none stated": "未说明", "not measured": "未测", "none": "无", "yes": "是", "no": "否",
}  # fmt: skip
_TEMPLATES: Final = Path(__file__).with_name("templates") / "demo"
_CASE: Final = "audit_demo"
_CHEAT: Final = "demo_cheat"
_PHRASE: Final = re.compile(rf"(?<![\w-])({'|'.join(sorted(_CHINESE, key=len, reverse=True))})(?![\w-])")


def accept(
    vendor: Annotated[str, argument("VENDOR", "Name in 'accelmark vendors'.", completion.vendors)],
    case: Annotated[str, argument("CASE", "model[:framework]", completion.cases)],
    scales: Annotated[str | None, option("SCALES", "1x1,1x8,2x8; default: scales of the runs.")] = None,
    runs: Annotated[Path, option("DIR", "Directory of runs.")] = Path("runs"),
    efficiency: Annotated[float | None, typer.Option(help="Expected speed-up over the ideal one, 0 to 1.")] = None,
    readme: Annotated[Path | None, option("FILE", "README that gets the table, English and Chinese.")] = None,
    train: Annotated[
        bool, flag("--run", "First train what is missing: at each scale, rounds that last ten minutes together.")
    ] = False,
    cluster: Annotated[Path | None, option("FILE", "Cluster file for --run; default: this machine.")] = None,
    data: options.Data = None,
    hardware: Annotated[str | None, option("CHIP", "Chip for --run; default: the detected one.")] = None,
    dry_run: options.DryRun = False,
    commands: options.Commands = False,
    as_json: options.AsJson = False,
) -> Output:
    """Judge a vendor's case by FlagPerf's rules of acceptance, from its newest run at each scale."""
    from accelmark.audit.acceptance import judge, newest_cases, rounds_lacking
    from accelmark.spec.plugins.catalog import find

    model, _, framework = case.partition(":")
    framework = framework or "pytorch"
    find("vendors", vendor)
    find("cases", model)
    wanted = [_scale(text) for text in scales.split(",")] if scales else []

    def newest() -> dict[Scale, LoadedCase]:
        opened = options.opened_runs([runs] if runs.exists() else [])
        return newest_cases(opened, vendor, model, framework)

    if train or dry_run or commands:
        from accelmark.spec.cluster import ClusterSpec
        from accelmark.spec.runfile import CaseRequest, RunSpec

        is_shown = dry_run or commands
        key = f"{model}:{framework}:{hardware or detect_devices(vendor).hardware}"
        for _ in range(1 if is_shown else 2):  # one round at each scale that has none, then as many as last long enough
            cases = newest()
            rounds = {scale: rounds_lacking(cases.get(scale)) for scale in wanted or [(1, 1)]}
            keys = (f"{key}:{nnodes}:{nproc}:{number}" for (nnodes, nproc), number in rounds.items() if number)
            if not (requests := tuple(CaseRequest(key=text, data=data) for text in keys)):
                break
            name, hosts = f"accept-{run_name(model)}", cluster or ClusterSpec()
            request = RunSpec(name=name, vendor=vendor, cluster=hosts, cases=requests)
            plan = plan_request(request, (), synthetic=False, allow_missing_data=is_shown)
            execute(plan, None, runs=runs, dry_run=dry_run, with_commands=commands, as_json=as_json, is_judged=True)
        if is_shown:
            nothing = "nothing is missing: at every scale the rounds last ten minutes together"
            return Output([], lambda: None if requests else typer.echo(nothing))
    cases = newest()
    wanted = wanted or list(cases)
    if not cases:
        raise RequestError(f"{runs} has no training of {case} on {vendor}: add --run, with --scales 1x1,1x8")
    criteria = judge(cases, wanted, efficiency)
    states = {True: "yes", False: "no", None: "-"}
    rows = [(*criterion[:4], states[criterion.passed], criterion.run or "-") for criterion in criteria]
    if readme is not None:
        _write(readme, f"{model}:{framework}", rows, [cases[scale] for scale in wanted if scale in cases])
    rejected = any(criterion.passed is False for criterion in criteria)
    show = partial(options.print_table, _HEADINGS, rows)
    return Output([criterion._asdict() for criterion in criteria], show, EXIT_FAILED if rejected else EXIT_OK)


def _scale(text: str) -> Scale:
    scale = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())
    if scale is None:
        raise RequestError(f"--scales {text!r}: write HOSTSxDEVICES, e.g. 1x8")
    return int(scale[1]), int(scale[2])


def _write(readme: Path, name: str, rows: Sequence[tuple[str, ...]], cases: list[LoadedCase]) -> None:
    """Replace the tables of the case ``name`` between its markers in a README, or append them."""
    from accelmark.report.tables import plain_markdown, table_of

    titles = tuple(map(str.capitalize, _HEADINGS))
    chinese_titles, *chinese = [
        (*(_PHRASE.sub(lambda match: _CHINESE[match[0]], cell) for cell in row[:-1]), _CHINESE.get(row[-1], row[-1]))
        for row in (titles, *rows)
    ]
    parts = [table_of("train", cases)] if cases else []
    tables = "\n".join([*parts, plain_markdown(titles, rows), plain_markdown(chinese_titles, chinese)])
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    marker = BEGIN.format(name)
    before, begin, rest = text.partition(marker)
    if not begin:
        before = f"{text}\n## Acceptance of `{name}` / 验收\n\n" if text else ""
    after = rest.partition(END)[2] or "\n"
    write_atomic(readme, f"{before}{marker}\n{tables}{END}{after}")


def reproduce(
    claim: Annotated[
        str | None,
        argument("CLAIM", "Name of a claim or a YAML file; without one, claims are listed.", completion.claims),
    ] = None,
    check: Annotated[
        Path | None, option("RUN|BUNDLE|RESULT", "Compare this run, bundle or result.json; start nothing.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = 3,  # one has no interval
    data: options.Data = None,
    vendor: options.Vendor = None,
    settings: options.Settings = None,
    synthetic: options.Synthetic = False,
    out: options.Out = None,
    offline: options.Offline = False,
    output: Annotated[
        Path | None, option("FILE", "Page of the comparison; default: in the run.", "--output", "-o")
    ] = None,
    dry_run: options.DryRun = False,
    as_json: options.AsJson = False,
) -> Output | None:
    """Reproduce a published figure: run what comes closest, and report REPRODUCED, SHORT, BETTER or NOT COMPARABLE."""
    from accelmark.results.claims import claim_files, load_claim, load_result, planned_differences
    from accelmark.results.sources import load_source
    from accelmark.results.store.bundle import is_bundle

    if claim is None:
        listed = {name: load_claim(name)[1] for name in claim_files()}
        rows = [(name, quantity(of.value, of.unit), f"{of.num_devices} x {of.hardware}") for name, of in listed.items()]
        return Output(listed, lambda: options.print_table(("claim", "figure", "on"), rows))
    name, content = load_claim(claim)
    if check is not None:
        path = options.own_run(check)
        is_result = path.is_file() and not is_bundle(path)
        return _compared(name, content, load_result(path) if is_result else load_source(path, curves=False), output)
    from accelmark.spec.runfile import CaseRequest, RunSpec

    here = detect_devices(vendor)
    is_here = here.hardware == content.hardware
    if not is_here and not dry_run:
        what = f"this machine has {here.hardware}, the claim is about {content.hardware}: a run would be NOT COMPARABLE"
        raise RequestError(f"{what}; compare a run of such a machine with --check")
    nproc = min(content.nproc, here.num_devices or content.nproc) if is_here else content.nproc
    stated = {name: value for name, value in content.settings.items() if value is not None}
    if content.task == "train" and content.precision is not None:
        stated["precision"] = content.precision
    key = f"{content.case}:{content.framework}:{content.hardware}:1:{nproc}:{rounds}"
    case = CaseRequest(key=key, task=content.task, data=data, settings=stated | content.run)
    request = RunSpec(name=f"reproduce-{content.case}", vendor=vendor, open=bool(content.run), cases=(case,))
    synthetic = synthetic or (content.data == "synthetic" and content.task != "serve")
    plan = plan_request(request, settings or (), synthetic=synthetic, where="the claim", allow_missing_data=dry_run)
    if not as_json:
        job = plan.jobs[0].job
        values = {name: setting.value for name, setting in job.provenance.items()}
        precision = str(values.get("precision", content.precision))
        made_up = bool(values.get("loader.synthetic") or values.get("synthetic"))
        differences = list(planned_differences(content, values, precision, job.key.world_size, synthetic=made_up))
        typer.secho(f"{name}: {content.title}: {quantity(content.value, content.unit)}", bold=True)
        typer.echo(f"source: {content.source.document}")
        typer.echo("will differ:" if differences else "will differ: nothing that the source states")
        for difference in differences:
            options.echo_wrapped(f"  {difference.text}")
        for text in content.not_stated:
            options.echo_wrapped(f"  not stated: {text}")
    directory = execute(plan, out, offline=offline, dry_run=dry_run, as_json=as_json, is_judged=True)
    if directory is None:
        return None
    run = load_source(directory, curves=False)
    return _compared(name, content, run, output or directory.with_suffix(".reproduction.html"))


def _compared(name: str, claim: Claim, run: LoadedRun, output: Path | None) -> Output:
    """Compare a run, write page and JSON file where asked for, and return what is printed."""
    from accelmark.report.comparison import figures_text, render_reproduction
    from accelmark.results.claims import reproduce as compare

    reproduction = compare(name, claim, run)
    if output is not None:
        write_atomic(output, render_reproduction(reproduction))
        write_atomic(output.with_suffix(".json"), reproduction.model_dump_json(indent=1) + "\n")

    def show() -> None:
        color = {"REPRODUCED": "green", "BETTER": "green", "SHORT": "red"}.get(reproduction.verdict, "yellow")
        typer.secho(f"{reproduction.text}: {reproduction.claim} by {reproduction.run}", fg=color, bold=True)
        for reason in reproduction.reasons:
            options.echo_wrapped(f"  {reason}", fg="yellow")
        for title, text in figures_text(reproduction):
            options.echo_wrapped(f"  {title}: {text}")
        options.echo_wrapped(f"  Source: {reproduction.source.document}")
        same = "nothing differs that the source states"
        typer.echo("what differs, by expected cost:" if reproduction.differences else same)
        for difference in reproduction.differences:
            options.echo_wrapped(f"  {difference.text}")
        for text in reproduction.not_stated:
            options.echo_wrapped(f"  not stated by the source: {text}")
        if output is not None:
            typer.echo(str(output))

    return Output(reproduction, show, EXIT_OK if reproduction.verdict in ("REPRODUCED", "BETTER") else EXIT_FAILED)


@demo.command(cls=Verb)
def audit(
    out: Annotated[Path | None, option("DIR", "Directory; default: a new one in runs/.")] = None,
    as_json: options.AsJson = False,
) -> Output:
    """Train a case honestly, then with a vendor's hook that skips steps. Shows both speeds and the findings."""
    from accelmark.report.comparison import render_comparison
    from accelmark.results.comparison import compare
    from accelmark.results.figures import FigureName
    from accelmark.results.store.loaded_run import load_run
    from accelmark.run.record.directory import default_path, require_empty
    from accelmark.spec.plugins.catalog import PLUGINS_VARIABLE
    from accelmark.spec.runfile import CaseRequest, RunSpec

    directory = (out or default_path("demo-audit", datetime.now(UTC))).absolute()
    require_empty(directory)
    make_directory(directory)
    _write_demo(directory)
    os.environ[PLUGINS_VARIABLE] = str(directory / "plugins")
    os.environ["ACCELMARK_STATE"] = str(directory / "state")  # not the user's registry of runs
    runs = {"honest": directory / "honest", "cheat": directory / "cheat"}
    for (name, path), vendor in zip(runs.items(), ("cpu", _CHEAT), strict=True):
        if not as_json:
            typer.secho(f"{name}: {_CASE} on {vendor}", bold=True)
        case = CaseRequest(key=_CASE, data=directory / "data")
        plan = plan_request(RunSpec(name=name, vendor=vendor, cases=(case,)), [], synthetic=False)
        execute(plan, path, offline=True, as_json=as_json, is_judged=True)  # the cheat is INVALID
    loaded = [load_run(path) for path in runs.values()]
    page = directory / "audit.html"
    write_atomic(page, render_comparison(compare(loaded, force=True)))
    cases = {name: run.summary.cases[0] for name, run in zip(runs, loaded, strict=True)}
    caught = cases["honest"].verdict == "VALID" and cases["cheat"].verdict == "INVALID"
    rates = {name: case.mean_of(FigureName.THROUGHPUT_TRAIN) for name, case in cases.items()}
    content = {
        name: {
            "verdict": case.verdict,
            "images_per_second": rates[name],
            "reasons": case.reasons,
            "run": str(runs[name]),
        }
        for name, case in cases.items()
    }

    def show() -> None:
        honest, cheat = (rates[name] or 0.0 for name in ("honest", "cheat"))
        errors = [finding for finding in cases["cheat"].findings if finding.severity == "error"]
        rules = ", ".join(dict.fromkeys(finding.rule for finding in errors))
        first = next((finding for finding in errors if finding.rule == "replayed-update"), None)
        faster = f"{cheat / honest:.1f} x" if honest else "no honest rate"
        for line in (
            f"honest: {digits(honest)} images/s, {cases['honest'].verdict}",
            f"cheat:  {digits(cheat)} images/s ({faster}), {cases['cheat'].verdict}: it skips three of four steps",
            f"found by the rules {rules}" if rules else "not found",
            f"  {first or 'nothing'}",
        ):
            options.echo_wrapped(line)
        typer.echo(str(page))

    return Output(content | {"page": str(page)}, show, EXIT_OK if caught else EXIT_FAILED)


def _write_demo(directory: Path) -> None:
    """Write generated images, the case around their hashes, and the vendor that cheats."""
    import numpy as np

    data, case, vendor = (directory / part for part in ("data", f"plugins/cases/{_CASE}", f"plugins/vendors/{_CHEAT}"))
    extern = vendor / f"cases/{_CASE}-pytorch/extern"
    for path in (data, case, extern):
        path.mkdir(parents=True)
    patterns = np.random.default_rng(0).normal(size=(10, 7, 7)).repeat(4, 1).repeat(4, 2)
    files = []
    for seed, (split, count) in enumerate({"train": 6_400, "t10k": 1_000}.items(), start=1):
        chance = np.random.default_rng(seed)
        labels = chance.integers(0, 10, count)
        images = (patterns[labels] * 0.9 + chance.normal(size=(count, 28, 28)) * 3) * 30 + 128
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            raw = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}i", *values.shape)
            raw += values.clip(0, 255).astype(np.uint8).tobytes()
            file = data / f"{split}-{kind}-ubyte"
            file.write_bytes(raw)
            files.append({"path": file.name, "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)})
    text = (_TEMPLATES / "case.yaml").read_text(encoding="utf-8").replace("{{files}}", json.dumps(files))
    (case / "case.yaml").write_text(text, encoding="utf-8")
    shutil.copyfile(_TEMPLATES / "pytorch.py.in", case / "pytorch.py")
    shutil.copyfile(_TEMPLATES / "vendor.yaml", vendor / "vendor.yaml")
    shutil.copyfile(_TEMPLATES / "extern.py.in", extern / "__init__.py")
