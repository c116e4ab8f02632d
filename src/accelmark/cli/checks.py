"""Check the folder of a vendor or a case: description, settings, code, telemetry; with a trial, also training."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from accelmark.datasets.spec import dataset_specs
from accelmark.plan.inference import adapted_server, option_layer
from accelmark.plan.request import adaptation_files
from accelmark.plan.training import without_effect
from accelmark.run.preflight.checks import HostsNotReadyError
from accelmark.run.record.registry import STATE_VARIABLE
from accelmark.spec.errors import AccelmarkError, RequestError, SpecError, nearest
from accelmark.spec.layers import Layer, resolve, resolve_inference
from accelmark.spec.model import read_yaml
from accelmark.spec.number_format import counted
from accelmark.spec.plugins import catalog
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.launcher import option_names
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.settings.serving import ServeSettings
from accelmark.spec.settings.training import TrainSettings
from accelmark.telemetry.forms import telemetry_of
from accelmark.telemetry.sources import MODULE_FILE

if TYPE_CHECKING:
    from accelmark.results.schema import Finding

_HEADINGS: Final = ("Model", "Data", "Target, and why", "Run", "Results", "Licence")
_FILE: Final = "case.yaml"
_TIMEOUT_S: Final = 600.0
_STOP_TIMEOUT_S: Final = 60.0
_EXPECTED: Final = frozenset(
    {"declared-open", "synthetic-data", "partial-evaluation", "target-missed", "rounds-incomplete", "too-few-rounds",
     "too-short", "source-tree", "telemetry-missing"}
)  # fmt: skip
"""Audit rules that three open steps on synthetic data always break, or that the checks of the folder cover."""


State = Literal["good", "missing", "advice"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    state: State
    what: str
    do: str = ""
    """How to correct it."""


Checks = Iterator[Check]


def vendor_checks(name: str, *, run: bool = False) -> Checks:
    """Check a vendor's folder; with ``run`` also read its devices on this machine and train on them."""
    folder = catalog.find("vendors", name).path
    described = list(_vendor_description(name, folder))
    yield from described
    if not run:
        yield Check("advice", "not tried: reading its devices, training on them", f"accelmark check vendor {name}")
    elif all(check.state != "missing" for check in described):
        from accelmark.telemetry.inventory import detect

        here = next(iter(detect([name])), None)
        if here is None:
            do = "repeat the check on a machine that has one, or correct telemetry.detect"
            yield Check("advice", "not tried: no device of this vendor on this machine", do)
            return
        if _has_telemetry(name, folder):
            names = ", ".join(dict.fromkeys(device.name for device in here.devices)) or "none"
            if here.problem is not None:
                yield Check("missing", f"cannot read its devices: {here.problem}", here.hint or "correct telemetry")
            else:
                yield Check("good", f"reads {counted(len(here.devices), 'device')} of this machine: {names}")
        adapted = [path.name.rpartition("-") for path in sorted((folder / "cases").glob("*")) if path.is_dir()]
        for model, _, framework in adapted:
            if (case := catalog.load_case(model)).train is not None and framework in catalog.frameworks_of(case):
                yield from trial(model, name, framework, untried="advice")
        if not adapted:
            yield from trial("resnet_mini", name)


