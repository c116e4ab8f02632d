"""The directory of a search: configuration, seed network, journal, weights, lock and stop mark."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import ValidationError

from accelmark.automl.config import AutomlConfig
from accelmark.automl.controller.journal import CONFIG_FILE, JOURNAL_FILE, NETWORK_FILE, SearchState, read_journal
from accelmark.automl.dataset import read_weights
from accelmark.automl.model.network import Network, load_network
from accelmark.automl.model.weights import Array, Weights
from accelmark.run.record.directory import default_path, holder_of, lock_directory
from accelmark.spec.errors import RequestError, RunError


class SearchDirectory:
    """The record of a search: any process may read it, one controller at a time writes."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path

    @staticmethod
    def create(root: Path, config: AutomlConfig, network: Network) -> SearchDirectory:
        """Make the directory of a new search below ``root``, named after the time (UTC) and the configuration."""
        path = default_path(config.name, datetime.now(UTC), root)
        path.mkdir(parents=True)
        (path / CONFIG_FILE).write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        (path / NETWORK_FILE).write_text(network.to_json(), encoding="utf-8")
        return SearchDirectory(path)

    @property
    def name(self) -> str:
        """The directory's name, also that of the search's own study."""
        return self.path.resolve().name

    @property
    def stop_mark(self) -> Path:
        """File whose existence asks the running controller to stop."""
        return self.path / "stop"

    def telemetry(self, session: int) -> Path:
        """Return the directory of a session's telemetry; sessions are numbered from 1."""
        return self.path / "telemetry" / f"session{session}"

    def config(self) -> AutomlConfig:
        """Return the configuration; raises RunError where this is not a search."""
        try:
            return AutomlConfig.model_validate_json((self.path / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValidationError) as error:
            raise RunError(f"{self.path}: is not the directory of a search: {error}") from error

    def network(self) -> Network:
        """Return the seed network."""
        return load_network(self.path / NETWORK_FILE)

    def state(self) -> SearchState:
        """Return the state that the journal gives; the initial state where there is none yet."""
        return SearchState.of(read_journal(self.path)) if (self.path / JOURNAL_FILE).exists() else SearchState()

    def is_running(self) -> bool:
        """Return whether a controller has locked the search."""
        return holder_of(self.path) is not None

    def held(self) -> AbstractContextManager[None]:
        """Lock the search; raises RequestError where another controller has locked it."""
        return lock_directory(self.path, "accelmark automl")

    def _weights(self, individual: int) -> Path:
        return self.path / "weights" / f"{individual}.npz"

    def save_weights(self, individual: int, weights: Weights) -> None:
        """Write an individual's weights; a killed process leaves no incomplete file under their name."""
        path = self._weights(individual)
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(part, **weights)  # type: ignore[arg-type]
        part.replace(path)

    def load_weights(self, individual: int) -> dict[str, Array] | None:
        """Return an individual's weights; None where it has none."""
        path = self._weights(individual)
        return read_weights(path) if path.is_file() else None

    def keep_weights(self, individuals: Collection[int | None]) -> None:
        """Remove the weights of all others, and incomplete files of killed processes."""
        for path in self.path.glob("weights/*.npz"):
            if not path.stem.isdecimal() or int(path.stem) not in individuals:
                path.unlink(missing_ok=True)


def find_search(name: str, root: Path) -> SearchDirectory:
    """Return a search by its directory, by its name below ``root``, or the newest there for ``latest``."""
    for path in (Path(name), root / name):
        if (path / CONFIG_FILE).is_file():
            return SearchDirectory(path)
    found = sorted(path.parent for path in root.glob(f"*/{CONFIG_FILE}"))
    if name == "latest" and found:
        return SearchDirectory(found[-1])
    raise RequestError(f"there is no search in {name!r} or {root / name}")
