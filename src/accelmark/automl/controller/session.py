"""Start or resume a search; everything is checked before the first trial starts."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from accelmark.automl.config import AutomlConfig, LocalCluster
from accelmark.automl.controller.cluster import cluster_address
from accelmark.automl.controller.controller import Observer, SearchController
from accelmark.automl.controller.directory import SearchDirectory
from accelmark.automl.controller.journal import SessionEnded
from accelmark.automl.controller.request import check_batches, check_request, resolve_network
from accelmark.automl.dataset import Dataset
from accelmark.automl.model.network import Network
from accelmark.automl.pool import RayPool
from accelmark.spec.errors import RequestError
from accelmark.telemetry.monitor import recording


class Session(NamedTuple):
    """A search, and how its session ended."""

    directory: SearchDirectory
    ended: SessionEnded


def start_search(
    config: AutomlConfig,
    root: Path,
    *,
    observer: Observer | None = None,
    announce: Callable[[SearchDirectory], None] | None = None,
) -> Session:
    """Check the request, start the workers, make the directory below ``root``, and run the search.

    Raises:
        AccelmarkError: the request is wrong, or the cluster does not start; no directory was made.
    """
    network = resolve_network(config.network)
    with _workers(config, network, check_request(config, network)) as workers:
        directory = SearchDirectory.create(root, config, network)
        if announce is not None:
            announce(directory)
        with directory.held():
            return Session(directory, _run(directory, config, workers, observer))


def resume_search(directory: SearchDirectory, *, observer: Observer | None = None) -> Session:
    """Continue a search that was stopped or killed; raises RequestError where it is complete or its data changed."""
    config, network = directory.config(), directory.network()
    with directory.held():
        state = directory.state()
        if state.ended is not None and state.ended.over:
            raise RequestError(f"{directory.path}: this search is over ({state.ended.reason}) and cannot be resumed")
        seed_trained = any(one.id == 0 and one.status != "pending" for one in state.individuals)
        dataset = check_request(config, network, seed_trained=seed_trained)
        with _workers(config, network, dataset) as workers:
            fingerprints = {report.fingerprint for report in workers.ready.values()}
            if {session.dataset_fingerprint for session in state.sessions} - fingerprints:
                raise RequestError(f"{directory.path}: the data are not those that this search began with")
            directory.stop_mark.unlink(missing_ok=True)
            return Session(directory, _run(directory, config, workers, observer))


@contextmanager
def _workers(config: AutomlConfig, network: Network, dataset: Dataset | None) -> Iterator[RayPool]:
    # Ray prints about lost workers to standard output, which may be read as JSON.
    with redirect_stdout(sys.stderr), cluster_address(config.cluster) as address:
        workers = RayPool(config, network, address=address)
        try:
            fingerprints = {report.fingerprint for report in workers.ready.values()}
            if len(fingerprints | ({dataset.fingerprint} if dataset else set())) != 1:
                raise RequestError("the workers' hosts have different data under the same name")
            check_batches(config, workers.ready[0].splits.training)
            yield workers
        finally:
            workers.close()


def _run(directory: SearchDirectory, config: AutomlConfig, workers: RayPool, observer: Observer | None) -> SessionEnded:
    number = len(directory.state().sessions) + 1
    controller = SearchController(directory, config, workers, observer=observer)
    # Hosts of a cluster have their own monitoring.
    local = isinstance(config.cluster, LocalCluster)
    telemetry = recording(directory.telemetry(number)) if local else nullcontext()
    with telemetry:
        return _run_with_signals(controller)


def _run_with_signals(controller: SearchController) -> SessionEnded:
    """Run a session; the first SIGINT or SIGTERM ends it gracefully, the second one at once."""

    def request_stop(number: int, frame: FrameType | None) -> None:
        del frame
        controller.request_stop()
        signal.signal(number, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        return controller.run()  # only the main thread may handle signals
    former = [(number, signal.signal(number, request_stop)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        return controller.run()
    finally:
        for number, handler in former:
            signal.signal(number, handler)