def _vendor_description(name: str, folder: Path) -> Checks:
    try:
        spec = catalog.load_vendor(name)
        has_telemetry = _has_telemetry(name, folder)
    except AccelmarkError as error:
        yield from (Check("missing", line, "correct this key") for line in str(error).splitlines())
        return
    devices = ", ".join(f"{framework} device {device.device_type!r}" for framework, device in spec.frameworks.items())
    if spec.cannot_run is not None:
        yield Check("missing", "nothing can run on its chips", spec.cannot_run)
    elif not spec.frameworks:
        yield Check("missing", "vendor.yaml lists no framework", "declare the device under frameworks")
    else:
        yield Check("good", f"vendor.yaml describes {spec.title}: {devices}")
    if not spec.chips:
        do = "add chips, each with its dense peak rates and their source; MFU is null until then"
        yield Check("advice", "no chip is described", do)
    if spec.visible_devices_env is None and not spec.uses_host_cpu:
        do = "set visible_devices_env to the variable that limits the devices a process can use"
        yield Check("missing", "a job cannot be limited to some devices", do)
    if has_telemetry:
        yield Check("good", "has a telemetry source for its devices")
    else:
        what = "no telemetry source for utilisation, memory, temperature and power"
        do = f"add telemetry.tool, telemetry.script, or {MODULE_FILE} with a class Source"
        yield Check("advice" if spec.uses_host_cpu else "missing", what, do)
    if not (folder / "README.md").is_file():
        yield Check("missing", "no README.md", "describe what runs, with which driver and framework version")
    known = catalog.folders("frameworks")
    for framework in spec.frameworks.keys() - known.keys():
        yield Check("missing", f"frameworks.{framework}: unknown framework", nearest(framework, known))
    for chip in spec.chips:
        if any(peak is not None for peak in chip.peaks.model_dump().values()):
            yield Check("good", f"chip {chip.title}: peaks from {chip.source}")
        else:
            yield Check("advice", f"chip {chip.name}: no peak rate", "MFU is null until a peak is added")
    for adaptation in sorted(path for path in (folder / "cases").glob("*") if path.is_dir()):
        yield from _adaptation_checks(adaptation, spec)
    for engine in sorted(catalog.engine_files(folder / "engines")):
        tree = _parsed(folder / "engines" / f"{engine}.py", f"engines/{engine}.py")
        yield from [tree] if isinstance(tree, Check) else []
    yield from _problems("engines/engines.yaml", lambda: catalog.engine_specs(folder))
    for file in sorted((folder / "servers").glob("*.yaml")):
        yield from _problems(f"servers/{file.name}", partial(_resolved_server, file.stem, folder))


def _has_telemetry(name: str, folder: Path) -> bool:
    telemetry = telemetry_of(catalog.load_vendor(name), str(folder / "vendor.yaml"))
    return bool(telemetry.tool or telemetry.script or (folder / MODULE_FILE).is_file())


def _resolved_server(name: str, folder: Path) -> object:
    catalog.find("servers", name, f"servers/{name}.yaml")
    server, layers = adapted_server(catalog.load_server(name), folder)
    base, declared = Layer(_FILE, {}), option_layer(server)
    return resolve(ServeSettings, base, layers, mutable=("server_options",), is_open=False, defaults=declared)


def _adaptation_checks(folder: Path, vendor: VendorSpec) -> Checks:
    where = f"cases/{folder.name}"
    model, _, framework = folder.name.rpartition("-")
    if not model:
        yield Check("missing", f"{where}: names no framework", "name the folder <model>-<framework> after a case")
        return
    try:
        catalog.find("cases", model, where)
        case = catalog.load_case(model)
    except AccelmarkError as error:
        yield Check("missing", str(error), "name the folder <model>-<framework> after a case")
        return
    if framework not in {*catalog.frameworks_of(case), *catalog.inference_frameworks_of(case)}:
        yield Check("missing", f"{where}: {model} has no framework {framework!r}", "see 'accelmark cases'")
        return
    try:
        catalog.framework_device(vendor, framework)
    except AccelmarkError as error:
        what, _, do = str(error).partition("; ")
        yield Check("missing", f"{where}: {what}", do)
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("config/*.yaml")]):
        # Which weaker files apply to an infer_*.yaml depends on the device.
        if path.match("config*.yaml") or path.match("serve*.yaml") or path.name == "infer.yaml":
            yield from _settings_checks(path, f"{where}/{path.relative_to(folder)}", case)
    for path in catalog.unread_files(folder):
        what = f"{where}/{path.relative_to(folder)} is not read"
        yield Check("advice", what, f"names that are: {', '.join(catalog.ADAPTATION_NAMES)}")
    if not (folder / "README.md").is_file() and any(path.suffix != ".yaml" for path in folder.iterdir()):
        yield Check("advice", f"{where}: no README.md", "describe what it changes, and with which chip and versions")
    contents = adaptation_files(folder)
    if contents is not None and (folder / "csrc").is_dir() and not contents.has_build:
        yield Check("missing", f"{where}/csrc cannot be built", "add a setup.py or pyproject.toml that pip can install")
    if (folder / "extern").is_dir() and catalog.hooks_file(framework) is None:
        yield Check("missing", f"{where}/extern: framework {framework} has no hooks to replace", "remove the folder")
    elif (folder / "extern").is_dir():
        yield from _extern_checks(folder / "extern" / "__init__.py", f"{where}/extern", framework)


