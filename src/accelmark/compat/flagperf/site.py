"""Convert FlagPerf's cluster_conf.py, test_conf.py with the keys of its ``CASES``, and host.yaml."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from accelmark.compat.flagperf.coverage import Task, equivalent
from accelmark.compat.flagperf.parse import TABLES, Given, Parsed, Values, flag, text, texts, whole
from accelmark.compat.flagperf.training import data_directory
from accelmark.datasets.spec import dataset_specs
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.key import CaseKey, is_version
from accelmark.spec.plugins.catalog import find, folders, load_case, load_framework, load_vendor
from accelmark.spec.plugins.launcher import load_launcher, parse_cluster
from accelmark.spec.plugins.requirements import installed_version
from accelmark.spec.plugins.vendor import ContainerDefaults

_PLAIN: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "SSH_PORT": ("ssh_port", whole),
    "MASTER_PORT": ("master_port", whole),
    "VENDOR": ("vendor", text),
    "CLEAR_CACHES": ("clear_caches", flag),
    "ACCE_VISIBLE_DEVICE_ENV_NAME": ("visible_devices_env", text),
}
_KNOWN: Final = frozenset(_PLAIN) | {
    "HOSTS", "HOSTS_PORTS", "SHM_SIZE", "PIP_SOURCE", "ACCE_CONTAINER_OPT", "FLAGPERF_LOG_LEVEL", "FLAGPERF_LOG_PATH",
    "CASES",
}  # fmt: skip
_LONG: Final[dict[str, str]] = TABLES["long_options"]
_SWITCHES: Final = frozenset({"--privileged", "--init", "--rm", "--detach", "--interactive", "--tty", "--read-only"})
"""Options without a value."""
_ALWAYS_SET: Final = frozenset(
    {("--network", "host"), ("--ipc", "host"), ("--init", None), ("--init", "true"), ("--rm", None), ("--rm", "true")}
)
"""Options of all FlagPerf containers that AccelMark sets itself."""
_OWN: Final = frozenset(
    {"--network", "--ipc", "--init", "--rm", "--name", "--entrypoint", "--detach", "--interactive", "--tty"}
)
"""Options whose value AccelMark sets."""
_ONCE: Final = frozenset({"--gpus", "--pid", "--runtime"})
"""Options that may be given only once."""


def add_settings(parsed: Parsed, given: dict[str, Given], cases: list[Given], left_over: list[Problem]) -> None:
    """Add a file's settings to ``given``, replacing those of earlier files, and its cases to ``cases``."""
    for item in parsed.settings():
        before = given.get(item.key)
        if item.key not in _KNOWN:
            left_over.append(item.left(TABLES["no_equivalent"].get(item.key, "AccelMark has no such setting")))
        elif not item.is_set:
            continue
        elif item.key == "CASES":
            cases.append(item)
        else:
            if before is not None and before.value != item.value:
                left_over.append(before.left(f"{item.file} has another value and is read later"))
            given[item.key] = item


def cluster_of(given: Mapping[str, Given], left_over: list[Problem]) -> Values:
    """Return the cluster file, empty without settings for it; raise SpecError if it is invalid."""
    cluster: Values = {}
    if "HOSTS" in given:
        cluster["hosts"] = [{"address": address} for address in given["HOSTS"].read(texts)]
    if "HOSTS_PORTS" in given:
        _assign_ports(given["HOSTS_PORTS"], cluster.get("hosts", []), left_over)
    for key, (name, kind) in _PLAIN.items():
        if key in given:
            cluster[name] = given[key].read(kind)
    if "vendor" in cluster:
        cluster["vendor"] = vendor = TABLES["vendors"].get(cluster["vendor"], cluster["vendor"])
        if vendor not in folders("vendors"):
            del cluster["vendor"]
            left_over.append(
                given["VENDOR"].left(f"AccelMark has no such vendor ({nearest(vendor, folders('vendors'))})")
            )
    container = _container_of(given, left_over)
    if container:
        cluster["container"] = container
    if cluster:
        hosts = cluster.get("hosts")
        is_here = not hosts or [host["address"] for host in hosts] in (["127.0.0.1"], ["localhost"])
        cluster["launcher"] = "local" if is_here else "ssh"
        parse_cluster(cluster, "the cluster in these files")
    return cluster


