"""Start or resume a run: everything that can be wrong is found before a trial starts."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from accelmark.automl.config import AddressCluster, AutomlConfig, LocalCluster, SshCluster, resolve_network
from accelmark.automl.data import Dataset
from accelmark.automl.engine.checks import check_batches, check_request
from accelmark.automl.engine.coordinator import Coordinator, Observer
from accelmark.automl.engine.journal import SessionEnded
from accelmark.automl.engine.ray_access import check_answers, guarded, showing_what_is_there
from accelmark.automl.engine.ray_crew import RayCrew
from accelmark.automl.engine.recording import recorded
from accelmark.automl.engine.rundir import RunDirectory
from accelmark.automl.graph import Network
from accelmark.spec.errors import RequestError


@dataclass(frozen=True, slots=True)
class Session:
    """A run, and how the session that drove it ended."""

    run: RunDirectory
    ended: SessionEnded


def start_run(
    config: AutomlConfig,
    root: Path,
    *,
    observer: Observer | None = None,
    announce: Callable[[RunDirectory], None] | None = None,
) -> Session:
    """Check the request, start the workers, make the run's folder and drive the search to its end.

    Raises RequestError, DataError or RunError before any trial when something is wrong with the request.
    """
    network = resolve_network(config)
    with _crew(config, network, check_request(config, network)) as crew:
        run = RunDirectory.created(root, config, network)
        if announce is not None:
            announce(run)
        with run.held():
            return Session(run, _worked(run, config, crew, observer))


def resume_run(run: RunDirectory, *, observer: Observer | None = None) -> Session:
    """Go on with a run that was stopped or killed; raises RequestError when it is over or its data changed."""
    config, network = run.config(), run.network()
    with run.held():
        state = run.state()
        if state.ended is not None and state.ended.over:
            raise RequestError(f"{run.path}: this run is over ({state.ended.reason}); there is nothing to resume")
        seed_trained = any(one.id == 0 and one.standing != "pending" for one in state.individuals)
        dataset = check_request(config, network, seed_trained=seed_trained)
        with _crew(config, network, dataset) as crew:
            known = {session.dataset_fingerprint for session in state.sessions}
            if known and known != crew.fingerprints:
                raise RequestError(f"{run.path}: the data are not those that this run began with")
            run.forget_stop()
            return Session(run, _worked(run, config, crew, observer))


@contextmanager
def _crew(config: AutomlConfig, network: Network, dataset: Dataset | None) -> Iterator[RayCrew]:
    # Ray writes remarks about lost workers to standard output, which belongs to who asked for JSON.
    with redirect_stdout(sys.stderr), _cluster(config) as address:
        crew = RayCrew(config, network, address=address)
        try:
            if len(crew.fingerprints | ({dataset.fingerprint} if dataset else set())) != 1:
                raise RequestError("the workers' hosts hold different data under the same name")
            check_batches(config, crew.splits.training)
            yield crew
        finally:
            crew.close()


@contextmanager
def _cluster(config: AutomlConfig) -> Iterator[str | None]:
    match config.cluster:
        case LocalCluster():
            with guarded():
                yield None
        case AddressCluster(address=address):
            check_answers(address)
            with showing_what_is_there():
                yield address
        case SshCluster():
            from accelmark.automl.engine.ssh_cluster import ssh_cluster

            with ssh_cluster(config.cluster) as address:
                yield address


def _worked(run: RunDirectory, config: AutomlConfig, crew: RayCrew, observer: Observer | None) -> SessionEnded:
    fingerprint, identity = next(iter(crew.fingerprints)), " or ".join(sorted(crew.identities))
    coordinator = Coordinator(run, config, crew, fingerprint=fingerprint, identity=identity, observer=observer)
    with _telemetry(run, config):
        return _driven(coordinator)


@contextmanager
def _telemetry(run: RunDirectory, config: AutomlConfig) -> Iterator[None]:
    """Record this machine where trials run on it; hosts of a cluster are watched by their own monitors."""
    if not isinstance(config.cluster, LocalCluster):
        yield
        return
    number = len(run.state().sessions) + 1 if (run.path / "journal.jsonl").stat().st_size else 1
    with recorded(run.path, number):
        yield


def _driven(coordinator: Coordinator) -> SessionEnded:
    """Drive a run; a first interrupt or termination ends it in order, a second one at once."""

    def end_in_order(number: int, frame: FrameType | None) -> None:
        del frame
        coordinator.ask_to_stop()
        signal.signal(number, signal.default_int_handler)  # a second one ends at once

    if threading.current_thread() is not threading.main_thread():
        return coordinator.work()  # only the main thread may handle signals
    former = [(number, signal.signal(number, end_in_order)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        return coordinator.work()
    finally:
        for number, handler in former:
            signal.signal(number, handler)
