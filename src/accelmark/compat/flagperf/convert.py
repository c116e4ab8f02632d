"""Convert FlagPerf's files into a cluster file, a run file and settings of a case, and list what has no equivalent."""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, final

from accelmark.compat.flagperf.parse import TABLES, Given, Parsed, Task, Values, case_of_model, equivalent, parse_file
from accelmark.datasets.spec import dataset_specs
from accelmark.plan.build import build_plan
from accelmark.plan.request import Detected
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import AccelmarkError, Problem, SpecError, nearest
from accelmark.spec.key import CaseKey, is_version
from accelmark.spec.layers import Layer, nest, resolve_inference
from accelmark.spec.model import parse, read_text
from accelmark.spec.plugins import catalog
from accelmark.spec.plugins.catalog import find, folders, load_case, load_framework, load_vendor
from accelmark.spec.plugins.launcher import load_launcher, parse_cluster
from accelmark.spec.plugins.requirements import installed_version
from accelmark.spec.plugins.vendor import ContainerDefaults
from accelmark.spec.runfile import RunSpec
from accelmark.spec.settings.inference import InferSettings


def text(value: Any) -> str:
    """Convert a string or an integer to a string."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise TypeError("is not text")


def texts(value: Any) -> list[str]:
    """Convert a list of strings, or a string separated by commas or blanks; empty entries count as none."""
    parts = re.split(r"[,\s]+", value) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise TypeError("is neither a list nor text")
    return [part for part in map(text, parts) if part]


def whole(value: Any) -> int:
    """Convert an integer, or a string that contains one."""
    written = text(value)
    if not written.isascii() or not written.isdigit():
        raise ValueError("is not a whole number")
    return int(written)


def flag(value: Any) -> bool:
    """Convert True or False."""
    if isinstance(value, bool):
        return value
    raise TypeError("is neither True nor False")


_PLAIN: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "SSH_PORT": ("ssh_port", whole),
    "MASTER_PORT": ("master_port", whole),
    "CLEAR_CACHES": ("clear_caches", flag),
    "ACCE_VISIBLE_DEVICE_ENV_NAME": ("visible_devices_env", text),
}
_KNOWN: Final = frozenset(_PLAIN) | {
    "VENDOR", "HOSTS", "HOSTS_PORTS", "SHM_SIZE", "PIP_SOURCE", "ACCE_CONTAINER_OPT", "FLAGPERF_LOG_LEVEL",
    "FLAGPERF_LOG_PATH", "CASES",
}  # fmt: skip
_SWITCHES: Final = frozenset({"--privileged", "--init", "--rm", "--detach", "--interactive", "--tty", "--read-only"})
"""Options without a value."""
_OWN: Final = frozenset(
    {"--network", "--ipc", "--init", "--rm", "--name", "--entrypoint", "--detach", "--interactive", "--tty"}
)
"""Options whose value AccelMark sets."""
_ONCE: Final = frozenset({"--gpus", "--pid", "--runtime"})
"""Options that may be given only once."""


def add_settings(parsed: Parsed, given: dict[str, Given], cases: list[Given], left_over: list[Problem]) -> None:
    """Add a file's settings to ``given``, replacing those of earlier files, and its cases to ``cases``."""
    for item in parsed.settings():
        if item.key not in _KNOWN:
            left_over.append(item.left(TABLES["no_equivalent"].get(item.key, "AccelMark has no such setting")))
        elif item.is_set and item.key == "CASES":
            cases.append(item)
        elif item.is_set:
            given[item.key] = item


