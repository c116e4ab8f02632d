"""Run the node agent in a container: the command line of the engine."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final, final
from urllib.parse import urlsplit

from accelmark.run.agent.host import DROP_CACHES, DROP_CACHES_VARIABLE
from accelmark.run.sandboxes.sandbox import ModuleCommand
from accelmark.spec.cluster import ContainerSpec
from accelmark.spec.plugins.vendor import VendorSpec

ENTER: Final = "accelmark/run/sandboxes/enter.sh"
"""Installs the packages that the agent lacks before it starts; relative to the code."""
_DROP_CACHES_INSIDE: Final = "/run/accelmark-drop-caches"
"""Where the host's drop_caches file is mounted: the container's own is read-only."""


@final
class ContainerSandbox:
    """Runs commands in a container of ``image`` on the host's network; it is removed when they end.

    Args:
        spec: the container settings of the cluster file.
        vendor: declares what its devices need.
        image: the image's name on the hosts.
        code: where AccelMark is on the host, mounted at the same path.
        clear_caches: whether the agent drops the host's page cache.
    """

    def __init__(
        self, spec: ContainerSpec, vendor: VendorSpec, image: str, code: PurePosixPath, *, clear_caches: bool = False
    ) -> None:
        self._spec = spec
        self._vendor = vendor
        self._image = image
        self._code = code
        self._clear_caches = clear_caches

    def command(self, python: str, inside: ModuleCommand) -> list[str]:
        """Return the engine's command; the host's ``python`` is not used."""
        spec, defaults = self._spec, self._vendor.container
        command = [spec.engine, "run", "--rm", "--name", inside.name, "--network", "host", "--ipc"]
        command += ["private", "--shm-size", spec.shm_size] if spec.shm_size else ["host"]
        if spec.privileged:
            command.append("--privileged")
        command += [*defaults.options, *spec.options]
        for mount in (*defaults.mounts, *spec.mounts):
            command += ["--volume", mount]
        places = dict.fromkeys(str(path) for path in inside.writable)
        writable = [path for path in places if not _is_below(path, [other for other in places if other != path])]
        readable = dict.fromkeys([str(self._code), *(str(path) for path in inside.readable)])
        mounted = [mount.split(":")[0] for mount in (*defaults.mounts, *spec.mounts)]
        for path in writable:
            command += ["--volume", f"{path}:{path}"]
        for path in readable:
            if path not in writable and not _is_below(path, [*mounted, *writable]):
                command += ["--volume", f"{path}:{path}:ro"]
        environment = {**defaults.environment, **inside.environment}
        environment |= _pip_variables(spec.pip_source)
        if self._clear_caches:
            command += ["--volume", f"{DROP_CACHES}:{_DROP_CACHES_INSIDE}"]
            environment[DROP_CACHES_VARIABLE] = _DROP_CACHES_INSIDE
        for name, value in environment.items():
            command += ["--env", f"{name}={value}"]
        command += ["--entrypoint", "sh", self._image, str(self._code / ENTER), spec.python]
        return [*command, "-m", inside.module, *inside.arguments]

    def removal(self, name: str) -> list[str] | None:
        """Return the command that ends and removes the container."""
        return [self._spec.engine, "rm", "--force", name]


def _pip_variables(source: str | None) -> dict[str, str]:
    """Return pip's variables for a package index; one without TLS is trusted because the cluster file names it."""
    if source is None:
        return {}
    parts = urlsplit(source)
    trusted = {"PIP_TRUSTED_HOST": parts.netloc.rpartition("@")[2]} if parts.scheme == "http" else {}
    return {"PIP_INDEX_URL": source, **trusted}


def _is_below(path: str, places: list[str]) -> bool:
    return any(path == place or Path(path).is_relative_to(place) for place in places)
