"""Read a configuration file and check the request before anything starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from accelmark.automl.config import AutomlConfig, LocalCluster, check_capacity
from accelmark.automl.dataset import Dataset, open_dataset, read_weights
from accelmark.automl.model.network import Network, load_network
from accelmark.automl.model.seeds import SEEDS, seed_network
from accelmark.automl.model.weights import weight_shapes
from accelmark.automl.records import Hyperparameters
from accelmark.compat.aiperf import is_aiperf, read_aiperf
from accelmark.spec.errors import DataError, Problem, RequestError, SpecError, nearest
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import load_vendor
from accelmark.telemetry.detect import default_vendor

_PATHS: Final = {"dataset": ("directory", "train_directory", "held_out_directory"), "search": ("initial_weights",)}


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration, the form of its file, and the parts of it that have no effect, each with the reason."""

    config: AutomlConfig
    form: Literal["accelmark", "aiperf"]
    unused: tuple[str, ...]


def load_config(path: Path) -> LoadedConfig:
    """Read a configuration, AIPerf's or ours; relative paths are relative to the file. Raises SpecError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SpecError([Problem(str(path), "", f"cannot be read: {reason}")]) from error
    if is_aiperf(text):
        aiperf, unused = read_aiperf(text, str(path))
        return LoadedConfig(aiperf, "aiperf", unused)
    config = parse(AutomlConfig, read_yaml(path), str(path))
    changes: dict[str, Any] = {}
    for section, names in _PATHS.items():
        given = getattr(config, section)
        paths = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
        absolute = {name: (path.parent / one.expanduser()).resolve() for name, one in paths.items()}
        changes[section] = given.model_copy(update=absolute)
    if config.network not in SEEDS and (path.parent / config.network).is_file():
        changes["network"] = str((path.parent / config.network).resolve())
    return LoadedConfig(config.model_copy(update=changes), "accelmark", ())


def resolve_network(config: AutomlConfig) -> Network:
    """Return the configured seed network, by name or file; raises SpecError."""
    if config.network in SEEDS:
        return seed_network(config.network)
    path = Path(config.network)
    if path.suffix == ".json" or path.exists():
        return load_network(path)
    raise SpecError([Problem("network", "", f"no seed is called {config.network!r}", nearest(config.network, SEEDS))])


def _check_hyperparameters(config: AutomlConfig, network: Network) -> None:
    """Raise RequestError where a searched hyperparameter changes nothing of the seed network."""
    tuning = config.tuning
    plain = Hyperparameters(batch_size=1, learning_rate=1.0)
    # A single searched kernel may be the network's own, so two others are tried.
    kernels = [{"kernel": value} for value in (3, 5, *tuning.kernel)] if tuning.kernel else []
    rates = [{"dropout": value} for value in tuning.dropout or ()]
    for name, values, reason, instead in (
        ("kernel", kernels, "has no spatial convolution except those that read the image", "[]"),
        ("dropout", rates, "has neither dropout nor a dense layer to put it before", "null"),
    ):
        if values and len({plain.model_copy(update=value).applied_to(network).digest for value in values}) == 1:
            raise RequestError(
                f"tuning.{name}: network {network.name!r} {reason}, so no value changes it:"
                f" write tuning.{name}: {instead}"
            )


def check_batches(config: AutomlConfig, images: int) -> None:
    """Raise RequestError where a batch is larger than the training split of ``images`` images."""
    first = config.schedule.tuning_round
    searched = config.tuning.batch_size if first is not None else ()
    batches = [("tuning.batch_size", batch) for batch in searched]
    if first != 1 or not searched:  # else no trial uses it
        batches.append(("training.batch_size", config.training.batch_size))
    for key, batch in batches:
        if batch > images:
            raise RequestError(f"{key}: a batch of {batch} is larger than the training split of {images} images")


def _check_weights(config: AutomlConfig, network: Network) -> None:
    """Raise DataError where the initial weights cannot be read or do not fit the seed network."""
    path = config.search.initial_weights
    if path is None:
        return
    weights = read_weights(path)
    expected = weight_shapes(network)
    if differing := sorted(set(expected) ^ set(weights)):
        raise DataError(f"{path}: is not of network {network.name!r}: weights differ: {differing[:6]}")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            found = f"{name} has shape {weights[name].shape}, expected {shape}"
            raise DataError(f"{path}: is not of network {network.name!r}: {found}")


def check_request(config: AutomlConfig, network: Network, *, seed_trained: bool = False) -> Dataset | None:
    """Check everything that needs nothing to be started; initial weights only if the seed is not trained yet.

    Returns:
        The data where trials run on this machine; else None: the hosts of a cluster check their own.
    """
    if config.schedule.tuning_round is not None:
        _check_hyperparameters(config, network)
    if not seed_trained:
        _check_weights(config, network)
    if not isinstance(config.cluster, LocalCluster):
        return None
    dataset = open_dataset(config.dataset, network)
    check_batches(config, len(dataset.training))
    return dataset


def dry_run(config: AutomlConfig, network: Network) -> tuple[Dataset | None, tuple[str, ...]]:
    """Check the request without starting it; return the data, and the checks that need a start."""
    dataset = check_request(config, network)
    unchecked: list[str] = []
    if dataset is None:
        unchecked.append("the cluster: whether it can be reached, has the data, and can run all concurrent trials")
    elif not load_vendor(default_vendor()).uses_host_cpu:
        unchecked.append("whether this machine has enough accelerators for all concurrent trials")
    else:
        check_capacity(config, cores=os.cpu_count() or 1, accelerators=0)
    if config.tuning.storage is not None and config.schedule.tuning_round is not None:
        unchecked.append("the study: whether its storage can be opened (which would write to it) and is of this search")
    return dataset, tuple(unchecked)