def cluster_of(given: Mapping[str, Given], left_over: list[Problem]) -> Values:
    """Return the cluster file, empty without settings for it; raise SpecError if it is invalid."""
    cluster: Values = {}
    if "HOSTS" in given:
        hosts: list[Values] = [{"address": address} for address in given["HOSTS"].read(texts)]
        cluster["hosts"] = hosts
        ports = list(map(whole, given["HOSTS_PORTS"].read(texts))) if "HOSTS_PORTS" in given else []
        if len(ports) in (1, len(hosts)):
            for number, host in enumerate(hosts):
                host["service_ports"] = [ports[number % len(ports)]]
        elif ports:
            what = f"{len(ports)} ports for {len(hosts)} hosts are neither one for all nor one for each"
            left_over.append(given["HOSTS_PORTS"].left(f"{what}; set service_ports of the hosts by hand"))
    cluster |= {name: given[key].read(kind) for key, (name, kind) in _PLAIN.items() if key in given}
    own = ContainerDefaults()
    if "VENDOR" in given:
        vendor = given["VENDOR"].read(text)
        vendor = TABLES["vendors"].get(vendor, vendor)
        if vendor in folders("vendors"):
            cluster["vendor"] = vendor
            own = load_vendor(vendor).container
        else:
            hint = nearest(vendor, folders("vendors"))
            left_over.append(given["VENDOR"].left(f"AccelMark has no such vendor ({hint})"))
    plain = {"SHM_SIZE": "shm_size", "PIP_SOURCE": "pip_source"}
    container = {name: given[key].read(text) for key, name in plain.items() if key in given}
    if "ACCE_CONTAINER_OPT" in given:
        _take_options(given["ACCE_CONTAINER_OPT"], own, container, left_over)
    if container or "ACCE_CONTAINER_OPT" in given:
        cluster["container"] = {"engine": "docker", **container}
    if cluster:
        addresses = [host["address"] for host in cluster.get("hosts", ())]
        cluster["launcher"] = "local" if addresses in ([], ["127.0.0.1"], ["localhost"]) else "ssh"
        parse_cluster(cluster, "the cluster in these files")
    return cluster


class _Option(NamedTuple):
    """One option with its value and its original words."""

    name: str
    """Long form of the option; empty for a word without an option."""
    value: str | None
    words: tuple[str, ...]


def _take_options(written: Given, own: ContainerDefaults, container: Values, left_over: list[Problem]) -> None:
    """Add the options of ``ACCE_CONTAINER_OPT`` to ``container``, but for those that the vendor's file has."""
    vendors = _options_in(own.options)
    same = {(option.name, option.value) for option in vendors}
    single = {option.name for option in vendors if option.name in _ONCE}
    mounted = {_target(mount) for mount in own.mounts}
    options: dict[tuple[str, str | None], _Option] = {}
    mounts: list[str] = []
    for option in _options_in(written.read(lambda value: shlex.split(text(value)))):
        name, value, words = option
        why = ""
        if not name or any(sign in word for word in words for sign in "$`"):
            why = "is no option that can be read without a shell"
        elif name in _OWN:
            why = "AccelMark sets it"
        elif (name, value) in same or name in single:
            why = "vendor.yaml already sets it"
        elif name == "--privileged":
            container["privileged"] = value != "false"
        elif name == "--shm-size":
            container.setdefault("shm_size", value)
        elif name != "--volume" or value is None:
            options.setdefault((name, value), option)
        elif _target(value) in mounted:
            why = f"vendor.yaml or another option already mounts {_target(value)}"
        else:
            mounts.append(value)
            mounted.add(_target(value))
        if why:
            left_over.append(written.left(f"{' '.join(words)!r}: {why}"))
    if options:
        container["options"] = [word for option in options.values() for word in option.words]
    if mounts:
        container["mounts"] = mounts


def _options_in(words: Iterable[str]) -> list[_Option]:
    options: list[_Option] = []
    for word in words:
        before = options[-1] if options else None
        if word.startswith("-") and not re.fullmatch(r"-\d+", word):
            name, equals, value = re.sub(r"^-v(?=[^=])", "-v=", word).partition("=")
            options.append(_Option(TABLES["long_options"].get(name, name), value if equals else None, (word,)))
        elif before is not None and before.name and before.value is None and before.name not in _SWITCHES:
            options[-1] = _Option(before.name, word, (*before.words, word))
        else:
            options.append(_Option("", word, (word,)))
    return options


