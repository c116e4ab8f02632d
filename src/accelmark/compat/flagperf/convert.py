"""Convert FlagPerf's files into a cluster file, a run file and settings of a case, and list what has no equivalent."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from accelmark.compat.flagperf.coverage import equivalent
from accelmark.compat.flagperf.parse import TABLES, Given, Values, parse_file, text
from accelmark.compat.flagperf.site import Entry, add_settings, cluster_of, converted_key, entries_of
from accelmark.compat.flagperf.training import (
    Config,
    case_of,
    case_of_folder,
    inference_settings,
    inference_value,
    is_inference,
    settings_of,
    value_of,
)
from accelmark.plan.build import build_plan
from accelmark.plan.request import Detected
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import AccelmarkError, Problem, SpecError
from accelmark.spec.layers import Layer, nest, resolve, resolve_inference
from accelmark.spec.model import parse, read_text
from accelmark.spec.plugins.catalog import allowed_hooks, folders, hooks_file, load_case
from accelmark.spec.plugins.launcher import parse_cluster
from accelmark.spec.runfile import RunSpec
from accelmark.spec.settings.inference import InferSettings

_LEAST: Final = Layer("", {"batch_size": 1, "end.max_steps": 1})
"""Required settings of a case: with them a layer can be checked alone."""
_FIXED: Final = "the case fixes settings that were left out; with --open they are imported, and the result is OPEN"


@final
@dataclass(slots=True)
class Converted:
    """The converted files."""

    cluster: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    configs: dict[str, Values] = field(default_factory=dict)
    """File name (``config.yaml``, ``config_<HW>x<nnodes>x<nproc>.yaml``, ``infer.yaml``) -> settings of a case that is
    no key of the run file."""
    left_over: list[Problem] = field(default_factory=list)
    """Settings that were not converted or changed, each with the reason."""


def convert(paths: Iterable[Path], *, is_open: bool = False) -> Converted:
    """Convert FlagPerf's files to one cluster file and one run file.

    Settings of cases become those of the keys that they apply to, as far as a run accepts them; ``is_open``: also those
    that a case fixes. Raises SpecError if a file cannot be read, the cluster is invalid, or two files give the same
    output file.
    """
    result = Converted()
    given: dict[str, Given] = {}
    cases: list[Given] = []
    inference: dict[str, list[Given]] = {}
    configs: list[Config] = []
    for path in dict.fromkeys(paths):
        if is_inference(path):
            parsed = parse_file(path)
            inference.setdefault(case_of(path), []).extend(parsed.settings())
        elif path.stem.startswith("config_"):
            if (config := Config.read(path)) is not None:
                configs.append(config)
            else:
                what = "is named neither config_<HW>x<nnodes>x<nproc> nor config_common: its scale is unknown"
                result.left_over.append(Problem(str(path), "", what))
            continue
        else:
            parsed = parse_file(path)
            add_settings(parsed, given, cases, result.left_over)
        result.left_over += [Problem(parsed.file, key, why) for key, why in parsed.skipped.items()]
        result.left_over += [
            Problem(parsed.file, line, f"takes everything from {module}, which is not read")
            for line, module in parsed.taken_whole.items()
        ]
    result.cluster = cluster_of(given, result.left_over)
    conversion = Conversion(result, parse_cluster(result.cluster, "the cluster in these files"), is_open=is_open)
    conversion.entries = entries_of(cases, conversion.cluster, result.left_over)
    conversion.take_configs(configs)
    conversion.take_inference(inference)
    conversion.finish(given)
    result.left_over = list(dict.fromkeys(result.left_over))
    return result


@final
@dataclass(slots=True)
class Conversion:
    """Settings of cases on their way to the keys of a run file."""

    result: Converted
    cluster: ClusterSpec
    is_open: bool
    entries: list[Entry] = field(default_factory=list)

    def take_configs(self, configs: Sequence[Config]) -> None:
        """Give the settings of training configurations to the keys that they apply to, the common ones first."""
        commons = {config.case for config in configs if config.scale is None}
        files: dict[str, str] = {}
        for config in sorted(configs, key=lambda config: config.scale is not None):
            self.result.left_over += config.unread(with_common=bool({config.case, None} & commons))
            file, trained = config.parsed.file, [entry for entry in self.entries if entry.task == "train"]
            applied = [entry for entry in trained if config.applies(entry.written)]
            if config.case is None and len({entry.written.split(":")[0] for entry in applied}) > 1:
                names = ", ".join(entry.written for entry in applied)
                what = f"may be for {names}: import it from a folder <model>-<framework>"
                self.result.left_over.append(Problem(file, "", what))
                continue
            for entry in applied:
                entry.settings |= settings_of(config.parsed, entry.case, self.result.left_over)
            if applied:
                continue
            if files.setdefault(config.name, file) != file:
                what = f"would become {config.name}, as {files[config.name]} does"
                raise SpecError([Problem(file, "", what, "import one at a time, each with an --out of its own")])
            if values := self.config_alone(config):
                self.result.configs[config.name] = values

    def config_alone(self, config: Config) -> Values:
        """Return the settings of a configuration that no key of ``CASES`` uses, for a vendor's folder of the case."""
        key: str | None = None
        needed: Mapping[str, Any] = {}
        if config.case is not None:
            written = ":".join((*config.case, *(config.scale or ())))
            key, needed, _ = converted_key(written, "train", self.cluster)
        case = key.partition(":")[0] if key is not None else None
        taken = settings_of(config.parsed, case, self.result.left_over)
        values = {dotted: value_of(item) for dotted, item in taken.items()}
        if key is not None:
            return nest(self.accepted({"key": key}, needed, values, taken, Given(config.parsed.file, "", None)) or {})
        try:
            resolve(_LEAST, [Layer(config.parsed.file, values)], mutable=(), is_open=True)
        except SpecError as error:
            for dotted, problem in {problem.key: problem for problem in error.problems if problem.key in taken}.items():
                del values[dotted]
                self.result.left_over.append(taken[dotted].left(f"does not fit {dotted}: {problem.what}"))
        what = "which case it is for is not known: that its settings may change was not checked"
        self.result.left_over.append(Problem(config.parsed.file, "", what, "import it with test_conf.py"))
        return nest(values)

    def take_inference(self, inference: Mapping[str, Sequence[Given]]) -> None:
        """Give the settings of inference cases to their keys; without keys, to ``infer.yaml``."""
        inferred = [entry for entry in self.entries if entry.task == "infer"]
        alone: dict[str, Values] = {}
        for name, items in inference.items():
            case = name if name in folders("cases") or len(inferred) != 1 else inferred[0].case
            taken = inference_settings(items, case, self.result.left_over)
            applied = [entry for entry in inferred if entry.case == case]
            for entry in applied:
                for key, item in taken.items():
                    entry.settings[key if key in InferSettings.model_fields else f"engine_options.{key}"] = item
            if taken and not applied:
                made = {setting: inference_value(item) for setting, item in taken.items()}
                side = load_case(case).infer
                try:
                    if side is not None:
                        resolve_inference(side, case, vendor=[Layer.of("infer.yaml", made)] if made else [])
                except SpecError as error:
                    for setting, problem in {p.key: p for p in error.problems if p.key in made}.items():
                        del made[setting]
                        self.result.left_over.append(taken[setting].left(problem.what))
                alone[case] = made
        if len(alone) > 1:
            what = f"are of several cases, {', '.join(alone)}: import one case at a time, each with an --out of its own"
            raise SpecError([Problem("infer.yaml", "", what)])
        for layer in filter(None, alone.values()):
            self.result.configs["infer.yaml"] = layer

    def finish(self, given: Mapping[str, Given]) -> None:
        """Write the run file with the keys and settings that a run accepts."""
        cases: list[Values] = []
        for entry in self.entries:
            value = inference_value if entry.task == "infer" else value_of
            settings = self.accepted(
                entry.values(), entry.needed, {key: value(item) for key, item in entry.settings.items()},
                entry.settings, Given(entry.origin.file, entry.origin.key, entry.written),
            )  # fmt: skip
            if settings is None:
                continue
            cases.append({**entry.values(), **({"settings": settings} if settings else {})})
            if entry.differs:
                named = "" if entry.written == entry.key else f"becomes {entry.key}: "
                self.result.left_over.append(entry.left(f"{named}{entry.differs}"))
        if not cases:
            return
        level, runs = given.get("FLAGPERF_LOG_LEVEL"), given.get("FLAGPERF_LOG_PATH")
        options: Values = {"log_level": level.read(text).lower()} if level is not None else {}
        options |= {"runs": runs.read(text)} if runs is not None else {}
        self.result.run = {**options, **({"open": True} if self.is_open else {}), "cases": cases}
        parse(RunSpec, self.result.run, "the run of FlagPerf's files")

    def accepted(
        self, case: Values, needed: Mapping[str, Any], values: Values, taken: Mapping[str, Given], origin: Given
    ) -> Values | None:
        """Return the settings of a key that a run accepts, None where it refuses the key; list the others."""
        checked_case = checked({**case, "settings": {**values, **needed}}, self.cluster, is_open=self.is_open)
        named = f"{origin.value}: " if origin.value else ""
        if checked_case.settings is None or not needed.keys() <= checked_case.settings.keys():
            reasons = (problem for problem in checked_case.refused if problem.key not in values)
            why = "; ".join(problem.what + (f" ({problem.hint})" if problem.hint else "") for problem in reasons)
            self.result.left_over.append(origin.left(f"{named}a run would refuse {case['key']}: {why}"))
            return None
        for problem in checked_case.refused:
            item = taken[problem.key]
            hint = f" ({problem.hint})" if problem.hint and problem.key not in checked_case.fixed else ""
            self.result.left_over.append(item.left(f"{problem.key}: {problem.what}{hint}"))
        if checked_case.fixed:
            self.result.left_over.append(Problem(RUN_FILE, case["key"], _FIXED))
        return dict(checked_case.settings)