def _assign_ports(item: Given, hosts: Sequence[Values], left_over: list[Problem]) -> None:
    """Assign ports to hosts: one port for all hosts, or one per host in their order."""
    written = [str(item.value)] if isinstance(item.value, int) else item.read(texts)
    ports = [whole(port) for port in written if port]  # the template has empty entries
    if not ports:
        return
    if len(ports) not in (1, len(hosts)):
        what = f"{len(ports)} ports for {len(hosts)} hosts are neither one for all nor one for each"
        left_over.append(item.left(f"{what}; set service_ports of the hosts by hand"))
        return
    for number, host in enumerate(hosts):
        host["service_ports"] = [ports[number % len(ports)]]


@final
@dataclass(frozen=True, slots=True)
class _Option:
    """One option with its value and its original words."""

    name: str
    """Long form of the option; empty for a word without an option."""
    value: str | None
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def _container_of(given: Mapping[str, Given], left_over: list[Problem]) -> Values:
    """Return ``container`` of the cluster file; empty if no FlagPerf setting concerns it."""
    plain = {"SHM_SIZE": "shm_size", "PIP_SOURCE": "pip_source"}
    container: Values = {name: given[key].read(text) for key, name in plain.items() if key in given}
    written = given.get("ACCE_CONTAINER_OPT")
    if written is not None:
        own = _vendors_own(given.get("VENDOR"))
        vendors = _options_in(own.options)
        same = {(option.name, option.value) for option in vendors}
        single = {option.name for option in vendors if option.name in _ONCE}
        mounted = {_target(mount) for mount in own.mounts}
        options: dict[tuple[str, str | None], _Option] = {}
        mounts: list[str] = []
        for option in _options_in(written.read(lambda value: shlex.split(text(value)))):
            why = ""
            if (option.name, option.value) in _ALWAYS_SET:
                continue
            if not option.name or any(sign in str(option) for sign in "$`"):
                why = "is no option that can be read without a shell"
            elif option.name in _OWN:
                why = "AccelMark sets it"
            elif (option.name, option.value) in same or option.name in single:
                why = "vendor.yaml already sets it"
            elif option.name == "--privileged":
                container["privileged"] = option.value != "false"
            elif option.name == "--shm-size":
                if container.setdefault("shm_size", option.value) != option.value:
                    why = f"the size is already {container['shm_size']}"
            elif option.name != "--volume" or option.value is None:
                options.setdefault((option.name, option.value), option)
            elif _target(option.value) in mounted:
                why = f"vendor.yaml or another option already mounts {_target(option.value)}"
            else:
                mounts.append(option.value)
                mounted.add(_target(option.value))
            if why:
                left_over.append(written.left(f"{str(option)!r}: {why}"))
        if options:
            container["options"] = [word for option in options.values() for word in option.words]
        if mounts:
            container["mounts"] = mounts
    elif not container:
        return {}
    return {"engine": "docker", **container}


def _vendors_own(vendor: Given | None) -> ContainerDefaults:
    name = TABLES["vendors"].get(vendor.read(text), vendor.read(text)) if vendor is not None else ""
    return load_vendor(name).container if name in folders("vendors") else ContainerDefaults()


