"""A run's folder: what it was asked for, its journal, and the marks by which others steer it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from accelmark.automl.config import AutomlConfig
from accelmark.automl.engine.journal import CONFIG, NETWORK, read_journal
from accelmark.automl.engine.state import RunState
from accelmark.automl.graph import Network, load_network
from accelmark.spec.errors import RequestError, RunError

_LOCK: Final = "lock"
_STOP: Final = "stop"


class RunDirectory:
    """The only truth of a run; anyone may read it, one coordinator at a time writes."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path

    @staticmethod
    def created(root: Path, config: AutomlConfig, network: Network) -> RunDirectory:
        """Make a new run's folder, named by the time (UTC) and the configuration's name."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = root / f"{stamp}-{config.name}"
        number = 1
        while path.exists():
            number += 1
            path = root / f"{stamp}-{config.name}-{number}"
        path.mkdir(parents=True)
        (path / CONFIG).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (path / NETWORK).write_text(network.to_json(), encoding="utf-8")
        return RunDirectory(path)

    @property
    def name(self) -> str:
        """The folder's own name, which also names the run's study."""
        return self.path.resolve().name

    @property
    def weights(self) -> Path:
        """Where trained weights are kept."""
        return self.path / "weights"

    def config(self) -> AutomlConfig:
        """Return what the run was asked for; raises RunError when this is no run."""
        try:
            return AutomlConfig.model_validate_json((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise RunError(f"{self.path}: no search was run here: {error}") from error

    def network(self) -> Network:
        """Return the seed network of the run."""
        return load_network(self.path / NETWORK)

    def state(self) -> RunState:
        """Return the run's state as its journal has it."""
        return RunState.folded(read_journal(self.path))

    def ask_to_stop(self) -> None:
        """Leave the mark that makes a running coordinator stop."""
        (self.path / _STOP).touch()

    def stop_asked(self) -> bool:
        """Tell whether somebody asked the run to stop."""
        return (self.path / _STOP).exists()

    def forget_stop(self) -> None:
        """Take the mark away."""
        (self.path / _STOP).unlink(missing_ok=True)

    def is_running(self) -> bool:
        """Tell whether a coordinator holds the run now."""
        try:
            with self.held():
                return False
        except RequestError:
            return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run alone; raises RequestError when another coordinator does. A killed one lets go by itself."""
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RequestError(f"{self.path}: this run is under way already") from error
            yield
        finally:
            os.close(descriptor)


def find_run(name: str, root: Path) -> RunDirectory:
    """Return a run by its folder, or by its name below ``root``; ``latest`` is the newest there."""
    for path in (Path(name), root / name):
        if (path / CONFIG).is_file():
            return RunDirectory(path)
    if name == "latest" and root.is_dir():
        runs = sorted(path.parent for path in root.glob(f"*/{CONFIG}"))
        if runs:
            return RunDirectory(runs[-1])
    raise RequestError(f"no search was run in {name!r}, nor in {root / name}")
