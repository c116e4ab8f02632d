"""Read a configuration file and check the request before anything starts."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from accelmark.automl.config import AutomlConfig, LocalCluster, check_capacity
from accelmark.automl.dataset import Dataset, open_dataset, read_weights
from accelmark.automl.model.network import Network
from accelmark.automl.model.seeds import SEEDS, resolve_network
from accelmark.automl.model.weights import weight_shapes
from accelmark.automl.records import Hyperparameters
from accelmark.compat.aiperf import is_aiperf, read_aiperf
from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import load_vendor
from accelmark.telemetry.detect import default_vendor

_PATHS: Final = {"dataset": ("directory", "train_directory", "held_out_directory"), "search": ("initial_weights",)}


def load_config(path: Path) -> tuple[AutomlConfig, tuple[str, ...]]:
    """Read a configuration, AIPerf's or ours; relative paths are relative to the file.

    Returns:
        The configuration, and the parts of an AIPerf file that have no effect, each with the reason.

    Raises:
        SpecError: with all problems.
    """
    with suppress(OSError, UnicodeDecodeError):  # read_yaml reports these
        text = path.read_text(encoding="utf-8")
        if is_aiperf(text):
            return read_aiperf(text, str(path))
    config = parse(AutomlConfig, read_yaml(path), str(path))
    changes: dict[str, Any] = {}
    for section, names in _PATHS.items():
        given = getattr(config, section)
        paths = {name: path.parent / one.expanduser() for name in names if (one := getattr(given, name)) is not None}
        changes[section] = given.model_copy(update={name: one.resolve() for name, one in paths.items()})
    if config.network not in SEEDS and (path.parent / config.network).is_file():
        changes["network"] = str((path.parent / config.network).resolve())
    return config.model_copy(update=changes), ()


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
            what = f"network {network.name!r} {reason}, so no value changes it"
            raise RequestError(f"tuning.{name}: {what}: write tuning.{name}: {instead}")


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


def _check_weights(path: Path, network: Network) -> None:
    """Raise DataError where the initial weights cannot be read or do not fit the seed network."""
    weights, expected = read_weights(path), weight_shapes(network)
    what = f"{path}: is not of network {network.name!r}"
    if differing := sorted(set(expected) ^ set(weights)):
        raise DataError(f"{what}: weights differ: {differing[:6]}")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise DataError(f"{what}: {name} has shape {weights[name].shape}, expected {shape}")


def check_request(config: AutomlConfig, network: Network, *, seed_trained: bool = False) -> Dataset | None:
    """Check everything that needs nothing to be started; initial weights only if the seed is not trained yet.

    Returns:
        The data where trials run on this machine; else None: the hosts of a cluster check their own.
    """
    if config.schedule.tuning_round is not None:
        _check_hyperparameters(config, network)
    if config.search.initial_weights is not None and not seed_trained:
        _check_weights(config.search.initial_weights, network)
    if not isinstance(config.cluster, LocalCluster):
        return None
    dataset = open_dataset(config.dataset, network)
    check_batches(config, len(dataset.training))
    return dataset


def check_without_start(config: AutomlConfig) -> tuple[Dataset | None, list[str]]:
    """Check the request; return the data, and the checks that need a start."""
    dataset = check_request(config, resolve_network(config.network))
    unchecked: list[str] = []
    if dataset is None:
        unchecked.append("the cluster: whether it can be reached, has the data, and can run all concurrent trials")
    elif not load_vendor(default_vendor()).uses_host_cpu:
        unchecked.append("whether this machine has enough accelerators for all concurrent trials")
    else:
        check_capacity(config, cores=os.cpu_count() or 1, accelerators=0)
    if config.tuning.storage is not None and config.schedule.tuning_round is not None:
        unchecked.append("the study: whether its storage can be opened (which would write to it) and is of this search")
    return dataset, unchecked
