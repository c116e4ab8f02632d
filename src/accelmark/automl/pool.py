"""Workers of a search as Ray actors, and the protocol between the controller and its workers."""

from __future__ import annotations

import os
import pkgutil
import tempfile
import time
from abc import ABC, abstractmethod
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, Final, Literal

from accelmark.automl.config import AutomlConfig, check_capacity
from accelmark.automl.messages import Message, TrainedWeights, TrialOrder, WorkerLost, WorkerReady
from accelmark.automl.model.network import Network
from accelmark.spec.errors import RunError

WORKER: Final = "accelmark.automl.workers.worker:TrialWorker"
"""The class of the workers, by name because it is job side."""
_DRAIN_S: Final = 0.5
_LAST_DRAIN_S: Final = 30.0
_START_S: Final = 5.0
_IDLE_S: Final = 0.02
_RAY_VARIABLES: Final = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class WorkerPool(ABC):
    """Runs trials on workers whose methods are called through futures; ``ready`` is the last report of each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ready: dict[int, WorkerReady] = {}
        self._pending: dict[Future[Any], tuple[int, str]] = {}
        """Calls that were not answered yet: worker and method."""
        self._training: set[int] = set()

    @abstractmethod
    def _submit(self, worker: int, method: str, *arguments: object) -> Future[Any]:
        """Call a method of a worker."""

    @abstractmethod
    def _restart(self, worker: int) -> None:
        """Kill a worker, if it runs, and start a new one."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def _call(self, worker: int, method: Literal["ready", "drain", "run"], *arguments: object) -> None:
        self._pending[self._submit(worker, method, *arguments)] = worker, method

    def _start_all(self) -> None:
        """Start all workers and wait until they are ready; raises RunError with the reason where one is not."""
        for worker in range(self.size):
            self.replace(worker)
        while len(self.ready) < self.size:
            for worker, message in self.listen(_START_S):
                if isinstance(message, WorkerLost):
                    raise RunError(f"worker {worker} cannot start: {message.reason}")

    def start(self, worker: int, order: TrialOrder, weights: TrainedWeights) -> None:
        """Give an idle worker a trial."""
        self._training.add(worker)
        self._call(worker, "run", order, weights)
        self._call(worker, "drain", _DRAIN_S)

    def cancel(self, worker: int) -> None:
        """Ask a worker to cut its trial."""
        self._submit(worker, "cancel")

    def replace(self, worker: int) -> None:
        """Kill a worker and start a new one."""
        self._pending = {future: call for future, call in self._pending.items() if call[0] != worker}
        self._training.discard(worker)
        self._restart(worker)
        self._call(worker, "ready")

    def listen(self, timeout_s: float) -> list[tuple[int, Message]]:
        """Return messages with their workers; waits at most ``timeout_s`` for the first."""
        if not self._pending:
            time.sleep(min(timeout_s, _IDLE_S))  # yields the processor to the preparation of the next network
        done = wait(self._pending, timeout=timeout_s, return_when=FIRST_COMPLETED).done
        # Reports before results: the last epoch is reported before the trial's end.
        ordered = sorted(done, key=lambda future: self._pending[future][1] == "run")
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
                self._call(worker, "drain", _DRAIN_S)
            return [(worker, message) for message in value]
        drains = [one for one, call in self._pending.items() if call == (worker, "drain")]
        for one in drains:
            del self._pending[one]
        found: list[tuple[int, Message]] = []
        with suppress(Exception):  # the worker may be lost now, but the trial's result is known
            for one in (*drains, self._submit(worker, "drain", _DRAIN_S)):
                found += [(worker, message) for message in one.result(_LAST_DRAIN_S)]
        return [*found, (worker, value)]


def _error_line(text: str) -> str:
    """Return the line with the error's type and message: the last of a traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return errors[-1] if errors else lines[0] if lines else "the worker is gone"


class RayPool(WorkerPool):
    """Workers as Ray actors; accelerators and cores are reserved, so that no two trials share them.

    ``address`` None starts Ray on this machine.
    """

    def __init__(self, config: AutomlConfig, network: Network, *, address: str | None) -> None:
        import ray  # reads the authentication mode of the environment when it is imported

        super().__init__(config.schedule.concurrency)
        self._ray: Final = ray
        os.environ.update({name: value for name, value in _RAY_VARIABLES.items() if name not in os.environ})
        self._folder: Final = tempfile.TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True)
        self._actors: dict[int, Any] = {}
        self._connect(address)
        try:
            self._class, self._arguments = self._actor_class(config, network)
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None) -> None:
        """Start Ray here or connect to the cluster at an address; raises RunError where that fails."""
        own = {"include_dashboard": False, "_temp_dir": self._folder.name}
        options: dict[str, Any] = {"address": address} if address else own
        for is_last in (False, True):
            try:
                self._ray.init(log_to_driver=False, configure_logging=False, namespace="accelmark", **options)
                return
            except Exception as error:
                self._ray.shutdown()
                if address is not None:
                    raise RunError(
                        f"cannot connect to Ray at {address}: {error}. Check that it runs there, that it is Ray"
                        f" {self._ray.__version__} as here, and that its token, if it has one, is in RAY_AUTH_TOKEN or"
                        " ~/.ray/auth_token"
                    ) from error
                # Ray allows its own start half a minute, too little on a machine with a busy disk or busy cores.
                if is_last or "timed out during startup" not in str(error):
                    raise RunError(f"Ray cannot be started: {error}") from error

    def _actor_class(self, config: AutomlConfig, network: Network) -> tuple[Any, tuple[object, ...]]:
        resources = self._ray.cluster_resources()  # type: ignore[no-untyped-call]
        devices = config.training.devices_per_trial
        cores, accelerators = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
        check_capacity(config, cores=cores, accelerators=accelerators)
        threads = 0 if accelerators else max(1, cores // (self.size * devices))
        reserved = {"num_gpus": devices, "num_cpus": 1} if accelerators else {"num_cpus": devices}
        # Several threads let the actor answer while it trains.
        options = {"max_concurrency": 4, "max_restarts": 0, **reserved}
        actor = self._ray.remote(pkgutil.resolve_name(WORKER)).options(**options)
        return actor, (config.dataset, network, devices, threads)

    def _submit(self, worker: int, method: str, *arguments: object) -> Future[Any]:
        future: Future[Any] = getattr(self._actors[worker], method).remote(*arguments).future()
        return future

    def _restart(self, worker: int) -> None:
        if worker in self._actors:
            self._ray.kill(self._actors[worker], no_restart=True)
        self._actors[worker] = self._class.remote(*self._arguments)

    def close(self) -> None:
        """End all workers; a Ray that this process started ends too."""
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._ray.shutdown()
        self._folder.cleanup()
