"""Check a vendor's or a case's folder: description, code, telemetry; with a trial, also training."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from accelmark.cli.checks.trial import Check, trial
from accelmark.datasets.spec import dataset_specs
from accelmark.plan.adaptation import adaptation_files
from accelmark.plan.serving import adapted_server, option_layer
from accelmark.plan.training import without_effect
from accelmark.spec.errors import AccelmarkError, RequestError, SpecError, nearest
from accelmark.spec.layers import Layer, resolve, resolve_as, resolve_inference
from accelmark.spec.model import read_yaml
from accelmark.spec.number_format import counted
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import (
    engine_files,
    engine_specs,
    find,
    folders,
    framework_device,
    hooks_file,
    known_engines,
    load_case,
    load_server,
    load_vendor,
)
from accelmark.spec.plugins.launcher import option_names
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.settings.serving import ServeCaseSpec, ServeSettings
from accelmark.telemetry.declaration import VendorTelemetry, telemetry_of
from accelmark.telemetry.sources import MODULE_FILE

_HEADINGS: Final = ("Model", "Data", "Target, and why", "Run", "Results", "Licence")
_READ: Final = (
    "config*.yaml", "infer*.yaml", "serve*.yaml", "environment_variables.sh", "requirements.txt", "extern", "csrc",
    "README.md",
)  # fmt: skip
"""Names in a vendor's folder for a case that have a meaning."""
_FILE: Final = "case.yaml"
_SETTINGS: Final = "train.settings."


def vendor_checks(name: str, *, run: bool = False) -> Iterator[Check]:
    """Check a vendor's folder; with ``run`` also read its devices on this machine and train on them.

    Each check is yielded when it is done; a training takes seconds, on a busy machine a minute.
    """
    folder = find("vendors", name).path
    described = _vendor_description(name, folder)
    yield from described
    if not run:
        what = "not tried: reading its devices, training on them"
        yield Check("advice", what, f"accelmark check vendor {name}")
    elif all(check.state != "missing" for check in described):
        yield from _vendor_trials(name, folder)


def _vendor_description(name: str, folder: Path) -> list[Check]:
    try:
        spec = load_vendor(name)
        telemetry = telemetry_of(spec, str(folder / "vendor.yaml"))
    except AccelmarkError as error:
        return [Check("missing", line, "correct this key") for line in str(error).splitlines()]
    devices = ", ".join(f"{framework} device {device.device_type!r}" for framework, device in spec.frameworks.items())
    checks = [Check("good", f"vendor.yaml describes {spec.title}: {devices}")]
    if not spec.frameworks:
        checks = [Check("missing", "vendor.yaml lists no framework", "declare the device under frameworks")]
    known = folders("frameworks")
    for framework in spec.frameworks.keys() - known.keys():
        checks.append(Check("missing", f"frameworks.{framework}: unknown framework", nearest(framework, known)))
    if spec.cannot_run is not None:
        checks = [Check("missing", "nothing can run on its chips", spec.cannot_run)]
    for chip in spec.chips:
        if any(peak is not None for peak in chip.peaks.model_dump().values()):
            checks.append(Check("good", f"chip {chip.title}: peaks from {chip.source}"))
        else:
            checks.append(Check("advice", f"chip {chip.name}: no peak rate", "MFU is null until a peak is added"))
    if not spec.chips:
        do = "add chips, each with its dense peak rates and their source; MFU is null until then"
        checks.append(Check("advice", "no chip is described", do))
    if spec.visible_devices_env is None and not spec.uses_host_cpu:
        do = "set visible_devices_env to the variable that limits the devices a process can use"
        checks.append(Check("missing", "a job cannot be limited to some devices", do))
    if _reads_devices(folder, telemetry):
        checks.append(Check("good", "has a telemetry source for its devices"))
    else:
        do = f"add telemetry.tool, telemetry.script, or {MODULE_FILE} with a class Source"
        state: Literal["missing", "advice"] = "advice" if spec.uses_host_cpu else "missing"
        checks.append(Check(state, "no telemetry source for utilisation, memory, temperature and power", do))
    if not (folder / "README.md").is_file():
        checks.append(Check("missing", "no README.md", "describe what runs, with which driver and framework version"))
    for adaptation in sorted(path for path in (folder / "cases").glob("*") if path.is_dir()):
        checks += _adaptation_checks(adaptation, spec)
    return [*checks, *_engine_checks(folder), *_server_checks(folder)]


