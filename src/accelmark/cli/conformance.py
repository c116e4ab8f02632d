"""The conformance suite of folders: each promise checked, each gap told with what to do about it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from accelmark.cli.check_line import Check
from accelmark.cli.trial import trial
from accelmark.plan.adaptation import adaptation_files
from accelmark.spec.catalog import find, load_case, load_vendor
from accelmark.spec.errors import AccelmarkError, nearest
from accelmark.spec.layers import flatten, may_change, setting_defaults
from accelmark.spec.settings import TrainSettings
from accelmark.spec.yaml_file import read_yaml
from accelmark.telemetry.declaration import telemetry_of
from accelmark.telemetry.sources import MODULE_FILE

HOOKS: Final = (
    "convert_model", "create_optimizer", "model_to_fp16", "model_to_ddp", "create_grad_scaler", "backward",
    "train_step",
)  # fmt: skip
_CASE_METHODS: Final = (
    "build_model", "train_batches", "eval_batches", "synthetic_batch", "loss", "eval_sums", "metrics",
    "flops_per_sample",
)  # fmt: skip
_HEADINGS: Final = ("Model", "Data", "Target, and why", "Run", "Results", "Licence")


def vendor_checks(name: str, *, run: bool = False) -> list[Check]:
    """Return what holds of a vendor's folder, and what is missing; with ``run`` it is tried on the devices here."""
    folder = find("vendors", name).path
    try:
        spec = load_vendor(name)
        telemetry = telemetry_of(spec, str(folder / "vendor.yaml"))
    except AccelmarkError as error:
        return [Check("missing", line, "correct the key that is named") for line in str(error).splitlines()]
    devices = ", ".join(f"{framework}'s {device.device_type!r}" for framework, device in spec.frameworks.items())
    checks = [Check("good", f"vendor.yaml describes {spec.title} as {devices}")]
    if not spec.frameworks:
        checks = [Check("missing", "vendor.yaml lists no framework", "declare the device under frameworks")]
    if spec.cannot_run is not None:
        checks = [Check("missing", "nothing can run on its chips", spec.cannot_run)]
    for chip in spec.chips:
        if any(peak is not None for peak in chip.peaks.model_dump().values()):
            checks.append(Check("good", f"chip {chip.name} {chip.variant}".strip() + f": peaks from {chip.source}"))
        else:
            checks.append(Check("advice", f"chip {chip.name}: no peak is stated", "MFU stays null until one is"))
    if not spec.chips:
        do = "list them under chips, each with its dense peaks and their source; MFU is null until then"
        checks.append(Check("advice", "no chip is described", do))
    if spec.visible_devices_env is None and not spec.uses_host_cpu:
        do = "set visible_devices_env to the variable that narrows the devices a process sees"
        checks.append(Check("missing", "a job cannot be given some of the cards", do))
    reads = bool(telemetry.tool or telemetry.script or (folder / MODULE_FILE).is_file())
    if reads:
        checks.append(Check("good", "its devices can be read for telemetry"))
    else:
        do = f"give telemetry.tool (a rule over your tool), telemetry.script, or {MODULE_FILE} with a class Source"
        state: Literal["missing", "advice"] = "advice" if spec.uses_host_cpu else "missing"
        checks.append(Check(state, "utilisation, memory, temperature and power of its devices cannot be read", do))
    if not (folder / "README.md").is_file():
        checks.append(Check("missing", "there is no README.md", "say what runs, with which driver and framework"))
    for adaptation in sorted(path for path in (folder / "cases").glob("*") if path.is_dir()):
        checks += _adaptation_checks(adaptation)
    if run and all(check.state != "missing" for check in checks):
        checks += _vendor_trials(name, folder, reads=reads)
    return checks


def _vendor_trials(name: str, folder: Path, *, reads: bool) -> Iterator[Check]:
    """Read the devices that are here, and train three steps of each adapted case on them."""
    from accelmark.telemetry.detect import detect

    found = next(iter(detect([name])), None)
    if found is None:
        do = "run this again on a machine that has some, or correct telemetry.detect"
        yield Check("advice", "nothing was tried: no device of it is here", do)
        return
    if not reads:
        pass  # that is told already
    elif found.problem is not None:
        yield Check("missing", f"its devices cannot be read: {found.problem}", found.hint or "correct telemetry")
    else:
        names = ", ".join(dict.fromkeys(device.name for device in found.devices)) or "none"
        yield Check("good", f"{len(found.devices)} device(s) here can be read: {names}")
    adapted = [path.name.rpartition("-")[0] for path in sorted((folder / "cases").glob("*")) if path.is_dir()]
    for model in adapted or ["resnet_mini"]:
        if load_case(model).train is not None:
            yield from trial(model, name)