def _target(mount: str) -> str:
    """Return the path of a mount inside the container."""
    parts = mount.split(":")
    return (parts[1] if len(parts) > 1 else parts[0]).rstrip("/")


@final
@dataclass(slots=True)
class Entry:
    """A key of ``CASES``, and the entry of the run file that it becomes."""

    origin: Given
    written: str
    """The key as FlagPerf has it."""
    key: str
    """The key with AccelMark's names."""
    task: Task
    data: str | None
    differs: str
    """Differences from the written key, and notes on its data."""
    needed: Mapping[str, Any]
    """Settings that are part of the framework's name."""
    settings: dict[str, Given] = field(default_factory=dict)
    """Dotted settings of its configuration files."""

    @property
    def case(self) -> str:
        """Name of the case."""
        return self.key.partition(":")[0]

    def values(self) -> Values:
        """Return the entry without settings, as the run file has it."""
        task = {"task": self.task} if self.task != "train" else {}
        return {"key": self.key, **task, **({"data": self.data} if self.data else {})}

    def left(self, why: str) -> Problem:
        """Return the problem that reports what became of the key."""
        return self.origin.left(f"{self.written}: {why}")


def entries_of(cases: Sequence[Given], cluster: ClusterSpec, left_over: list[Problem]) -> list[Entry]:
    """Return an entry for each key of ``cases``; list wrong and repeated ones. Raises SpecError: CASES is no table."""
    listed: dict[tuple[str, str], Entry] = {}
    for item in cases:
        for written, data in item.read(_table).items():
            entry = _entry(item, written, data, cluster)
            covered = equivalent(written.partition(":")[0], entry.task)
            if covered is not None and covered.case is None:
                left_over.append(entry.left(f"no case carries it: {covered.note}"))
                continue
            try:
                # An inference key names no chip; it is detected at run time.
                slug = CaseKey.parse(entry.key, hardware="any").slug
            except SpecError as error:
                left_over.append(entry.left("; ".join(problem.what for problem in error.problems)))
                continue
            before = listed.setdefault((entry.task, slug), entry)
            if before.values() != entry.values():
                left_over.append(entry.left(f"is given twice, also as {before.written} with {before.data}"))
    return list(listed.values())


def _table(value: Any) -> dict[str, str | None]:
    if not isinstance(value, Mapping):
        raise TypeError("is not a table of keys and data directories")
    return {text(key): text(data) if data is not None else None for key, data in value.items()}


def _entry(origin: Given, written: str, data: str | None, cluster: ClusterSpec) -> Entry:
    task: Task = "infer" if written.count(":") == 1 else "train"  # an inference key has two parts
    key, settings, notes = converted_key(written, task, cluster)
    case = key.partition(":")[0]
    if data and case in folders("cases") and task == "infer":
        data, moved = _data_directory(data, case)
        notes.append(moved)
    elif data and case in folders("cases"):
        for spec in dataset_specs(load_case(case).data, f"cases/{case}/case.yaml"):
            parts = ", ".join(part.path for part in (spec.tree or spec.files)[:4])
            notes.append(f"data {data} must contain {parts} ({spec.title}), or it is not read")
    return Entry(origin, written, key, task, data, "; ".join(filter(None, notes)), settings)


def _data_directory(given: str, case: str) -> tuple[str, str]:
    """Return the directory of all data sets and a note about it; FlagPerf names the directory of one data set."""
    side = load_case(case).infer
    names = (*side.data, *side.optional_data) if side is not None else ()
    parts = Path(given).parts
    at = next((place for place, part in enumerate(parts) if part in names), None)
    if not names or at == 0:
        return given, ""
    wanted = f"the directory that contains {' and '.join(f'{name}/' for name in names)}"
    if at is None:
        return given, f"data {given}: name {wanted}"
    return str(Path(*parts[:at])), f"data {given}: becomes {wanted}"


