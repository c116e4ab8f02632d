"""Start or resume a search; everything is checked before the first trial starts."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

from accelmark.automl.config import AutomlConfig, LocalCluster
from accelmark.automl.controller.cluster import cluster_address
from accelmark.automl.controller.controller import Observer, SearchController
from accelmark.automl.controller.directory import SearchDirectory
from accelmark.automl.controller.request import check_batches, check_request
from accelmark.automl.dataset import Dataset
from accelmark.automl.model.network import Network
from accelmark.automl.model.seeds import resolve_network
from accelmark.automl.pool import WorkerPool, ray_workers
from accelmark.spec.errors import RequestError
from accelmark.telemetry.monitor import recording


def start_search(
    config: AutomlConfig, root: Path, announce: Callable[[SearchDirectory], None], observer: Observer | None = None
) -> SearchDirectory:
    """Check the request, start the workers, make the directory below ``root``, announce it, and run the search.

    Raises:
        AccelmarkError: the request is wrong, or the cluster does not start; no directory was made.
    """
    network = resolve_network(config.network)
    with _workers(config, network, check_request(config, network)) as workers:
        directory = SearchDirectory.create(root, config, network)
        announce(directory)
        with directory.held():
            _run(directory, config, workers, observer)
    return directory


def resume_search(directory: SearchDirectory, observer: Observer | None = None) -> None:
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
            _run(directory, config, workers, observer)


@contextmanager
def _workers(config: AutomlConfig, network: Network, dataset: Dataset | None) -> Iterator[WorkerPool]:
    # Ray prints about lost workers to standard output, which may be read as JSON.
    with (
        redirect_stdout(sys.stderr),
        cluster_address(config.cluster) as address,
        ray_workers(config, network, address=address) as workers,
    ):
        fingerprints = {report.fingerprint for report in workers.ready.values()}
        if len(fingerprints | ({dataset.fingerprint} if dataset else set())) != 1:
            raise RequestError("the workers' hosts have different data under the same name")
        check_batches(config, workers.ready[0].splits.training)
        yield workers


def _run(directory: SearchDirectory, config: AutomlConfig, workers: WorkerPool, observer: Observer | None) -> None:
    telemetry = directory.telemetry(len(directory.state().sessions) + 1)
    controller = SearchController(directory, config, workers, observer=observer)
    # Hosts of a cluster have their own monitoring.
    monitoring = recording(telemetry) if isinstance(config.cluster, LocalCluster) else nullcontext()
    with monitoring, _on_first_signal(controller.request_stop):
        controller.run()


@contextmanager
def _on_first_signal(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` on the first SIGINT or SIGTERM; the second one ends the context at once."""

    def handle(number: int, _frame: object) -> None:
        act()
        signal.signal(number, signal.default_int_handler)

    # Only the main thread may handle signals.
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    former = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