def _adaptation_checks(folder: Path) -> Iterator[Check]:
    where = f"cases/{folder.name}"
    model, dash, framework = folder.name.rpartition("-")
    try:
        case = load_case(model)
    except AccelmarkError as error:
        yield Check("missing", f"{where}: {error}", "name the folder <model>-<framework> after a case")
        return
    if not dash or not (find("cases", model).path / f"{framework}.py").is_file():
        yield Check("missing", f"{where}: {model} has no framework {framework!r}", "see 'accelmark cases'")
        return
    train = case.train
    for file in sorted(folder.glob("config*.yaml")):
        try:
            values = flatten(read_yaml(file))
        except AccelmarkError as error:
            yield Check("missing", f"{where}: {error}", "correct it")
            continue
        known = {*setting_defaults(TrainSettings), *flatten(train.settings)} if train else set()
        unknown = [key for key in values if key not in known]
        fixed = [key for key in values if train and key in known and not may_change(key, train.mutable)]
        for key in unknown:
            yield Check("missing", f"{where}/{file.name}: unknown setting {key}", nearest(key, known))
        for key in fixed:
            do = "remove it, or run with --open, which marks the result for ever"
            yield Check("missing", f"{where}/{file.name}: the case fixes {key}", do)
        if not unknown and not fixed:
            yield Check("good", f"{where}/{file.name}: {len(values)} settings, all of them mutable")
    found = adaptation_files(folder)
    if found is not None and (folder / "csrc").is_dir() and not found.has_build:
        yield Check("missing", f"{where}/csrc cannot be built", "add a setup.py or pyproject.toml that pip can install")
    yield from _extern_checks(folder / "extern", where)


def _extern_checks(extern: Path, where: str) -> Iterator[Check]:
    if not extern.is_dir():
        return
    file = extern / "__init__.py"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except OSError:
        yield Check(
            "missing",
            f"{where}/extern has no __init__.py",
            "define class Extern(accelmark.frameworks.pytorch.hooks.Hooks)",
        )
        return
    except SyntaxError as error:
        yield Check("missing", f"{where}/extern/__init__.py:{error.lineno}: {error.msg}", "correct it")
        return
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Extern"]
    if not classes:
        do = "define class Extern(accelmark.frameworks.pytorch.hooks.Hooks)"
        yield Check("missing", f"{where}/extern/__init__.py has no class Extern", do)
        return
    names = [node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)]
    forbidden = [name for name in names if not name.startswith("_") and name not in HOOKS]
    for name in forbidden:
        yield Check("missing", f"{where}/extern replaces {name!r}, which is no hook", nearest(name, HOOKS))
    hooks = [name for name in names if name in HOOKS]
    if hooks or not forbidden:
        yield Check("good", f"{where}/extern replaces {', '.join(hooks) or 'nothing'}")


def case_checks(name: str, *, run: bool) -> list[Check]:
    """Return what holds of a case's folder, and what is missing; with ``run`` it trains a few steps."""
    folder = find("cases", name).path
    try:
        case = load_case(name)
    except AccelmarkError as error:
        return [Check("missing", line, "correct the key that is named") for line in str(error).splitlines()]
    checks = [Check("good", f"case.yaml describes {case.title}, version {case.version}")]
    if case.train is not None and case.train.target is None and case.train.reference_loss is None:
        do = "give train.target (with why) or train.reference_loss, so that a wrong implementation is found"
        checks.append(Check("missing", "nothing tells whether training was right", do))
    if case.train is not None:
        checks += _code_checks(folder / "pytorch.py")
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    lacking = [heading for heading in _HEADINGS if f"## {heading}" not in text]
    if lacking:
        checks.append(Check("advice", "README.md lacks headings", f"add ## {', ## '.join(lacking)}"))
    if run and case.train is not None and all(check.state != "missing" for check in checks):
        checks += trial(name, "cpu", evaluate=True)
    return checks


def _code_checks(file: Path) -> Iterator[Check]:
    if not file.is_file():
        yield Check(
            "missing",
            f"there is no {file.name}",
            "define class Case(accelmark.frameworks.pytorch.case.TrainCase) there",
        )
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        yield Check("missing", f"{file.name}:{error.lineno}: {error.msg}", "correct it")
        return
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Case"]
    if not classes:
        yield Check(
            "missing",
            f"{file.name} has no class Case",
            "define class Case(accelmark.frameworks.pytorch.case.TrainCase)",
        )
        return
    own = {node.name for node in ast.walk(classes[0]) if isinstance(node, ast.FunctionDef)}
    derived = [base for base in classes[0].bases if not (isinstance(base, ast.Name) and base.id == "TrainCase")]
    lacking = [] if derived else [method for method in _CASE_METHODS if method not in own]
    for method in lacking:
        yield Check("missing", f"class Case has no {method}()", "docs/case.md shows all methods there are to write")
    if not lacking:
        yield Check("good", f"{file.name}: class Case has every method")