def converted_key(written: str, task: Task, cluster: ClusterSpec) -> tuple[str, Mapping[str, Any], list[str]]:
    """Return a key with AccelMark's names, the settings that the framework's name means, and notes."""
    model, *parts = written.strip().split(":")
    covered, name = equivalent(model, task), case_of_model(model, task)
    notes = [covered.note] if covered is not None and name != model else []
    settings: Mapping[str, Any] = {}
    if parts:
        framework, _, version = parts[0].partition("_")
        if (own := TABLES["frameworks"].get(framework)) is not None:
            notes.append(own["why"])
            parts[0], settings = own["name"], own.get("settings", {})
        elif version and (lacking := _lacking(framework, version, cluster)):
            notes.append(lacking)
            parts[0] = framework
    return ":".join([name, *parts]), settings, notes


def _lacking(framework: str, version: str, cluster: ClusterSpec) -> str:
    """Return the available versions, where a key's version has no image and is not installed on this machine."""
    if cluster.container is not None and cluster.vendor is not None:
        images = [path.parent.name for path in (find("vendors", cluster.vendor).path / "images").glob("*/Dockerfile")]
        if f"{framework}_{version}" in images:
            return ""
        listed = ", ".join(sorted(images)) or "(none)"
        return f"no image of {framework} {version}; vendor {cluster.vendor} has images {listed}"
    if not load_launcher(cluster.launcher).is_localhost:
        return f"the hosts' own {framework} is used instead of {version}; name a version in the key to require it"
    names = load_framework(framework).distributions if framework in folders("frameworks") else ()
    installed = next(filter(None, map(installed_version, names)), None)
    if installed is not None and is_version(installed, version):
        return ""
    return f"{framework} {version} is not installed here, but {installed or 'no version'} is, which is used instead"


_SCALE: Final = re.compile(r"config_([^/]+)x([1-9][0-9]*)x([1-9][0-9]*)")
_EVERY_SCALE: Final = "config_common"
_PRECISIONS: Final[dict[str, str]] = TABLES["precisions"]


@final
@dataclass(frozen=True, slots=True)
class Config:
    """One configuration file of a training case (``config_*.py``)."""

    parsed: Parsed
    scale: tuple[str, ...] | None
    """Chip, hosts and devices per host as in keys; None: every scale."""
    case: tuple[str, str] | None
    """FlagPerf's model and framework, by the folder ``<model>-<framework>``; None: the folder has another name."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a file; None if its name has no scale. Raises SpecError if it cannot be read."""
        scale = _SCALE.fullmatch(path.stem)
        if scale is None and path.stem != _EVERY_SCALE:
            return None
        return cls(parse_file(path), scale.groups() if scale else None, case_of_folder(path.absolute().parent))

    @property
    def name(self) -> str:
        """Name of the YAML file with its settings in a vendor's folder of the case."""
        return "config.yaml" if self.scale is None else f"{Path(self.parsed.file).stem}.yaml"

    def applies(self, written: str) -> bool:
        """Return whether it configures a key of ``CASES``."""
        model, framework, *rest = [*written.split(":"), "", ""][:5]
        own = self.case is None or self.case == (model, framework.partition("_")[0])
        return own and (self.scale is None or self.scale == tuple(rest))


def case_of_folder(folder: Path) -> tuple[str, str] | None:
    """Return FlagPerf's model and framework of ``<model>-<framework>`` or its ``config``, None for other folders."""
    model, dash, framework = (folder.parent if folder.name == "config" else folder).name.partition("-")
    known = model in folders("cases") or equivalent(model, "train") is not None
    return (model, framework.partition("_")[0]) if dash and known else None


