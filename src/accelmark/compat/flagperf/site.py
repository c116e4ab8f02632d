"""Convert FlagPerf's cluster_conf.py, test_conf.py and host.yaml to a cluster file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from accelmark.compat.flagperf.parse import TABLES, Given, Parsed, Values, flag, text, texts, whole
from accelmark.spec.errors import Problem, nearest
from accelmark.spec.plugins.catalog import folders, load_vendor
from accelmark.spec.plugins.launcher import parse_cluster
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