def _reads_devices(folder: Path, telemetry: VendorTelemetry) -> bool:
    return bool(telemetry.tool or telemetry.script or (folder / MODULE_FILE).is_file())


def _vendor_trials(name: str, folder: Path) -> Iterator[Check]:
    """Read the vendor's devices on this machine, and train three steps of each adapted case on them."""
    from accelmark.telemetry.detect import detect

    reads = _reads_devices(folder, telemetry_of(load_vendor(name), str(folder / "vendor.yaml")))
    found = next(iter(detect([name])), None)
    if found is None:
        do = "repeat the check on a machine that has one, or correct telemetry.detect"
        yield Check("advice", "not tried: no device of this vendor on this machine", do)
        return
    if reads and found.problem is not None:
        yield Check("missing", f"cannot read its devices: {found.problem}", found.hint or "correct telemetry")
    elif reads:
        names = ", ".join(dict.fromkeys(device.name for device in found.devices)) or "none"
        yield Check("good", f"reads {counted(len(found.devices), 'device')} of this machine: {names}")
    adapted = [path.name.rpartition("-") for path in sorted((folder / "cases").glob("*")) if path.is_dir()]
    for model, _, framework in adapted:
        if load_case(model).train is not None and (find("cases", model).path / f"{framework}.py").is_file():
            yield from trial(model, name, framework, untried="advice")
    if not adapted:
        yield from trial("resnet_mini", name)


def _engine_checks(folder: Path) -> Iterator[Check]:
    """Check the syntax of a vendor's engines, which are not imported, and their declarations."""
    for name in sorted(engine_files(folder / "engines")):
        tree = _parsed(folder / "engines" / f"{name}.py", f"engines/{name}.py", "correct the file")
        if isinstance(tree, Check):
            yield tree
    yield from _problems("engines/engines.yaml", lambda: engine_specs(folder))


def _server_checks(folder: Path) -> Iterator[Check]:
    """Check what a vendor adds to servers, and the values of their options."""
    for file in sorted((folder / "servers").glob("*.yaml")):
        yield from _problems(f"servers/{file.name}", partial(_resolved_server, file.stem, folder))


def _resolved_server(name: str, folder: Path) -> object:
    find("servers", name, f"servers/{name}.yaml")
    server, layers = adapted_server(load_server(name), folder)
    base, declared = Layer(_FILE, {}), option_layer(server)
    return resolve_as(ServeSettings, base, layers, mutable=("server_options",), is_open=False, beneath=declared)


def _adaptation_checks(folder: Path, vendor: VendorSpec) -> Iterator[Check]:
    where = f"cases/{folder.name}"
    model, dash, framework = folder.name.rpartition("-")
    try:
        find("cases", model, where)
        case = load_case(model)
    except AccelmarkError as error:
        yield Check("missing", str(error), "name the folder <model>-<framework> after a case")
        return
    files = [find("cases", model).path / f"{side}{framework}.py" for side in ("", "infer_")]
    if not dash or not any(file.is_file() for file in files):
        yield Check("missing", f"{where}: {model} has no framework {framework!r}", "see 'accelmark cases'")
        return
    try:
        framework_device(vendor, framework)
    except AccelmarkError as error:
        what, _, do = str(error).partition("; ")
        yield Check("missing", f"{where}: {what}", do)
    for path in sorted(folder.iterdir()):
        # infer_*.yaml depend on which files apply beneath them
        if path.match("config*.yaml") or path.match("serve*.yaml") or path.name == "infer.yaml":
            yield from _settings_checks(path, f"{where}/{path.name}", case)
        elif not path.name.startswith("__") and not any(path.match(pattern) for pattern in _READ):
            yield Check("advice", f"{where}/{path.name} is not read", f"names that are: {', '.join(_READ)}")
    found = adaptation_files(folder)
    if found is not None and (folder / "csrc").is_dir() and not found.has_build:
        yield Check("missing", f"{where}/csrc cannot be built", "add a setup.py or pyproject.toml that pip can install")
    if (folder / "extern").is_dir() and hooks_file(framework) is None:
        yield Check("missing", f"{where}/extern: framework {framework} has no hooks to replace", "remove the folder")
    elif (folder / "extern").is_dir():
        yield from _extern_checks(folder / "extern" / "__init__.py", f"{where}/extern", framework)