def _settings_checks(file: Path, name: str, case: CaseSpec) -> Checks:
    """Check a vendor's settings on the case alone: which of the vendor's other files apply depends on the device."""
    advice: list[Check] = []

    def read() -> None:
        layer = Layer.of(name, read_yaml(file))
        if file.name.startswith("infer") and case.infer is not None:
            notes = resolve_inference(case.infer, _FILE, vendor=[layer], reserved=option_names()).notes
            doubtful = (f"{name}: {note.key} {note.what}" for note in notes if note.severity == "warning")
            advice.extend(Check("advice", what, "correct it, unless it is an option") for what in doubtful)
        elif file.name.startswith("serve") and case.serve is not None:
            values, server, declared = layer.values, layer.values.get("server"), None
            if isinstance(server, str):
                catalog.find("servers", server, name)
                declared = option_layer(catalog.load_server(server))
            else:  # options are those of another file's server
                values = {key: value for key, value in values.items() if not key.startswith("server_options.")}
            base, over = Layer.of(_FILE, case.serve.settings), [Layer(name, values)]
            resolve(ServeSettings, base, over, mutable=case.serve.mutable, is_open=False, defaults=declared)
        elif file.name.startswith("config") and case.train is not None:
            base = Layer.of(_FILE, case.train.settings)
            resolve(TrainSettings, base, [layer], mutable=case.train.mutable, is_open=False)
        if not advice:
            advice.append(Check("good", f"{name}: {counted(len(layer.values), 'setting')}, all mutable"))

    yield from _problems(name, read)
    yield from advice


def _extern_checks(file: Path, where: str, framework: str) -> Checks:
    tree = _parsed(file, f"{where}/__init__.py")
    if isinstance(tree, Check):
        yield tree
        return
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Extern"]
    names = [node.name for extern in classes for node in extern.body if isinstance(node, ast.FunctionDef)]
    allowed = catalog.allowed_hooks(framework)
    forbidden = [name for name in names if not name.startswith("_") and name not in allowed]
    for name in forbidden:
        yield Check("missing", f"{where} replaces {name!r}, which is not a hook", nearest(name, allowed))
    if not classes:
        yield Check("missing", f"{where} has no class Extern", f"define it, of accelmark.frameworks.{framework}.hooks")
    elif not forbidden:
        yield Check("good", f"{where} replaces {', '.join(name for name in names if name in allowed) or 'nothing'}")


def case_checks(name: str, *, run: bool) -> Checks:
    """Check a case's folder; with ``run`` also train three steps on synthetic data, and run the model of inference."""
    described = list(_case_description(name, catalog.find("cases", name).path))
    yield from described
    if not run:
        what = "not tried: the imports and results of its code, its model's parameters, the metric of its target"
        yield Check("advice", what, f"accelmark check case {name}")
    elif all(check.state != "missing" for check in described):
        case = catalog.load_case(name)
        if case.train is not None:
            yield from trial(name, "cpu", evaluate=True)
        if case.infer is not None:
            if case.infer.generates or case.infer.iterative:
                what = f"{name}: inference was not tried: it needs weights"
                yield Check("advice", what, f"accelmark infer {name} --data DIR")
            else:
                yield from _metrics(f"{name}: inference", "infer.metric", case.infer.metric, "--infer", name)


