"""Read a configuration file of either kind and check all of it before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from accelmark.automl.config.aiperf import is_aiperf, read_aiperf
from accelmark.automl.config.model import AutomlConfig
from accelmark.automl.graph import SEEDS, Network, load_network, seed_network
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.model import parse
from accelmark.spec.yaml_file import read_yaml


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, which form it was written in, and what of it had no effect."""

    config: AutomlConfig
    form: Literal["accelmark", "aiperf"]
    unused: tuple[str, ...]


def load_config(path: Path) -> Loaded:
    """Read a configuration; raises SpecError with every problem. Relative paths are taken from the file's folder."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError([Problem(str(path), "", f"cannot be read: {why}")]) from error
    if is_aiperf(text):
        config, unused = read_aiperf(text, str(path))
        return Loaded(config, "aiperf", unused)
    return Loaded(_with_absolute_paths(parse(AutomlConfig, read_yaml(path), str(path)), path.parent), "accelmark", ())


def resolve_network(config: AutomlConfig, base: Path | None = None) -> Network:
    """Return the seed network that a configuration names, by seed name or file; raises SpecError."""
    if config.network in SEEDS:
        return seed_network(config.network)
    path = (base or Path()) / config.network
    if path.suffix == ".json" or path.exists():
        return load_network(path)
    raise SpecError([Problem("network", "", f"no seed is called {config.network!r}", nearest(config.network, SEEDS))])


def _with_absolute_paths(config: AutomlConfig, base: Path) -> AutomlConfig:
    def absolute(path: Path | None) -> Path | None:
        return None if path is None else (base / path.expanduser()).resolve()

    dataset = config.dataset.model_copy(
        update={
            name: absolute(getattr(config.dataset, name))
            for name in ("directory", "train_directory", "held_out_directory")
        }
    )
    search = config.search.model_copy(update={"initial_weights": absolute(config.search.initial_weights)})
    network = config.network
    if network not in SEEDS and (base / network).is_file():
        network = str((base / network).resolve())
    return config.model_copy(update={"dataset": dataset, "search": search, "network": network})