def _settings_checks(file: Path, name: str, case: CaseSpec) -> Iterator[Check]:
    """Check a vendor's settings on the case alone: which of the vendor's other files apply depends on the device."""
    found: list[Check] = []

    def read() -> None:
        layer = Layer.of(name, read_yaml(file))
        if file.name.startswith("infer") and case.infer is not None:
            notes = resolve_inference(case.infer, "case.yaml", vendor=[layer], reserved=option_names()).notes
            for note in (note for note in notes if note.severity == "warning"):
                what = f"{name}: {note.key} {note.what}"
                found.append(Check("advice", what, "correct it, unless it is an option"))
        elif file.name.startswith("serve") and case.serve is not None:
            _resolved_serving(layer, case.serve)
        elif file.name.startswith("config") and case.train is not None:
            base = Layer.of("case.yaml", case.train.settings)
            resolve(base, [layer], mutable=case.train.mutable, is_open=False)
        if not found:
            found.append(Check("good", f"{name}: {counted(len(layer.values), 'setting')}, all mutable"))

    yield from _problems(name, read)
    yield from found


def _resolved_serving(layer: Layer, side: ServeCaseSpec) -> object:
    """Return the settings of serving; options of a server that the layer does not name are left out."""
    values, server = layer.values, layer.values.get("server")
    declared = None
    if isinstance(server, str):
        find("servers", server, layer.name)
        declared = option_layer(load_server(server))
    else:
        values = {key: value for key, value in values.items() if not key.startswith("server_options.")}
    base, over = Layer.of(_FILE, side.settings), [Layer(layer.name, values)]
    return resolve_as(ServeSettings, base, over, mutable=side.mutable, is_open=False, beneath=declared)


def _extern_checks(file: Path, where: str, framework: str) -> Iterator[Check]:
    extern = _class_in(file, f"{where}/__init__.py", "Extern", f"accelmark.frameworks.{framework}.hooks.Hooks")
    if isinstance(extern, Check):
        yield extern
        return
    allowed = allowed_hooks(framework)
    names = [node.name for node in extern.body if isinstance(node, ast.FunctionDef)]
    forbidden = [name for name in names if not name.startswith("_") and name not in allowed]
    for name in forbidden:
        yield Check("missing", f"{where} replaces {name!r}, which is not a hook", nearest(name, allowed))
    hooks = [name for name in names if name in allowed]
    if hooks or not forbidden:
        yield Check("good", f"{where} replaces {', '.join(hooks) or 'nothing'}")


def case_checks(name: str, *, run: bool) -> Iterator[Check]:
    """Check a case's folder; with ``run`` also train three steps on synthetic data. Yields as ``vendor_checks``."""
    described = _case_description(name, find("cases", name).path)
    yield from described
    if not run:
        what = "not tried: the imports and results of its code, its model's parameters, the metric of its target"
        yield Check("advice", what, f"accelmark check case {name}")
    elif all(check.state != "missing" for check in described) and load_case(name).train is not None:
        yield from trial(name, "cpu", evaluate=True)


def _case_description(name: str, folder: Path) -> list[Check]:
    try:
        case = load_case(name)
    except AccelmarkError as error:
        wrong = [Check("missing", line, "correct this key") for line in str(error).splitlines()]
        return [*wrong, *_checks_of_settings(folder / "case.yaml")]
    checks = [Check("good", f"case.yaml describes {case.title}, version {case.version}"), *_declaration_checks(case)]
    if case.train is not None and case.train.target is None and case.train.reference_loss is None:
        do = "add train.target (with why), or measure a loss curve: accelmark train NAME --write-reference"
        checks.append(Check("missing", "no criterion for correct training", do))
    if case.train is not None:
        frameworks = [framework for framework in folders("frameworks") if (folder / f"{framework}.py").is_file()]
        if not frameworks:
            do = f"add a file named after a framework: {', '.join(f'{found}.py' for found in folders('frameworks'))}"
            checks.append(Check("missing", "no implementation in any framework", do))
        for framework in frameworks:
            checks += _code_checks(folder / f"{framework}.py", framework)
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    absent = [heading for heading in _HEADINGS if f"## {heading}" not in text]
    if absent:
        checks.append(Check("advice", "README.md lacks headings", f"add ## {', ## '.join(absent)}"))
    return checks