def _options_in(words: Iterable[str]) -> list[_Option]:
    options: list[_Option] = []
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+", word):
            name, equals, value = re.sub(r"^-v(?=[^=])", "-v=", word).partition("=")
            options.append(_Option(_LONG.get(name, name), value if equals else None, (word,)))
            continue
        before = options[-1] if options else None
        if before is not None and before.name and before.value is None and before.name not in _SWITCHES:
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
    """Return an entry for each key of ``cases``; list wrong and repeated ones.

    Raises SpecError if CASES is not a dictionary.
    """
    listed: dict[tuple[str, str], Entry] = {}
    for item in cases:
        table = item.read(_table)
        if not table:
            left_over.append(item.left("names no case"))
        for written, data in table.items():
            entry = _entry(item, written, data, cluster)
            model = equivalent(written.partition(":")[0], entry.task)
            if model is not None and model.case is None:
                left_over.append(entry.left(f"no case carries it: {model.note}"))
                continue
            try:
                # An inference key names no chip; it is detected at run time.
                slug = CaseKey.parse(entry.key, hardware="any").slug
            except SpecError as error:
                left_over.append(entry.left("; ".join(problem.what for problem in error.problems)))
                continue
            before = listed.setdefault((entry.task, slug), entry)
            if before is not entry and before.values() != entry.values():
                left_over.append(
                    entry.left(f"is given twice, also as {before.written} with {before.data or 'no data'}")
                )
    return list(listed.values())


def _table(value: Any) -> dict[str, str | None]:
    if not isinstance(value, Mapping):
        raise TypeError("is not a table of keys and data directories")
    return {text(key): text(data) if data is not None else None for key, data in value.items()}


def _entry(origin: Given, written: str, data: str | None, cluster: ClusterSpec) -> Entry:
    task: Task = "infer" if written.count(":") == 1 else "train"  # an inference key has two parts
    key, settings, notes = converted_key(written, task, cluster)
    case = key.partition(":")[0]
    if data and case in folders("cases"):
        if task == "infer":
            data, moved = data_directory(data, case)
            notes.append(moved)
        else:
            notes += _layout(case, data)
    return Entry(origin, written, key, task, data, "; ".join(filter(None, notes)), settings)


def _layout(case: str, data: str) -> Iterator[str]:
    """Yield the required content of a training case's data directory."""
    for spec in dataset_specs(load_case(case).data, f"cases/{case}/case.yaml"):
        parts = [part.path for part in spec.tree or spec.files]
        yield f"data {data} must contain {', '.join(parts[:4])} ({spec.title}), or it is not read"


def converted_key(written: str, task: Task, cluster: ClusterSpec) -> tuple[str, Mapping[str, Any], list[str]]:
    """Return a key with AccelMark's names, the settings that the framework's name means, and notes.

    A framework version is kept only where an image or this machine has it.
    """
    model, *parts = written.strip().split(":")
    covered = equivalent(model, task)
    name = model if covered is None or covered.case is None else covered.case
    notes = [covered.note] if covered is not None and name != model else []
    settings: Mapping[str, Any] = {}
    if parts:
        framework, _, version = parts[0].partition("_")
        if (own := TABLES["frameworks"].get(framework)) is not None:
            notes.append(own["why"])
            framework, settings = own["name"], own.get("settings", {})
        elif version:
            lacking = _lacking(framework, version, cluster)
            framework, notes = (framework, [*notes, lacking]) if lacking else (parts[0], notes)
        parts[0] = framework
    return ":".join([name, *parts]), settings, notes


def _lacking(framework: str, version: str, cluster: ClusterSpec) -> str:
    """Return the available versions, where a key's version has no image and is not installed on this machine."""
    if cluster.container is not None and cluster.vendor is not None:
        folder = find("vendors", cluster.vendor).path / "images"
        if (folder / f"{framework}_{version}" / "Dockerfile").is_file():
            return ""
        images = sorted(path.parent.name for path in folder.glob("*/Dockerfile"))
        return f"no image of {framework} {version}; vendor {cluster.vendor} has images {', '.join(images) or '(none)'}"
    if not load_launcher(cluster.launcher).is_localhost:
        return f"the hosts' own {framework} is used instead of {version}; name a version in the key to require it"
    names = load_framework(framework).distributions if framework in folders("frameworks") else ()
    installed = next(filter(None, map(installed_version, names)), None)
    if installed is not None and is_version(installed, version):
        return ""
    return f"{framework} {version} is not installed here, but {installed or 'no version'} is, which is used instead"
