"""Convert FlagPerf's container options, a command line in one string, to the container of a cluster file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, final

from accelmark.compat.flagperf.parse import Given, Values, text
from accelmark.spec.errors import Problem
from accelmark.spec.plugins.catalog import folders, load_vendor
from accelmark.spec.plugins.vendor import ContainerDefaults

_LONG: Final = {
    "-v": "--volume",
    "-e": "--env",
    "--net": "--network",
    "-d": "--detach",
    "-i": "--interactive",
    "-t": "--tty",
    "-it": "--tty",
    "-ti": "--tty",
}
_SWITCHES: Final = frozenset({"--privileged", "--init", "--rm", "--detach", "--interactive", "--tty", "--read-only"})
"""Options without a value."""
_SAID_ANYWAY: Final = frozenset(
    {("--network", "host"), ("--ipc", "host"), ("--init", None), ("--init", "true"), ("--rm", None), ("--rm", "true")}
)
"""Options of all FlagPerf containers that AccelMark sets itself."""
_OWN: Final = frozenset(
    {"--network", "--ipc", "--init", "--rm", "--name", "--entrypoint", "--detach", "--interactive", "--tty"}
)
"""Options whose value AccelMark sets."""
_ONCE: Final = frozenset({"--gpus", "--pid", "--runtime"})
"""Options that may be given only once."""


@final
@dataclass(frozen=True, slots=True)
class _Option:
    """One option with its value and its original words."""

    name: str
    """Long form of the option; empty for a word that belongs to no option."""
    value: str | None
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def container_of(given: Mapping[str, Given], left_over: list[Problem]) -> Values:
    """Return ``container`` of the cluster file; empty if no FlagPerf setting concerns it."""
    plain = {"SHM_SIZE": "shm_size", "PIP_SOURCE": "pip_source"}
    container: Values = {name: given[key].read(text) for key, name in plain.items() if key in given}
    written = given.get("ACCE_CONTAINER_OPT")
    if written is not None:
        _take_options(written, _vendors_own(given.get("VENDOR")), container, left_over)
    elif not container:
        return {}
    return {"engine": "docker", **container}


def _vendors_own(vendor: Given | None) -> ContainerDefaults:
    known = vendor is not None and vendor.read(text) in folders("vendors")
    return load_vendor(vendor.read(text)).container if vendor is not None and known else ContainerDefaults()


def _take_options(written: Given, own: ContainerDefaults, container: Values, left_over: list[Problem]) -> None:
    vendors = _options_in(own.options)
    same = {(option.name, option.value) for option in vendors}
    single = {option.name: option for option in vendors if option.name in _ONCE}
    mounted = {_target(mount) for mount in own.mounts}
    options: dict[tuple[str, str | None], _Option] = {}
    mounts: list[str] = []
    for option in _options_in(written.read(lambda value: shlex.split(text(value)))):
        why = ""
        if (option.name, option.value) in _SAID_ANYWAY:
            continue
        if not option.name:
            why = "belongs to no option"
        elif any(sign in str(option) for sign in "$`"):
            why = "contains shell syntax, and no shell reads it"
        elif option.name in _OWN:
            why = "AccelMark decides it itself"
        elif (option.name, option.value) in same:
            why = "the vendor's vendor.yaml sets it already"
        elif option.name in single:
            why = f"the vendor's vendor.yaml sets {single[option.name]}"
        elif option.name == "--privileged":
            why = _take_privileged(option, ("--privileged", None) in same, container)
        elif option.name == "--shm-size":
            why = _take_shm_size(option, container)
        elif option.name != "--volume":
            options.setdefault((option.name, option.value), option)
        elif not option.value:
            why = "names nothing to mount"
        elif _target(option.value) in mounted:
            why = f"vendor.yaml or another option mounts {_target(option.value)} already"
        else:
            mounts.append(option.value)
            mounted.add(_target(option.value))
        if why:
            left_over.append(written.left(f"{str(option)!r}: {why}"))
    if options:
        container["options"] = [word for option in options.values() for word in option.words]
    if mounts:
        container["mounts"] = mounts


def _take_privileged(option: _Option, is_vendors: bool, container: Values) -> str:
    if option.value not in (None, "true", "false"):
        return "is neither true nor false"
    if option.value == "false":
        return ""
    if is_vendors:
        return "the vendor's vendor.yaml sets it already"
    container["privileged"] = True
    return ""


def _take_shm_size(option: _Option, container: Values) -> str:
    if not option.value:
        return "names no size"
    if container.setdefault("shm_size", option.value) != option.value:
        return f"the size is {container['shm_size']} already"
    return ""


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