RUN_FILE: Final = "run.yaml"


class Checked(NamedTuple):
    """Result of :func:`checked`."""

    settings: Mapping[str, Any] | None
    """The settings that a run accepts; None where it refuses the key."""
    refused: Sequence[Problem]
    """Refused settings by their dotted keys; where the key is refused, the reasons last."""
    fixed: frozenset[str]
    """Those of the refused settings that only an open run may change."""


def checked(case: Mapping[str, Any], cluster: ClusterSpec, *, is_open: bool) -> Checked:
    """Plan an entry of ``cases`` in a run file, without data and devices, and take out the settings that are refused.

    Settings are dotted.
    """
    settings = dict(case.get("settings", {}))
    refused: list[Problem] = []
    fixed: set[str] = set()
    while problems := _problems(case, settings, cluster, is_open=is_open):
        named = [problem for problem in problems if problem.where == RUN_FILE]
        refused_now = {problem.key: problem for problem in named if problem.key in settings} or {
            key: problem for problem in named for key in settings if problem.key and key.startswith(f"{problem.key}.")
        }
        if not refused_now:
            return Checked(None, [*refused, *problems], frozenset(fixed))
        if not is_open:
            kept = {problem.key for problem in _problems(case, settings, cluster, is_open=True)}
            fixed |= refused_now.keys() - kept
        refused += [Problem(problem.where, key, problem.what, problem.hint) for key, problem in refused_now.items()]
        settings = {key: value for key, value in settings.items() if key not in refused_now}
    return Checked(settings, refused, frozenset(fixed))