def settings_of(parsed: Parsed, case: str | None, left_over: list[Problem]) -> dict[str, Given]:
    """Return a file's settings by AccelMark's dotted names; list those without equivalent in ``left_over``."""
    taken: dict[str, Given] = {}
    for item in parsed.settings():
        why = ""
        if item.key in _PRECISIONS and item.value is not True:
            why = f"is {item.value!r}, not True: the case's own precision is kept; or set precision by hand"
        elif item.key in TABLES["numbers"] and not (type(item.value) in (int, float) and math.isfinite(item.value)):
            why = f"is {item.value!r}, not a number: the case's own value is kept"
        elif item.key in _PRECISIONS or item.key in TABLES["numbers"]:
            dotted = "precision" if item.key in _PRECISIONS else TABLES["numbers"][item.key]
            before = taken.get(dotted, item)
            if before is item or before.key == "amp":  # it enables a lower precision; another setting may say which
                taken[dotted] = item
            elif item.key != "amp" and value_of(before) != value_of(item):
                why = f"{before.key} already gives {dotted}, as {value_of(before)!r}"
        elif item.key.startswith("target_"):
            train = load_case(case).train if case in folders("cases") else None
            target = f": {train.target.text}" if train is not None and train.target is not None else ""
            why = f"the target is the case's, and no run can change it{target}"
        else:
            unknown = "AccelMark has no such setting; look whether the case's model settings mean it"
            why = TABLES["no_equivalent"].get(item.key, unknown)
        if why:
            left_over.append(item.left(why))
    return taken


def value_of(item: Given) -> Any:
    """Return the value of a setting that :func:`settings_of` returned."""
    return _PRECISIONS.get(item.key, item.value)


_CONFIGURATION: Final = re.compile(r"(\w+_)?configurations?\.ya?ml")
_PARAMETERS: Final = "parameters.yaml"


def is_inference(path: Path) -> bool:
    """Return whether the file has settings of an inference case."""
    return path.name == _PARAMETERS or _CONFIGURATION.fullmatch(path.name) is not None


def case_of(path: Path) -> str:
    """Return AccelMark's name of a file's inference case, by its folder."""
    folder = path.absolute().parent
    return case_of_model(folder.parent.name if folder.name == "vendor_config" else folder.name, "infer")


def inference_settings(given: Iterable[Given], case: str, left_over: list[Problem]) -> dict[str, Given]:
    """Return settings that differ from the case's, of several files the last one's; list those without equivalent."""
    items = list(given)
    side = load_case(case).infer if case in folders("cases") else None
    if side is None:
        what = f"AccelMark has no inference case {case!r} ({nearest(case, folders('cases'))}), by the file's folder"
        left_over += [Problem(file, "", what) for file in dict.fromkeys(item.file for item in items)]
        return {}
    taken: dict[str, Given] = {}
    for item in items:
        if Path(item.file).name == _PARAMETERS:
            if (own := side.parameters.get(item.key)) != item.value:
                left_over.append(item.left(f"parameters are the case's on every chip: {own!r}"))
        elif item.key == "flops":
            flops = side.configurations.get("flops")
            left_over.append(item.left(f"the case states the FLOPs of an item ({flops}); another value is OPEN"))
        elif (why := TABLES["inference_no_equivalent"].get(item.key)) is not None:
            left_over.append(item.left(why))
        elif item.is_set or item.value is None:
            taken["precision" if item.key == "fp16" else item.key] = item
    own_settings = resolve_inference(side, case, over=[]).settings
    return {key: item for key, item in taken.items() if getattr(own_settings, key, item) != inference_value(item)}


def inference_value(item: Given) -> Any:
    """Return the value of a setting that :func:`inference_settings` returned."""
    return {True: "fp16", False: "fp32"}.get(item.value, item.value) if item.key == "fp16" else item.value


