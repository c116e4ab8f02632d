"""Workers of a search as Ray actors, and the protocol between the controller and its workers."""

from __future__ import annotations

import os
import pkgutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, Literal

from accelmark.automl.config import AutomlConfig, check_capacity, report_interval_s
from accelmark.automl.messages import Message, TrainedWeights, TrialOrder, WorkerLost, WorkerReady
from accelmark.automl.model.network import Network
from accelmark.spec.errors import RunError

_WORKER: Final = "accelmark.automl.trial.worker:TrialWorker"  # by name because it is job side
_PACKED_LOGS: Final = "accelmark.automl.trial.worker:packed_logs"
_LOGS_S: Final = 20.0
_LAST_DRAIN_S: Final = 30.0
_START_S: Final = 5.0
_IDLE_S: Final = 0.02
_DISABLED: Final = ("RAY_DEDUP_LOGS", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")


class WorkerPool:
    """Runs trials on Ray actors made by ``make`` and ended by ``kill``; ``ready`` is the last report of each worker.

    All are ready when the pool is made; raises RunError with the reason where one is not.
    """

    def __init__(self, size: int, make: Callable[[], Any], kill: Callable[[Any], None]) -> None:
        self.size = size
        self._make: Final = make
        self._kill: Final = kill
        self._actors: dict[int, Any] = {}
        self.ready: dict[int, WorkerReady] = {}
        self._pending: dict[Future[Any], tuple[int, str]] = {}
        """Calls that were not answered yet: worker and method."""
        self._done: Final[SimpleQueue[Future[Any]]] = SimpleQueue()
        self._training: set[int] = set()
        self._drain_s: Final = report_interval_s(size)
        for worker in range(size):
            self.replace(worker)
        while len(self.ready) < size:
            for worker, message in self.listen(_START_S):
                if isinstance(message, WorkerLost):
                    raise RunError(f"worker {worker} cannot start: {message.reason}")

    def close(self) -> None:
        """End all workers."""
        for actor in self._actors.values():
            self._kill(actor)

    def _submit(self, worker: int, method: str, *arguments: object) -> Future[Any]:
        future: Future[Any] = getattr(self._actors[worker], method).remote(*arguments).future()
        return future

    def _call(self, worker: int, method: Literal["ready", "drain", "run"], *arguments: object) -> None:
        future = self._submit(worker, method, *arguments)
        self._pending[future] = worker, method
        future.add_done_callback(self._done.put)

    def start(self, worker: int, order: TrialOrder, weights: TrainedWeights) -> None:
        """Give an idle worker a trial."""
        self._training.add(worker)
        self._call(worker, "run", order, weights)
        self._call(worker, "drain", self._drain_s)

    def cancel(self, worker: int) -> None:
        """Ask a worker to cut its trial."""
        self._submit(worker, "cancel")

    def replace(self, worker: int) -> None:
        """Kill a worker and start a new one."""
        self._pending = {future: call for future, call in self._pending.items() if call[0] != worker}
        self._training.discard(worker)
        if worker in self._actors:
            self._kill(self._actors[worker])
        self._actors[worker] = self._make()
        self._call(worker, "ready")

    def listen(self, timeout_s: float) -> list[tuple[int, Message]]:
        """Return messages with their workers; waits at most ``timeout_s`` for the first."""
        done: list[Future[Any]] = []
        with suppress(Empty):
            done.append(self._done.get(timeout=timeout_s if self._pending else min(timeout_s, _IDLE_S)))
            while True:
                done.append(self._done.get_nowait())
        # Reports before results: the last epoch is reported before the trial's end.
        ordered = sorted(done, key=lambda future: self._pending.get(future, (0, ""))[1] == "run")
        return [message for future in ordered if future in self._pending for message in self._messages(future)]

    def _messages(self, future: Future[Any]) -> list[tuple[int, Message]]:
        worker, method = self._pending.pop(future)
        if method == "run":
            self._training.discard(worker)
        try:
            value = future.result()
        except Exception as error:  # noqa: BLE001 - any failure means that the worker is lost
            if method == "drain" and worker in self._training:
                return []  # the result's future fails too and is reported
            is_memory = type(error).__name__ == "OutOfMemoryError"
            return [(worker, WorkerLost("out-of-memory" if is_memory else "lost", _error_line(str(error))))]
        if method == "ready":
            self.ready[worker] = value
            return [(worker, value)]
        if method == "drain":
            if worker in self._training:
                self._call(worker, "drain", self._drain_s)
            return [(worker, message) for message in value]
        drains = [one for one, call in self._pending.items() if call == (worker, "drain")]
        for one in drains:
            del self._pending[one]
        found: list[tuple[int, Message]] = []
        with suppress(Exception):  # the worker may be lost now, but the trial's result is known
            for one in (*drains, self._submit(worker, "drain", self._drain_s)):
                found += [(worker, message) for message in one.result(_LAST_DRAIN_S)]
        return [*found, (worker, value)]


def _error_line(text: str) -> str:
    """Return the line with the error's type and message: the last of a traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return errors[-1] if errors else lines[0] if lines else "the worker is gone"


@contextmanager
def ray_workers(config: AutomlConfig, network: Network, *, address: str | None) -> Iterator[WorkerPool]:
    """Provide workers as Ray actors; accelerators and cores are reserved, so that no two trials share them.

    ``address`` None starts Ray on this machine, which ends afterwards. Raises RunError where a worker cannot start.
    """
    with environment_restored(), tempfile.TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True) as folder:
        import ray  # reads the authentication mode of the environment when it is imported

        os.environ.update({name: "0" for name in _DISABLED if name not in os.environ})
        try:
            with _handler_of_sigterm_kept():
                _connect(ray, address, folder)
            actor_class, arguments = _actor_class(ray, config, network)
            make, kill = partial(actor_class.remote, *arguments), partial(ray.kill, no_restart=True)
            with closing(WorkerPool(config.schedule.concurrency, make, kill)) as workers:
                yield workers
        finally:
            ray.shutdown()


def write_node_logs(folder: Path) -> None:
    """Write the logs of Ray's processes on each node of the cluster to ``<address>.tar.gz``.

    Nodes that do not answer in time are left out, all of them where the cluster is gone.
    """
    import ray

    if not ray.is_initialized():
        return
    pack = ray.remote(pkgutil.resolve_name(_PACKED_LOGS))
    with suppress(ray.exceptions.RayError):
        nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]
        addresses = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        own = {address: {f"node:{address}": 0.001} for address in addresses}
        sent = {pack.options(num_cpus=0, max_retries=0, resources=own[at]).remote(): at for at in addresses}
        folder.mkdir(parents=True, exist_ok=True)
        for reference in ray.wait(list(sent), num_returns=len(sent), timeout=_LOGS_S)[0]:
            (folder / f"{sent[reference]}.tar.gz").write_bytes(ray.get(reference))


@contextmanager
def _handler_of_sigterm_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces; a SIGTERM in the meantime raises KeyboardInterrupt."""
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:  # from Ray's handler
        raise KeyboardInterrupt from error
    finally:
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            signal.signal(signal.SIGTERM, former)


@contextmanager
def environment_restored() -> Iterator[None]:
    """Restore this process's variables afterwards: Ray sets further ones, which no later run may inherit."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _connect(ray: Any, address: str | None, folder: str) -> None:
    """Start Ray here or connect to the cluster at an address; raises RunError where that fails."""
    own = {"include_dashboard": False, "_temp_dir": folder}
    options: dict[str, Any] = {"address": address} if address else own
    for is_last in (False, True):
        try:
            ray.init(log_to_driver=False, configure_logging=False, namespace="accelmark", **options)
            return
        except Exception as error:
            ray.shutdown()
            if address is not None:
                raise RunError(
                    f"cannot connect to Ray at {address}: {error}. Check that it runs there, that it is Ray"
                    f" {ray.__version__} as here, and that its token, if it has one, is in RAY_AUTH_TOKEN or"
                    " ~/.ray/auth_token"
                ) from error
            # Ray allows its own start half a minute, too little on a machine with a busy disk or busy cores.
            if is_last or "timed out during startup" not in str(error):
                raise RunError(f"Ray cannot be started: {error}") from error


def _actor_class(ray: Any, config: AutomlConfig, network: Network) -> tuple[Any, tuple[object, ...]]:
    resources = ray.cluster_resources()
    devices = config.training.devices_per_trial
    cores, accelerators = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
    check_capacity(config, cores=cores, accelerators=accelerators)
    threads = 0 if accelerators else max(1, cores // (config.schedule.concurrency * devices))
    reserved = {"num_gpus": devices, "num_cpus": 1} if accelerators else {"num_cpus": devices}
    # Several threads let the actor answer while it trains.
    options = {"max_concurrency": 4, "max_restarts": 0, **reserved}
    actor = ray.remote(pkgutil.resolve_name(_WORKER)).options(**options)
    return actor, (config.dataset, network, devices, threads)
