"""FlagPerf's settings and keys, and what they become: of its cluster, containers, training and inference cases."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from accelmark.compat.flagperf.parse import TABLES, Given, Parsed, Task, Values, case_of_model, equivalent, parse_file
from accelmark.datasets.spec import dataset_specs
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.key import CaseKey, is_version
from accelmark.spec.layers import resolve_inference
from accelmark.spec.plugins.catalog import find, folders, load_case, load_framework, load_vendor
from accelmark.spec.plugins.launcher import load_launcher, parse_cluster
from accelmark.spec.plugins.requirements import installed_version
from accelmark.spec.plugins.vendor import ContainerDefaults


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
COMMON_CONFIG: Final = "config_common"
_PRECISIONS: Final[dict[str, str]] = TABLES["precisions"]


class Config(NamedTuple):
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
        if scale is None and path.stem != COMMON_CONFIG:
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
            before, read = taken.get(dotted), item._replace(value=_PRECISIONS.get(item.key, item.value))
            if before is None or before.key == "amp":  # it enables a lower precision; another setting may say which
                taken[dotted] = read
            elif item.key != "amp" and before.value != read.value:
                why = f"{before.key} already gives {dotted}, as {before.value!r}"
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
        elif item.key == "fp16" and (item.is_set or item.value is None):
            taken["precision"] = item._replace(value={True: "fp16", False: "fp32"}.get(item.value, item.value))
        elif item.is_set or item.value is None:
            taken[item.key] = item
    own_settings = resolve_inference(side, case, over=[]).settings
    return {key: item for key, item in taken.items() if getattr(own_settings, key, item) != item.value}
