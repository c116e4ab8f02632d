"""The interface of a launcher: ``launcher.yaml``, and the settings (``options.py``) that it adds to a cluster file."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from pydantic import ConfigDict, ValidationError

from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import Problem, RequestError, SpecError, nearest
from accelmark.spec.model import Spec, parse, problems_of, read_yaml
from accelmark.spec.plugins.catalog import find, folder_module, folders, load_spec


class LauncherSpec(Spec):
    """Properties of a launcher for planning, preflight and reports."""

    name: str
    is_localhost: bool = False
    """Jobs run on the coordinator's machine, so a cluster has one host."""
    shares_filesystem: bool = True
    """Hosts share the coordinator's file system: data is fetched once, nothing is copied."""
    one_host_per_machine: bool = True
    """All hosts of a cluster file are different machines."""
    container_engines: tuple[str, ...] = ("docker", "podman", "apptainer", "enroot")
    """Engines whose containers it can start jobs in."""
    requires: tuple[str, ...] = ()
    """Requirements of the launcher on the coordinator's machine, as for pip, ``accelmark[<extra>]`` included."""
    run_files: tuple[str, ...] = ()
    """Files that the launcher writes to the run directory during a run; manifests exclude them."""


class LauncherOptions(Spec):
    """Base class of the settings that a launcher adds to a cluster file; settings of other launchers are ignored."""

    model_config = ConfigDict(extra="ignore")

    def default_hosts(self) -> Sequence[str]:
        """Return the addresses of the hosts that a cluster file without ``hosts`` means; empty: this machine."""
        return ()

    def host_problems(self, hosts: Sequence[HostSpec]) -> Iterator[str]:
        """Yield what is wrong with ``hosts`` under these settings."""
        yield from ()


O = TypeVar("O", bound=LauncherOptions)  # noqa: E741


load_launcher: Final = partial(load_spec, "launchers", model=LauncherSpec, where="cluster file")


def options_of(model: type[O], cluster: ClusterSpec) -> O:
    """Return a launcher's settings from a cluster that :func:`parse_cluster` returned."""
    return model.model_validate(cluster.options)


def read_cluster(file: Path) -> ClusterSpec:
    """Read a cluster file. Raises SpecError with all problems."""
    values = read_yaml(file)
    if "cases" in values:
        raise SpecError([Problem(str(file), "", "is a run file", "name its cluster file")])
    return parse_cluster({"name": file.stem} | values, str(file))


def parse_cluster(values: Mapping[str, Any], where: str) -> ClusterSpec:
    """Check a cluster file and the settings of its launcher; raise SpecError with every problem."""
    problems = launcher_problems(values, where)
    if not problems and "hosts" not in values:
        launcher = values.get("launcher", ClusterSpec.model_fields["launcher"].default)
        hosts = options_model(launcher).model_validate(values).default_hosts()
        values = {**values, "hosts": [{"address": host} for host in hosts]} if hosts else values
    return parse(ClusterSpec, values, where, problems)


def launcher_problems(values: Mapping[str, Any], where: str, prefix: str = "") -> list[Problem]:
    """Return what is wrong with ``vendor``, ``launcher`` and launchers' settings; ``prefix`` precedes keys."""
    given = {name: value for name, value in values.items() if name not in ClusterSpec.model_fields}
    launcher = values.get("launcher", ClusterSpec.model_fields["launcher"].default)
    known = ClusterSpec.model_fields.keys() | option_names()
    unknown = [name for name in given if name not in known]
    problems = [Problem(where, f"{prefix}{name}", "unknown key", nearest(name, known)) for name in unknown]
    if isinstance(vendor := values.get("vendor"), str):
        try:
            find("vendors", vendor, where)
        except RequestError as error:
            problems.append(Problem(where, f"{prefix}vendor", str(error).removeprefix(f"{where}: ")))
    if launcher not in folders("launchers"):
        hint = nearest(str(launcher), folders("launchers"))
        return [*problems, Problem(where, f"{prefix}launcher", f"unknown launcher {launcher!r}", hint)]
    model = options_model(launcher)
    try:
        model.model_validate(given)
    except ValidationError as error:
        invalid = problems_of(error, model, where)
        problems += [Problem(where, prefix + problem.key, problem.what, problem.hint) for problem in invalid]
    return problems


def unusable_parts(cluster: ClusterSpec) -> list[Problem]:
    """Return a problem for each host, and for a container engine, that the cluster's launcher cannot use."""
    launcher, where = load_launcher(cluster.launcher), f"cluster {cluster.name!r}"
    options = options_of(options_model(cluster.launcher), cluster)
    problems = [Problem(where, "hosts", what) for what in options.host_problems(cluster.hosts)]
    engine = cluster.container.engine if cluster.container is not None else None
    launchers = [load_launcher(name) for name in folders("launchers")]
    if engine is not None and engine not in launcher.container_engines:
        able = " or ".join(other.name for other in launchers if engine in other.container_engines)
        what = f"launcher: {launcher.name} starts no jobs in containers of {engine}"
        hint = f"choose one of {', '.join(launcher.container_engines)}, or the launcher {able}"
        problems.append(Problem(where, "container.engine", what, hint))
    strangers = [host.address for host in cluster.hosts if not is_localhost(host.address)]
    if launcher.is_localhost and (strangers or len(cluster.hosts) > 1):
        others = ", ".join(other.name for other in launchers if not other.is_localhost)
        names = ", ".join(strangers or [host.address for host in cluster.hosts])
        what = f"launcher: {launcher.name} starts everything on this machine, not on {names}"
        problems.append(Problem(where, "hosts", what, f"set launcher to one of: {others}"))
    return problems


def is_localhost(address: str) -> bool:
    """Return whether a name or address is this machine's, without a DNS lookup, which may take long."""
    own = socket.gethostname().lower()
    if address.lower() in {"localhost", own, own.partition(".")[0]}:
        return True
    try:
        family = socket.AF_INET if ipaddress.ip_address(address).version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))  # fails where the address is not this machine's
    except (OSError, ValueError):
        return False
    return True


def launcher_options() -> dict[str, type[LauncherOptions]]:
    """Return the settings that each launcher adds to a cluster file; launchers without settings are left out."""
    models = {name: options_model(name) for name in folders("launchers")}
    return {name: model for name, model in models.items() if model.model_fields}


def option_names() -> set[str]:
    """Return the settings that any known launcher adds to a cluster file."""
    return {name for launcher in folders("launchers") for name in options_model(launcher).model_fields}


def run_files() -> set[str]:
    """Return the files that any known launcher keeps in a run directory."""
    return {name for launcher in folders("launchers") for name in load_launcher(launcher).run_files}


def options_model(launcher: str) -> type[LauncherOptions]:
    """Return the class of the settings that a launcher adds to a cluster file."""
    folder = find("launchers", launcher)
    if not (folder.path / "options.py").is_file():
        return LauncherOptions
    return cast("type[LauncherOptions]", folder_module(folder, "options").Options)