RUN_FILE: Final = "run.yaml"


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
    """Convert FlagPerf's files to one cluster file and one run file; raises SpecError: one of them is invalid.

    Settings of cases become those of the keys that they apply to, as far as a run accepts them; ``is_open``: also those
    that a case fixes.
    """
    result = Converted()
    given: dict[str, Given] = {}
    cases: list[Given] = []
    inference: dict[str, list[Given]] = {}
    configs: list[Config] = []
    for path in dict.fromkeys(paths):
        if path.stem.startswith("config_"):
            if (config := Config.read(path)) is not None:
                configs.append(config)
            else:
                what = "is named neither config_<HW>x<nnodes>x<nproc> nor config_common: its scale is unknown"
                result.left_over.append(Problem(str(path), "", what))
            continue
        parsed = parse_file(path)
        result.left_over += parsed.unread()
        if is_inference(path):
            inference.setdefault(case_of(path), []).extend(parsed.settings())
        else:
            add_settings(parsed, given, cases, result.left_over)
    result.cluster = cluster_of(given, result.left_over)
    conversion = _Conversion(result, parse_cluster(result.cluster, "the cluster in these files"), is_open)
    conversion.entries = entries_of(cases, conversion.cluster, result.left_over)
    conversion.take_configs(configs)
    conversion.take_inference(inference)
    if run_cases := conversion.run_cases():
        options: Values = {}
        if "FLAGPERF_LOG_LEVEL" in given:
            options["log_level"] = given["FLAGPERF_LOG_LEVEL"].read(text).lower()
        if "FLAGPERF_LOG_PATH" in given:
            options["runs"] = given["FLAGPERF_LOG_PATH"].read(text)
        result.run = {**options, **({"open": True} if is_open else {}), "cases": run_cases}
        parse(RunSpec, result.run, "the run of FlagPerf's files")
    result.left_over = list(dict.fromkeys(result.left_over))
    return result


