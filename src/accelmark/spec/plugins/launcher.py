"""The contract of a launcher's folder: ``launcher.yaml`` and the settings that it adds to a cluster file.

A folder ``run/launchers/<name>/`` (or one found as any plug-in is) has ``launcher.yaml`` (:class:`LauncherSpec`),
``launcher.py`` with ``create(plan, run)`` (see :mod:`accelmark.run.launchers.launcher`), and, where the launcher has
settings of its own, ``options.py`` with a class ``Options``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from accelmark.spec.catalog import find, folder_module, folders
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.model import Spec, parse, problems_of
from accelmark.spec.yaml_file import read_yaml


class LauncherSpec(Spec):
    """What planning, preflight and reports have to know about a launcher."""

    name: str
    is_localhost: bool = False
    """Every job runs on the machine of the coordinator, so a cluster has one host."""
    shares_filesystem: bool = True
    """Hosts see the coordinator's files at the same paths: data is fetched once, nothing is copied."""
    one_host_per_machine: bool = True
    """Two hosts of a cluster file are never the same machine."""
    run_files: tuple[str, ...] = ()
    """Files that the launcher keeps in the run directory while it runs; manifests leave them out."""


class LauncherOptions(Spec):
    """Base class of the settings that a launcher adds to a cluster file."""

    def host_problems(self, hosts: Sequence[HostSpec]) -> Iterator[str]:
        """Yield what is wrong with ``hosts`` under these settings."""
        yield from ()


O = TypeVar("O", bound=LauncherOptions)  # noqa: E741


def load_launcher(name: str, where: str = "cluster file") -> LauncherSpec:
    """Read ``launcher.yaml`` of one launcher.

    Raises:
        RequestError: there is no such launcher; the nearest name is suggested.
    """
    file = find("launchers", name, where).path / "launcher.yaml"
    spec = parse(LauncherSpec, read_yaml(file), str(file))
    if spec.name != name:
        raise SpecError([Problem(str(file), "name", f"is {spec.name!r}, but the folder is {name!r}")])
    return spec


def options_of(model: type[O], cluster: ClusterSpec) -> O:
    """Return a launcher's settings from a cluster file that was checked by :func:`parse_cluster`."""
    return model.model_validate(_of(model, cluster.options))


def parse_cluster(values: Mapping[str, Any], where: str) -> ClusterSpec:
    """Check a cluster file, with the settings of its launcher.

    Raises:
        SpecError: with every problem.
    """
    problems = launcher_problems(values, where)
    try:
        cluster = parse(ClusterSpec, values, where)
    except SpecError as error:
        raise SpecError([*error.problems, *problems]) from error
    if problems:
        raise SpecError(problems)
    return cluster


def launcher_problems(values: Mapping[str, Any], where: str, prefix: str = "") -> list[Problem]:
    """Return what is wrong with ``launcher`` and the settings of launchers in a cluster file.

    Settings of launchers other than the one named are allowed, so that a file stays valid when ``launcher`` changes.

    Args:
        values: the cluster file as it was read.
        where: its name, for errors.
        prefix: what its keys are below, with a dot at the end.
    """
    given = {name: value for name, value in values.items() if name not in ClusterSpec.model_fields}
    launcher = values.get("launcher", ClusterSpec.model_fields["launcher"].default)
    known = ClusterSpec.model_fields.keys() | option_names()
    problems = [
        Problem(where, f"{prefix}{name}", "unknown key", nearest(name, known)) for name in given if name not in known
    ]
    if launcher not in folders("launchers"):
        hint = nearest(str(launcher), folders("launchers"))
        return [*problems, Problem(where, f"{prefix}launcher", f"unknown launcher {launcher!r}", hint)]
    model = options_model(launcher)
    try:
        model.model_validate(_of(model, given))
    except ValidationError as error:
        found = problems_of(error, model, where)
        problems += [Problem(where, prefix + each.key, each.what, each.hint) for each in found]
    return problems


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
    model: type[LauncherOptions] = folder_module(folder, "options").Options
    return model


def _of(model: type[LauncherOptions], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in model.model_fields}