def _case_description(name: str, folder: Path) -> Checks:
    try:
        case = catalog.load_case(name)
    except AccelmarkError as error:
        yield from (Check("missing", line, "correct this key") for line in str(error).splitlines())
        return
    train, infer = case.train, case.infer
    yield Check("good", f"case.yaml describes {case.title}, version {case.version}")
    yield from _problems(_FILE, lambda: dataset_specs(case.data, _FILE), "data.")
    if train is not None:
        yield from _problems(_FILE, lambda: _require_effect(train.settings), "train.settings.")
    if infer is not None:
        yield from _problems(_FILE, lambda: resolve_inference(infer, _FILE, reserved=option_names()), "infer.")
        if not infer.generates and "pytorch" not in infer.classes:
            yield _code_check(folder / "infer_pytorch.py")
    if train is not None:
        if train.target is None and train.reference_loss is None:
            do = "add train.target (with why), or measure a loss curve: accelmark train NAME --write-reference"
            yield Check("missing", "no criterion for correct training", do)
        frameworks = catalog.frameworks_of(case)
        if not frameworks:
            files = ", ".join(f"{framework}.py" for framework in catalog.folders("frameworks"))
            yield Check("missing", "no implementation in any framework", f"add a file named after one: {files}")
        coded = ("arrays" if name in train.arrays else name for name in frameworks if name not in train.classes)
        for name in dict.fromkeys(coded):
            yield _code_check(folder / f"{name}.py")
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if absent := [heading for heading in _HEADINGS if f"## {heading}" not in text]:
        yield Check("advice", "README.md lacks headings", f"add ## {', ## '.join(absent)}")


def _require_effect(settings: Mapping[str, Any]) -> None:
    """Raise SpecError with the settings of training that are wrong or have no effect."""
    resolved = resolve(TrainSettings, Layer.of(_FILE, settings), [], mutable=(), is_open=False)
    if unused := list(without_effect(resolved.provenance, (_FILE,))):
        raise SpecError(unused)


def _problems(file: str, read: Callable[[], object], prefix: str = "") -> Checks:
    """Yield the problems that ``read`` raises for ``file``, with their keys below ``prefix``."""
    try:
        read()
    except SpecError as error:
        for problem in error.problems:
            key = f"{prefix}{problem.key.removeprefix(prefix)}"
            where = f"{file}: {key}" if key else file
            yield Check("missing", f"{where}: {problem.what}", problem.hint or "correct this key")
    except RequestError as error:
        yield Check("missing", str(error), "correct this name")


