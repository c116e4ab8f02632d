"""A container around the node agent: what the engine is asked for."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final, final

from accelmark.run.sandboxes.sandbox import Inside
from accelmark.spec.cluster import ContainerSpec
from accelmark.spec.vendor import VendorSpec

ENTER: Final = "accelmark/run/sandboxes/enter.sh"
"""What sets the container up before the agent starts, relative to the code."""


@final
class ContainerSandbox:
    """Runs commands in a container of ``image`` on the host's network, which ends and is removed with them.

    Args:
        spec: the cluster's wishes.
        vendor: what its devices need.
        image: the image's name on the hosts.
        code: where AccelMark is on the host, mounted at the same path.
        framework_dirs: directories that may hold ``requirements.txt``, ``environment_variables.sh`` and ``csrc``,
            the vendor's before the case's.
    """

    def __init__(
        self, spec: ContainerSpec, vendor: VendorSpec, image: str, code: PurePosixPath, framework_dirs: list[Path]
    ) -> None:
        self._spec = spec
        self._vendor = vendor
        self._image = image
        self._code = code
        self._framework_dirs = framework_dirs

    def command(self, python: str, inside: Inside) -> list[str]:
        """Return the engine's command; the host's ``python`` plays no part in it."""
        spec, defaults = self._spec, self._vendor.container
        command = [spec.engine, "run", "--rm", "--name", inside.name, "--network", "host", "--ipc"]
        command += ["private", "--shm-size", spec.shm_size] if spec.shm_size else ["host"]
        if spec.privileged:
            command.append("--privileged")
        command += [*defaults.options, *spec.options]
        for mount in (*defaults.mounts, *spec.mounts):
            command += ["--volume", mount]
        writable = list(dict.fromkeys(str(path) for path in inside.writable))
        readable = dict.fromkeys([str(self._code), *(str(path) for path in inside.readable)])
        mounted = [mount.split(":")[0] for mount in (*defaults.mounts, *spec.mounts)]
        for path in writable:
            command += ["--volume", f"{path}:{path}"]
        for path in readable:
            if path not in writable and not _is_below(path, [*mounted, *writable]):
                command += ["--volume", f"{path}:{path}:ro"]
        environment = {**defaults.environment, **inside.environment}
        if spec.pip_source is not None:
            environment["PIP_INDEX_URL"] = spec.pip_source
        for name, value in environment.items():
            command += ["--env", f"{name}={value}"]
        command += ["--entrypoint", "sh", self._image, str(self._code / ENTER), spec.python]
        return [*command, *map(str, self._framework_dirs), "--", "-m", inside.module, *inside.arguments]

    def clean_up(self, name: str) -> list[str] | None:
        """Return the command that ends and removes the container."""
        return [self._spec.engine, "rm", "--force", name]


def _is_below(path: str, places: list[str]) -> bool:
    return any(path == place or Path(path).is_relative_to(place) for place in places)