def _problems(
    case: Mapping[str, Any], settings: Mapping[str, Any], cluster: ClusterSpec, *, is_open: bool
) -> Sequence[Problem]:
    vendor = cluster.vendor or "cpu"
    unknown = Detected(vendor=vendor, hardware="any", chip=None, num_devices=None, is_present=False)
    try:
        build_plan(
            parse(RunSpec, {"cases": [{**case, "settings": settings}], "vendor": vendor, "open": is_open}, RUN_FILE),
            cluster=cluster,
            detected=unknown,
            data_dirs=lambda *_: {},
            created_at="",
            where=RUN_FILE,
            allow_missing_data=True,
        )
    except SpecError as error:
        return error.problems
    except AccelmarkError as error:
        return [Problem(RUN_FILE, "", str(error))]
    return ()


_COPIED: Final = ("environment_variables.sh", "requirements.txt")
"""Files of ``config/`` that have the same meaning here."""
_MOST_HOSTS: Final = 64
"""Hosts of the largest configuration that is accepted: which ones it is for is not known here."""
_PORT: Final = "port"
"""Folder of files that a person has to port."""
_IMAGES: Final = "docker_image"


def is_tree(path: Path) -> bool:
    """Return whether a directory is that of a vendor in FlagPerf: it has ``<model>-<framework>/config/``."""
    return path.is_dir() and any(case_of_folder(folder) for folder in path.glob("*-*/config"))