def _declaration_checks(case: CaseSpec) -> Iterator[Check]:
    """Check what a plan checks: the settings of training and inference, and the sources of data sets."""
    train, infer = case.train, case.infer
    parts: list[tuple[str, Callable[[], object]]] = [("data.", lambda: dataset_specs(case.data, "case.yaml"))]
    if train is not None:
        parts.append((_SETTINGS, lambda: _resolved(train.settings)))
    if infer is not None:
        parts.append(("infer.", lambda: resolve_inference(infer, "case.yaml", reserved=option_names())))
    for prefix, read in parts:
        yield from _problems(_FILE, read, prefix)
    compiler = infer.configurations.get("compiler") if infer is not None else None
    engines = set().union(*(known_engines(vendor.path) for vendor in folders("vendors").values()))
    if compiler is not None and compiler not in engines:
        hint = nearest(str(compiler), engines)
        yield Check("missing", f"case.yaml: infer.configurations.compiler: unknown engine {compiler!r}", hint)


def _checks_of_settings(file: Path) -> Iterator[Check]:
    """Check the settings of training in a file whose other keys are wrong."""
    with contextlib.suppress(SpecError):
        train = read_yaml(file).get("train")
        settings = train.get("settings") if isinstance(train, dict) else None
        if isinstance(settings, dict):
            yield from _problems(_FILE, lambda: _resolved(settings), _SETTINGS)


def _resolved(settings: Mapping[str, Any]) -> object:
    """Return the settings of training; raise SpecError with those that are wrong or have no effect."""
    resolved = resolve(Layer.of(_FILE, settings), [], mutable=(), is_open=False)
    if unused := list(without_effect(resolved.provenance, (_FILE,))):
        raise SpecError(unused)
    return resolved


def _problems(file: str, read: Callable[[], object], prefix: str = "") -> Iterator[Check]:
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


def _code_checks(file: Path, framework: str) -> Iterator[Check]:
    found = _class_in(file, file.name, "Case", f"accelmark.frameworks.{framework}.case.TrainCase")
    if isinstance(found, Check):
        yield found
        return
    own = {node.name for node in ast.walk(found) if isinstance(node, ast.FunctionDef)}
    derived = [base for base in found.bases if not (isinstance(base, ast.Name) and base.id == "TrainCase")]
    absent = [] if derived else [method for method in required_methods(framework) if method not in own]
    for method in absent:
        yield Check("missing", f"{file.name}: class Case has no {method}()", "docs/case.md describes all methods")
    if not absent:
        yield Check("good", f"{file.name}: class Case has all required methods")


def _class_in(file: Path, where: str, name: str, base: str) -> ast.ClassDef | Check:
    """Return a class of a Python file without executing it, or the reason why there is none."""
    do = f"define class {name}({base})"
    tree = _parsed(file, where, do)
    if isinstance(tree, Check):
        return tree
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return classes[0] if classes else Check("missing", f"{where} has no class {name}", do)


def _parsed(file: Path, where: str, do: str) -> ast.Module | Check:
    """Return the syntax tree of a Python file, or the reason why there is none."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except OSError:
        return Check("missing", f"no {where}", do)
    except SyntaxError as error:
        return Check("missing", f"{where}:{error.lineno}: {error.msg}", "correct the file")


def allowed_hooks(framework: str) -> tuple[str, ...]:
    """Return ``ALLOWED_HOOKS`` of a framework's ``hooks.py``, or nothing, without importing the framework."""
    file = hooks_file(framework)
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file is not None else ():
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ALLOWED_HOOKS" and node.value is not None:
            return tuple(ast.literal_eval(node.value))
    return ()


def required_methods(framework: str) -> tuple[str, ...]:
    """Return the abstract methods of ``TrainCase`` in a framework's ``case.py`` without importing the framework."""
    contract = _class_in(find("frameworks", framework).path / "case.py", f"{framework}/case.py", "TrainCase", "ABC")
    nodes = [] if isinstance(contract, Check) else contract.body
    return tuple(
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef) and "abstractmethod" in map(ast.unparse, node.decorator_list)
    )