def _code_check(file: Path) -> Check:
    """Check that a Python file defines or imports ``Case``, without executing it; a trial does the rest."""
    tree = _parsed(file, file.name)
    if isinstance(tree, Check):
        return tree
    names = {getattr(node, "name", "") for node in tree.body}
    names |= {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    if "Case" in names:
        return Check("good", f"{file.name} has class Case")
    return Check("missing", f"{file.name} has no class Case", "define it: docs/reference/case-files.md")


def _parsed(file: Path, where: str) -> ast.Module | Check:
    """Return the syntax tree of a Python file, or the reason why there is none."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except OSError:
        return Check("missing", f"no {where}", "add the file")
    except SyntaxError as error:
        return Check("missing", f"{where}:{error.lineno}: {error.msg}", "correct the file")


def trial(
    name: str, vendor: str, framework: str | None = None, *, untried: State = "missing", evaluate: bool = False
) -> Checks:
    """Train three steps on synthetic data and report problems of the run and its audit.

    ``framework``: train in this one instead of the default one, and name it. ``untried`` is the state of the check
    where this machine lacks what the training needs. ``evaluate``: also run the case's evaluation.
    """
    from accelmark.results.store.loaded_run import load_run

    key, title = (name, name) if framework is None else (f"{name}:{framework}", f"{name}-{framework}")
    with tempfile.TemporaryDirectory(prefix="accelmark-check-") as directory:
        run = Path(directory) / "run"
        arguments = ["train", key, "--vendor", vendor, "--synthetic", "--open", "--set", "end.max_steps=3"]
        code, error, last = run_accelmark([*arguments, "--out", str(run)])
        if code is None:
            do = f"it was stopped; to see where it hangs: accelmark {' '.join(arguments)}"
            yield Check("missing", f"{title} did not train three steps on {vendor} within {_TIMEOUT_S:g} s", do)
            return
        if error == HostsNotReadyError.__name__:
            yield Check(untried, f"{title}: not tried: this machine lacks what it needs", last)
            return
        try:
            rounds = list(load_run(run, curves=False).rounds.values())
        except AccelmarkError:
            rounds = []
        failed = [f"{result.state}: {result.reason}" for result in rounds if result.state != "succeeded"]
        if failed or not rounds:
            yield Check("missing", f"{title} cannot be trained on synthetic data", "; ".join(failed) or last)
            return
        yield Check("good", f"{title} trains three steps on synthetic data")
        broken = broken_rules(run)
        for entry in broken:
            verdict = "INVALID" if entry.severity == "error" else "OPEN"
            do = f"results would be {verdict}; expected: {entry.expected}"
            # A new chip's author can write no peaks that are reviewed.
            is_new_chip = entry.rule == "chip-mismatch" and entry.severity == "open"
            yield Check("advice" if is_new_chip else "missing", f"{title}: {entry.actual} [{entry.rule}]", do)
        if not broken:
            not_tried = "data, target, speed and replay were not tried"
            yield Check("good", f"{title}: no audit rule was broken in three steps on synthetic data; {not_tried}")
        if evaluate:
            train, job = catalog.load_case(name).train, next(run.glob("*/round1/job.json"))
            metric = train.target.metric if train is not None and train.target is not None else None
            yield from _metrics(f"{name}: evaluation", "target.metric", metric, str(job))


def run_accelmark(
    arguments: Sequence[str], timeout_s: float = _TIMEOUT_S, variables: Mapping[str, str] | None = None
) -> tuple[int | None, str, str]:
    """Run a command with ``--json``; return its exit code (None after a timeout), class of error, and problems."""
    command = [sys.executable, "-c", "from accelmark.cli import main; main()", *arguments, "--json"]
    code, lines = _execute(command, timeout_s, variables)
    try:
        report = json.loads(lines[-1])
        return code, str(report["error"]), "; ".join(report["problems"])
    except (IndexError, KeyError, TypeError, ValueError):
        return code, "", "; ".join(lines[-3:])


def _execute(
    command: Sequence[str], timeout_s: float = _TIMEOUT_S, variables: Mapping[str, str] | None = None
) -> tuple[int | None, list[str]]:
    """Return exit code and lines of output of a command; the code is None after a timeout."""
    with (
        tempfile.TemporaryDirectory(prefix="accelmark-check-state-") as state,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | (variables or {}) | {STATE_VARIABLE: state},  # a check is no run of the user's registry
        ) as process,
    ):  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # a coordinator that is killed at once cannot stop its ranks
            try:
                process.communicate(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return None, []
    lines = (line.strip() for line in output.decode(errors="replace").splitlines())
    return process.returncode, [line for line in lines if line] or ["it ended without output"]


def broken_rules(run: Path) -> list[Finding]:
    """Return the audit findings of a short open run on synthetic data that a full run would have too."""
    from accelmark.results.store.loaded_run import load_summary

    findings = (finding for case in load_summary(run / "summary.json").cases for finding in case.findings)
    broken = (entry for entry in findings if entry.severity in ("error", "open") and entry.rule not in _EXPECTED)
    return list(dict.fromkeys(broken))


def _metrics(what: str, key: str, metric: str | None, *arguments: str) -> Checks:
    """Compute the metrics of a synthetic batch in a process, and look for the one that ``key`` of case.yaml names."""
    code, lines = _execute([sys.executable, "-m", "accelmark.probe.evaluation", *arguments])
    if code != 0:
        places = [line for line in lines if line.startswith("File ")]
        why = f"not finished within {_TIMEOUT_S:g} s" if code is None else "; ".join([*places[-1:], lines[-1]])
        yield Check("missing", f"{what} fails on a synthetic batch", why)
        return
    names: list[str] = json.loads(lines[-1])
    if metric is not None and metric not in names:
        do = f"use one of its metrics ({nearest(metric, names)})"
        given = ", ".join(names) or "none"
        yield Check("missing", f"{key} is {metric!r}, which metrics() does not return: {given}", do)
    else:
        yield Check("good", f"{what} returns {', '.join(names)}")