@final
@dataclass(slots=True)
class _Conversion:
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
            has_common = not commons.isdisjoint((config.case, None))
            self.result.left_over += config.parsed.unread(*([_EVERY_SCALE] if has_common else []))
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
        if config.case is None:
            taken = settings_of(config.parsed, None, self.result.left_over)
            what = "which case it is for is not known: its settings were not checked"
            self.result.left_over.append(Problem(config.parsed.file, "", what, "import it with test_conf.py"))
            return nest({dotted: value_of(item) for dotted, item in taken.items()})
        written = ":".join((*config.case, *(config.scale or ())))
        key, needed, _ = converted_key(written, "train", self.cluster)
        taken = settings_of(config.parsed, key.partition(":")[0], self.result.left_over)
        values = {dotted: value_of(item) for dotted, item in taken.items()}
        return nest(self.accepted({"key": key}, needed, values, taken, Given(config.parsed.file, "", None)) or {})

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
                assert side is not None  # noqa: S101 - inference_settings returns none without it
                try:
                    resolve_inference(side, case, vendor=[Layer.of("infer.yaml", made)])
                except SpecError as error:
                    for problem in error.problems:
                        if made.pop(problem.key, None) is not None:
                            self.result.left_over.append(taken[problem.key].left(problem.what))
                alone[case] = made
        if len(alone) > 1:
            what = f"are of several cases, {', '.join(alone)}: import one case at a time, each with an --out of its own"
            raise SpecError([Problem("infer.yaml", "", what)])
        for layer in filter(None, alone.values()):
            self.result.configs["infer.yaml"] = layer

    def run_cases(self) -> list[Values]:
        """Return the keys of the run file with the settings that a run accepts."""
        cases: list[Values] = []
        for entry in self.entries:
            convert_value = inference_value if entry.task == "infer" else value_of
            values = {key: convert_value(item) for key, item in entry.settings.items()}
            origin = Given(entry.origin.file, entry.origin.key, entry.written)
            settings = self.accepted(entry.values(), entry.needed, values, entry.settings, origin)
            if settings is None:
                continue
            cases.append({**entry.values(), **({"settings": settings} if settings else {})})
            if entry.differs:
                named = "" if entry.written == entry.key else f"becomes {entry.key}: "
                self.result.left_over.append(entry.left(f"{named}{entry.differs}"))
        return cases

    def accepted(
        self, case: Values, needed: Mapping[str, Any], values: Values, taken: Mapping[str, Given], origin: Given
    ) -> Values | None:
        """Return the settings of a key that a run accepts, None where it refuses the key; list the others."""
        settings, left = {**values, **needed}, []
        while problems := self._problems({**case, "settings": settings}):
            refused = {
                key: problem
                for problem in problems
                for key in settings
                if problem.where == RUN_FILE and problem.key and f"{key}.".startswith(f"{problem.key}.")
            }
            if not refused or refused.keys() & needed:
                why = "; ".join(_reason(problem) for problem in problems if problem.key not in values)
                named = f"{origin.value}: " if origin.value else ""
                self.result.left_over.append(origin.left(f"{named}a run would refuse {case['key']}: {why}"))
                return None
            left += [taken[key].left(f"{key}: {_reason(problem)}") for key, problem in refused.items()]
            settings = {key: value for key, value in settings.items() if key not in refused}
        self.result.left_over += left
        return settings

    def _problems(self, case: Values) -> Sequence[Problem]:
        """Plan an entry of ``cases`` in a run file, with dotted settings, without data and devices."""
        vendor = self.cluster.vendor or "cpu"
        request = {"cases": [case], "vendor": vendor, "open": self.is_open}
        try:
            build_plan(
                parse(RunSpec, request, RUN_FILE),
                cluster=self.cluster,
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


def _reason(problem: Problem) -> str:
    return problem.what + (f" ({problem.hint})" if problem.hint else "")


_MOST_HOSTS: Final = 64
"""Hosts of the largest configuration that is accepted: which ones it is for is not known here."""


def is_tree(path: Path) -> bool:
    """Return whether a directory is that of a vendor in FlagPerf: it has ``<model>-<framework>/config/``."""
    return path.is_dir() and any(case_of_folder(folder) for folder in path.glob("*-*/config"))


def convert_tree(path: Path, vendor: str, *, is_open: bool = False) -> tuple[dict[str, str], Converted]:
    """Return the files of the folder of ``vendor``, and its configurations with what was not converted.

    A vendor that AccelMark does not ship also gets a ``vendor.yaml`` to complete.
    """
    result = Converted()
    left_over = result.left_over
    vendor = TABLES["vendors"].get(vendor, vendor)
    hosts = tuple(HostSpec(address=f"host{number}") for number in range(_MOST_HOSTS))
    cluster = ClusterSpec(vendor=vendor if vendor in folders("vendors") else None, launcher="ssh", hosts=hosts)
    conversion = _Conversion(result, cluster, is_open)
    texts: dict[str, str] = {}
    for folder in sorted(path.glob("*-*/")):
        if (case := case_of_folder(folder)) is None:
            left_over.append(Problem(str(folder), "", "FlagPerf has no model of that name"))
            continue
        key, _, notes = converted_key(":".join(case), "train", cluster)
        model, framework = key.split(":")
        if model not in folders("cases"):
            known = equivalent(case[0], "train")
            what = f"no case carries it: {known.note}" if known is not None else "AccelMark has no such case"
            left_over.append(Problem(str(folder), "", what))
            continue
        left_over += [Problem(str(folder), "", note) for note in notes if note]
        place = f"cases/{model}-{framework}"
        for file in sorted((folder / "config").glob("*.py")):
            if (config := Config.read(file)) is not None:
                has_common = file.with_stem(_EVERY_SCALE).is_file()
                left_over += config.parsed.unread(*([_EVERY_SCALE] if has_common else []))
                if values := conversion.config_alone(config):
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