def convert_tree(path: Path, vendor: str, *, is_open: bool = False) -> tuple[dict[str, str], Converted]:
    """Return the files of the folder of ``vendor``, and its configurations with what was not converted.

    A vendor that AccelMark does not ship also gets a ``vendor.yaml`` to complete. Raises SpecError if a file cannot be
    read or parsed.
    """
    result = Converted()
    vendor = TABLES["vendors"].get(vendor, vendor)
    hosts = tuple(HostSpec(address=f"host{number}") for number in range(_MOST_HOSTS))
    cluster = ClusterSpec(vendor=vendor if vendor in folders("vendors") else None, launcher="ssh", hosts=hosts)
    conversion = Conversion(result, cluster, is_open=is_open)
    texts: dict[str, str] = {}
    for folder in sorted(path.glob("*-*/")):
        if (case := case_of_folder(folder)) is None:
            result.left_over.append(Problem(str(folder), "", "FlagPerf has no model of that name"))
            continue
        key, _, notes = converted_key(":".join(case), "train", cluster)
        model, framework = key.split(":")
        if model not in folders("cases"):
            known = equivalent(case[0], "train")
            what = f"no case carries it: {known.note}" if known is not None else "AccelMark has no such case"
            result.left_over.append(Problem(str(folder), "", what))
            continue
        result.left_over += [Problem(str(folder), "", note) for note in notes if note]
        place = f"cases/{model}-{framework}"
        for file in sorted((folder / "config").glob("*.py")):
            if (config := Config.read(file)) is not None:
                result.left_over += config.unread(with_common=(folder / "config" / "config_common.py").is_file())
                if values := conversion.config_alone(config):
                    result.configs[f"{place}/config/{config.name}"] = values
        for name in _COPIED:
            texts |= _copied(folder / "config" / name, f"{place}/config/{name}", result)
        texts |= _copied(folder / "csrc", f"{place}/csrc", result)
        texts |= _copied(folder / "README.md", f"{place}/README.md", result)
        for name, content in _copied(folder / "extern", f"{place}/{_PORT}", result).items():
            texts[name] = content
            result.left_over.append(Problem(f"{folder.name}/extern", Path(name).name, _to_port(content, framework)))
    for folder in sorted((path / _IMAGES).glob("*/")):
        texts |= _copied(folder, f"images/{folder.name}", result)
    texts |= _copied(path / "README.md", "README.md", result)
    monitor = next(path.glob("*_monitor.py"), None)
    if monitor is not None:
        texts[monitor.name] = read_text(monitor)
    if cluster.vendor is None:
        texts["vendor.yaml"] = _vendor_yaml(vendor, monitor, result)
    elif monitor is not None:
        what = f"vendor {vendor} has telemetry of its own; this file is not read"
        result.left_over.append(Problem(str(monitor), "", what))
    return texts, result


def _vendor_yaml(name: str, monitor: Path | None, result: Converted) -> str:
    script = f"  script: {{file: {monitor.name}}}\n" if monitor is not None else ""
    what = "add its chips with peak rates and sources, the device type and collectives of each framework, and detection"
    result.left_over.append(Problem("vendor.yaml", "", what))
    return (
        f"name: {name}\ntitle: {name}\nframeworks:\n  pytorch: {{device_type: cpu, collective_backend: gloo}}\n"
        f"visible_devices_env: null\ntelemetry:\n  detect: {{always: true}}\n{script}chips: []\n"
    )


def _copied(source: Path, target: str, result: Converted) -> dict[str, str]:
    """Return the text files at or below ``source`` by their names below ``target``; list binary files."""
    texts: dict[str, str] = {}
    for file in [source] if source.is_file() else sorted(source.rglob("*")):
        if not file.is_file() or "__pycache__" in file.parts or file.name.startswith("."):
            continue
        name = target if file == source else f"{target}/{file.relative_to(source).as_posix()}"
        try:
            texts[name] = read_text(file)
        except SpecError as error:
            result.left_over += error.problems
    return texts


def _to_port(text: str, framework: str) -> str:
    """Return which hooks the functions of an ``extern`` file map to."""
    if hooks_file(framework) is None:
        return f"framework {framework} has no hooks to replace"
    try:
        names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        return "is not valid Python 3"
    hooks = [name for name in names if name in allowed_hooks(framework)]
    if not hooks:
        return "has no function with the name of a hook; it is needed only where a hook uses it"
    methods = ", ".join(hooks)
    return f"port it by hand to methods of class Extern in extern/__init__.py: {methods}"
