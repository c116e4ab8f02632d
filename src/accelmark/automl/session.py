"""Read a configuration, and start or resume a search; everything is checked before the first trial starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Final

from accelmark.automl.cluster import WorkerPool, check_capacity, cluster_address, ray_workers, write_node_logs
from accelmark.automl.config import AutomlConfig, LocalCluster, SearchName
from accelmark.automl.controller import Observer, SearchController
from accelmark.automl.dataset import Dataset, open_dataset
from accelmark.automl.journal import NETWORK_FILE, SearchDirectory, first_broken_line, read_journal
from accelmark.automl.model.graph import Network
from accelmark.automl.model.seeds import SEEDS, resolve_network, seed_weights
from accelmark.automl.model.weights import weight_shapes
from accelmark.automl.records import Hyperparameters, WorkerReady
from accelmark.results.rounds.search import CONFIG_FILE, why_ended
from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import load_vendor
from accelmark.spec.plugins.requirements import require
from accelmark.spec.rules import resolve_rules
from accelmark.telemetry.inventory import default_vendor
from accelmark.telemetry.monitor import recording

_PATHS: Final = {"dataset": ("directory", "train_directory", "held_out_directory"), "search": ("initial_weights",)}

_EXTRAS: Final[dict[SearchName, str]] = {"anneal": "accelmark[anneal]", "smac": "accelmark[smac]"}


def load_config(path: Path) -> AutomlConfig:
    """Return the configuration in a search file, to which relative paths are relative; raises SpecError."""
    values = read_yaml(path)
    resolve_rules(values, path)
    config = parse(AutomlConfig, values, str(path))
    changes: dict[str, Any] = {}
    for section, names in _PATHS.items():
        given = getattr(config, section)
        paths = {name: path.parent / one.expanduser() for name in names if (one := getattr(given, name)) is not None}
        changes[section] = given.model_copy(update={name: one.resolve() for name, one in paths.items()})
    if config.network not in SEEDS and (path.parent / config.network).is_file():
        changes["network"] = str((path.parent / config.network).resolve())
    return config.model_copy(update=changes)


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


def check_request(config: AutomlConfig, network: Network, *, seed_trained: bool = False) -> Dataset | None:
    """Check everything that needs nothing to be started; initial weights only if the seed is not trained yet.

    Returns the data where trials run on this machine; else None: the hosts of a cluster check their own.
    """
    tuning = config.tuning
    if (extra := _EXTRAS.get(config.search.method)) is not None:
        require(f"search.method: {config.search.method}", extra)
    # A single searched kernel may be the network's own, so two others are tried.
    kernels = [{"kernel": value} for value in (3, 5, *tuning.kernel)] if tuning.kernel else []
    rates = [{"dropout": value} for value in tuning.dropout or ()]
    plain = Hyperparameters(batch_size=1, learning_rate=1.0)
    for name, values, reason, instead in (
        ("kernel", kernels, "has no spatial convolution except those that read the image", "[]"),
        ("dropout", rates, "has neither dropout nor a dense layer to put it before", "null"),
    ):
        networks = {plain.model_copy(update=value).applied_to(network).digest for value in values}
        if config.schedule.tuning_round is not None and len(networks) == 1:
            what = f"network {network.name!r} {reason}, so no value changes it"
            raise RequestError(f"tuning.{name}: {what}: write tuning.{name}: {instead}")
    if (path := config.search.initial_weights) is not None and not seed_trained:
        expected = weight_shapes(network)
        shapes = {name: array.shape for name, array in seed_weights(path).items()}
        differing = sorted(name for name in {*expected, *shapes} if expected.get(name) != shapes.get(name))
        if differing:
            raise DataError(f"{path}: is not of network {network.name!r}: weights differ: {differing[:6]}")
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


def start_search(
    config: AutomlConfig, root: Path, announce: Callable[[SearchDirectory], None], observer: Observer | None = None
) -> SearchDirectory:
    """Check the request, start the workers, make the directory below ``root``, announce it, and run the search.

    Raises KeyboardInterrupt at SIGINT or SIGTERM before the search runs, or at the second one.
    """
    network = resolve_network(config.network)
    with _on_signals(_interrupt), _workers(config, network, check_request(config, network)) as workers:
        directory = SearchDirectory.create(root, config, network)
        announce(directory)
        with directory.held():
            _run(directory, config, workers, observer)
    return directory


def resume_search(directory: SearchDirectory, observer: Observer | None = None) -> None:
    """Continue a search that was stopped or killed; raises RequestError where it is complete or its data changed."""
    config, network = directory.config(), directory.network()
    with _on_signals(_interrupt), directory.held():
        if first_broken_line(directory.path, islice(read_journal(directory.path), 1)):
            changed = f"{CONFIG_FILE} or {NETWORK_FILE} changed since the search began"
            raise RequestError(f"{directory.path}: {changed}: restore it, or start another search")
        state = directory.state(keeps_epochs=False)
        if state.ended is not None and state.ended.over:
            why = why_ended(state.ended.reason)
            again = "start another one with 'accelmark automl run'"
            raise RequestError(f"{directory.path}: this search has ended ({why}) and cannot be resumed; {again}")
        seed_trained = any(one.id == 0 and one.status != "pending" for one in state.individuals)
        dataset = check_request(config, network, seed_trained=seed_trained)
        with _workers(config, network, dataset) as workers:
            fingerprints = {report.fingerprint for report in workers.ready.values()}
            if {session.dataset_fingerprint for session in state.sessions} - fingerprints:
                raise RequestError(f"{directory.path}: the data are not those that this search began with")
            directory.stop_mark.unlink(missing_ok=True)
            _run(directory, config, workers, observer)


def check_equal_data(ready: Iterable[WorkerReady], dataset: Dataset | None) -> None:
    """Raise RequestError with the hosts and hashes where not all workers opened the same data."""
    found = {report.host: report.fingerprint for report in ready}
    found |= {} if dataset is None else {"this machine": dataset.fingerprint}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{host} {fingerprint[:12]}" for host, fingerprint in sorted(found.items()))
        hashes = f"the data differ between hosts (SHA-256 of labels): {listed}"
        raise RequestError(f"dataset: {hashes}: copy one to the others")


@contextmanager
def _workers(config: AutomlConfig, network: Network, dataset: Dataset | None) -> Iterator[WorkerPool]:
    # Ray prints about lost workers to standard output, which may be read as JSON.
    with (
        redirect_stdout(sys.stderr),
        cluster_address(config.cluster) as address,
        ray_workers(config, network, address=address) as workers,
    ):
        check_equal_data(workers.ready.values(), dataset)
        check_batches(config, workers.ready[0].splits.training)
        yield workers


def _run(directory: SearchDirectory, config: AutomlConfig, workers: WorkerPool, observer: Observer | None) -> None:
    session = len(directory.state().sessions) + 1
    controller = SearchController(directory, config, workers, observer=observer)
    # Hosts of a cluster have their own monitoring.
    monitoring = recording(directory.telemetry(session)) if isinstance(config.cluster, LocalCluster) else nullcontext()

    def stop(number: int, _frame: object) -> None:
        controller.request_stop()
        signal.signal(number, _interrupt)

    with monitoring, _on_signals(stop):
        try:
            controller.run()
        finally:
            write_node_logs(directory.path / "ray" / f"session{session}")


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _on_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    with ExitStack() as former:
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                former.callback(signal.signal, number, signal.signal(number, handle))
        yield
