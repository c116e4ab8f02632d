"""Convert FlagPerf's files into a cluster file, a run file and settings of a case, and list what has no equivalent."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from accelmark.compat.flagperf import settings as flagperf
from accelmark.compat.flagperf.parse import TABLES, Given, Values, equivalent, parse_file
from accelmark.plan.build import build_plan
from accelmark.plan.request import Detected
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import AccelmarkError, Problem, SpecError
from accelmark.spec.layers import Layer, nest, resolve_inference
from accelmark.spec.model import parse, read_text
from accelmark.spec.plugins import catalog
from accelmark.spec.plugins.catalog import folders, load_case
from accelmark.spec.plugins.launcher import parse_cluster
from accelmark.spec.runfile import RunSpec
from accelmark.spec.settings.inference import InferSettings

RUN_FILE: Final = "run.yaml"


@dataclass(slots=True)
class Converted:
    """The converted files, and the settings of cases on their way to them."""

    is_open: bool
    spec: ClusterSpec = field(default_factory=ClusterSpec)
    """What the keys are planned for."""
    entries: list[flagperf.Entry] = field(default_factory=list)
    cluster: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    configs: dict[str, Values] = field(default_factory=dict)
    """File name (``config.yaml``, ``config_<HW>x<nnodes>x<nproc>.yaml``, ``infer.yaml``) -> settings of a case that is
    no key of the run file."""
    left_over: list[Problem] = field(default_factory=list)
    """Settings that were not converted or changed, each with the reason."""

    def take_configs(self, configs: Sequence[flagperf.Config]) -> None:
        """Give the settings of training configurations to the keys that they apply to, the common ones first."""
        commons = {config.case for config in configs if config.scale is None}
        files: dict[str, str] = {}
        for config in sorted(configs, key=lambda config: config.scale is not None):
            has_common = not commons.isdisjoint((config.case, None))
            self.left_over += config.parsed.unread(*([flagperf.COMMON_CONFIG] if has_common else []))
            file, trained = config.parsed.file, [entry for entry in self.entries if entry.task == "train"]
            applied = [entry for entry in trained if config.applies(entry.written)]
            if config.case is None and len({entry.written.split(":")[0] for entry in applied}) > 1:
                names = ", ".join(entry.written for entry in applied)
                what = f"may be for {names}: import it from a folder <model>-<framework>"
                self.left_over.append(Problem(file, "", what))
                continue
            for entry in applied:
                entry.settings |= flagperf.settings_of(config.parsed, entry.case, self.left_over)
            if applied:
                continue
            if files.setdefault(config.name, file) != file:
                what = f"would become {config.name}, as {files[config.name]} does"
                raise SpecError([Problem(file, "", what, "import one at a time, each with an --out of its own")])
            if values := self.config_alone(config):
                self.configs[config.name] = values

    def config_alone(self, config: flagperf.Config) -> Values:
        """Return the settings of a configuration that no key of ``CASES`` uses, for a vendor's folder of the case."""
        if config.case is None:
            taken = flagperf.settings_of(config.parsed, None, self.left_over)
            what = "which case it is for is not known: its settings were not checked"
            self.left_over.append(Problem(config.parsed.file, "", what, "import it with test_conf.py"))
            return nest({dotted: item.value for dotted, item in taken.items()})
        written = ":".join((*config.case, *(config.scale or ())))
        key, needed, _ = flagperf.converted_key(written, "train", self.spec)
        taken = flagperf.settings_of(config.parsed, key.partition(":")[0], self.left_over)
        return nest(self.accepted({"key": key}, needed, taken, Given(config.parsed.file, "", None)) or {})

    def take_inference(self, inference: Mapping[str, Sequence[Given]]) -> None:
        """Give the settings of inference cases to their keys; without keys, to ``infer.yaml``."""
        inferred = [entry for entry in self.entries if entry.task == "infer"]
        alone: dict[str, Values] = {}
        for name, items in inference.items():
            case = name if name in folders("cases") or len(inferred) != 1 else inferred[0].case
            taken = flagperf.inference_settings(items, case, self.left_over)
            applied = [entry for entry in inferred if entry.case == case]
            for entry in applied:
                for key, item in taken.items():
                    entry.settings[key if key in InferSettings.model_fields else f"engine_options.{key}"] = item
            if taken and not applied:
                made = {setting: item.value for setting, item in taken.items()}
                side = load_case(case).infer
                assert side is not None  # noqa: S101 - inference_settings returns none without it
                try:
                    resolve_inference(side, case, vendor=[Layer.of("infer.yaml", made)])
                except SpecError as error:
                    for problem in error.problems:
                        if made.pop(problem.key, None) is not None:
                            self.left_over.append(taken[problem.key].left(problem.what))
                alone[case] = made
        if len(alone) > 1:
            what = f"are of several cases, {', '.join(alone)}: import one case at a time, each with an --out of its own"
            raise SpecError([Problem("infer.yaml", "", what)])
        for layer in filter(None, alone.values()):
            self.configs["infer.yaml"] = layer

    def run_cases(self) -> list[Values]:
        """Return the keys of the run file with the settings that a run accepts."""
        cases: list[Values] = []
        for entry in self.entries:
            origin = entry.origin._replace(value=entry.written)
            settings = self.accepted(entry.values(), entry.needed, entry.settings, origin)
            if settings is None:
                continue
            cases.append({**entry.values(), **({"settings": settings} if settings else {})})
            if entry.differs:
                named = "" if entry.written == entry.key else f"becomes {entry.key}: "
                self.left_over.append(entry.left(f"{named}{entry.differs}"))
        return cases

    def accepted(
        self, case: Values, needed: Mapping[str, Any], taken: Mapping[str, Given], origin: Given
    ) -> Values | None:
        """Return the settings of a key that a run accepts, None where it refuses the key; list the others."""
        settings, left = {key: item.value for key, item in taken.items()} | dict(needed), []
        while problems := self._problems({**case, "settings": settings}):
            refused = {
                key: problem
                for problem in problems
                for key in settings
                if problem.where == RUN_FILE and problem.key and f"{key}.".startswith(f"{problem.key}.")
            }
            if not refused or refused.keys() & needed:
                why = "; ".join(_reason(problem) for problem in problems if problem.key not in taken)
                named = f"{origin.value}: " if origin.value else ""
                self.left_over.append(origin.left(f"{named}a run would refuse {case['key']}: {why}"))
                return None
            left += [taken[key].left(f"{key}: {_reason(problem)}") for key, problem in refused.items()]
            settings = {key: value for key, value in settings.items() if key not in refused}
        self.left_over += left
        return settings

    def _problems(self, case: Values) -> Sequence[Problem]:
        """Plan an entry of ``cases`` in a run file, with dotted settings, without data and devices."""
        vendor = self.spec.vendor or "cpu"
        request = {"cases": [case], "vendor": vendor, "open": self.is_open}
        try:
            build_plan(
                parse(RunSpec, request, RUN_FILE),
                cluster=self.spec,
                detected=Detected(vendor=vendor, hardware="any", chip=None, num_devices=None, is_present=False),
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


def convert(paths: Iterable[Path], *, is_open: bool = False) -> Converted:
    """Convert FlagPerf's files to one cluster file and one run file; raises SpecError: one of them is invalid.

    Settings of cases become those of the keys that they apply to, as far as a run accepts them; ``is_open``: also those
    that a case fixes.
    """
    result = Converted(is_open)
    given: dict[str, Given] = {}
    cases: list[Given] = []
    inference: dict[str, list[Given]] = {}
    configs: list[flagperf.Config] = []
    for path in dict.fromkeys(paths):
        if path.stem.startswith("config_"):
            if (config := flagperf.Config.read(path)) is not None:
                configs.append(config)
            else:
                what = "is named neither config_<HW>x<nnodes>x<nproc> nor config_common: its scale is unknown"
                result.left_over.append(Problem(str(path), "", what))
            continue
        parsed = parse_file(path)
        result.left_over += parsed.unread()
        if flagperf.is_inference(path):
            inference.setdefault(flagperf.case_of(path), []).extend(parsed.settings())
        else:
            flagperf.add_settings(parsed, given, cases, result.left_over)
    result.cluster = flagperf.cluster_of(given, result.left_over)
    result.spec = parse_cluster(result.cluster, "the cluster in these files")
    result.entries = flagperf.entries_of(cases, result.spec, result.left_over)
    result.take_configs(configs)
    result.take_inference(inference)
    if run_cases := result.run_cases():
        options: Values = {}
        if "FLAGPERF_LOG_LEVEL" in given:
            options["log_level"] = given["FLAGPERF_LOG_LEVEL"].read(flagperf.text).lower()
        if "FLAGPERF_LOG_PATH" in given:
            options["runs"] = given["FLAGPERF_LOG_PATH"].read(flagperf.text)
        result.run = {**options, **({"open": True} if is_open else {}), "cases": run_cases}
        parse(RunSpec, result.run, "the run of FlagPerf's files")
    result.left_over = list(dict.fromkeys(result.left_over))
    return result


def _reason(problem: Problem) -> str:
    return problem.what + (f" ({problem.hint})" if problem.hint else "")


def is_tree(path: Path) -> bool:
    """Return whether a directory is that of a vendor in FlagPerf: it has ``<model>-<framework>/config/``."""
    return path.is_dir() and any(flagperf.case_of_folder(folder) for folder in path.glob("*-*/config"))


def convert_tree(path: Path, vendor: str, *, is_open: bool = False) -> tuple[dict[str, str], Converted]:
    """Return the files of the folder of ``vendor``, and its configurations with what was not converted.

    A vendor that AccelMark does not ship also gets a ``vendor.yaml`` to complete.
    """
    vendor = TABLES["vendors"].get(vendor, vendor)
    # Which hosts the configurations are for is not known here: as many as the largest that is accepted has.
    hosts = tuple(HostSpec(address=f"host{number}") for number in range(64))
    cluster = ClusterSpec(vendor=vendor if vendor in folders("vendors") else None, launcher="ssh", hosts=hosts)
    result = Converted(is_open, cluster)
    left_over = result.left_over
    texts: dict[str, str] = {}
    for folder in sorted(path.glob("*-*/")):
        if (case := flagperf.case_of_folder(folder)) is None:
            left_over.append(Problem(str(folder), "", "FlagPerf has no model of that name"))
            continue
        key, _, notes = flagperf.converted_key(":".join(case), "train", cluster)
        model, framework = key.split(":")
        if model not in folders("cases"):
            known = equivalent(case[0], "train")
            what = f"no case carries it: {known.note}" if known is not None else "AccelMark has no such case"
            left_over.append(Problem(str(folder), "", what))
            continue
        left_over += [Problem(str(folder), "", note) for note in notes if note]
        place = f"cases/{model}-{framework}"
        for file in sorted((folder / "config").glob("*.py")):
            if (config := flagperf.Config.read(file)) is not None:
                has_common = file.with_stem(flagperf.COMMON_CONFIG).is_file()
                left_over += config.parsed.unread(*([flagperf.COMMON_CONFIG] if has_common else []))
                if values := result.config_alone(config):
                    result.configs[f"{place}/config/{config.name}"] = values
        for name in ("config/environment_variables.sh", "config/requirements.txt", "csrc", "README.md"):
            texts |= _copied(folder / name, f"{place}/{name}", left_over)
        for name, content in _copied(folder / "extern", f"{place}/port", left_over).items():
            texts[name] = content
            left_over.append(Problem(f"{folder.name}/extern", Path(name).name, _to_port(content, framework)))
    for folder in sorted((path / "docker_image").glob("*/")):
        texts |= _copied(folder, f"images/{folder.name}", left_over)
    texts |= _copied(path / "README.md", "README.md", left_over)
    script = ""
    for monitor in path.glob("*_monitor.py"):
        texts[monitor.name] = read_text(monitor)
        script = f"  script: {{file: {monitor.name}}}\n"
    if cluster.vendor is None:
        what = "add its chips with peak rates and sources, device type and collectives of each framework, and detection"
        left_over.append(Problem("vendor.yaml", "", what))
        texts["vendor.yaml"] = (
            f"name: {vendor}\ntitle: {vendor}\nframeworks:\n  pytorch: {{device_type: cpu, collective_backend: gloo}}\n"
            f"visible_devices_env: null\ntelemetry:\n  detect: {{always: true}}\n{script}chips: []\n"
        )
    elif script:
        left_over.append(Problem(str(path), "", f"vendor {vendor} has telemetry of its own; the monitor is not read"))
    return texts, result


def _copied(source: Path, target: str, left_over: list[Problem]) -> dict[str, str]:
    """Return the text files at or below ``source`` by their names below ``target``; list binary files."""
    texts: dict[str, str] = {}
    for file in [source] if source.is_file() else sorted(source.rglob("*")):
        if not file.is_file() or "__pycache__" in file.parts or file.name.startswith("."):
            continue
        name = target if file == source else f"{target}/{file.relative_to(source).as_posix()}"
        try:
            texts[name] = read_text(file)
        except SpecError as error:
            left_over += error.problems
    return texts


def _to_port(text: str, framework: str) -> str:
    """Return which hooks the functions of an ``extern`` file map to."""
    if catalog.hooks_file(framework) is None:
        return f"framework {framework} has no hooks to replace"
    try:
        names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        return "is not valid Python 3"
    if hooks := [name for name in names if name in catalog.allowed_hooks(framework)]:
        return f"port it by hand to methods of class Extern in extern/__init__.py: {', '.join(hooks)}"
    return "has no function with the name of a hook; it is needed only where a hook uses it"
