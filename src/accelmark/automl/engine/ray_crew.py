"""Workers as Ray actors: on this machine, or on every host of a cluster."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any, Final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.engine.checks import check_places
from accelmark.automl.engine.crew import Ended, EpochReported, Lost, Message, Progressed, Ready
from accelmark.automl.engine.journal import Splits
from accelmark.automl.engine.ray_worker import as_actor
from accelmark.automl.graph import Network
from accelmark.automl.trial.order import Array, EpochReport, TrialOrder, TrialResult
from accelmark.spec.errors import RunError

_DRAIN_S: Final = 0.5
_START_S: Final = 5.0
_QUIET: Final = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayCrew:
    """One actor a worker; accelerators and cores are reserved so that no two trials share them."""

    def __init__(self, config: AutomlConfig, network: Network, *, address: str | None) -> None:
        import ray

        os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
        self._ray: Final = ray
        self._folder: Final = tempfile.TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True)
        own = {"include_dashboard": False, "_temp_dir": self._folder.name}
        self._join(address, {"address": address} if address else own)
        self.size: Final = config.schedule.concurrency
        self.fingerprints: Final[set[str]] = set()
        self.identities: Final[set[str]] = set()
        self._splits: Splits | None = None
        self._hired = False
        self._actors: dict[int, Any] = {}
        self._starting: dict[Any, int] = {}
        self._running: dict[Any, int] = {}
        self._draining: dict[Any, int] = {}
        try:
            self._set_up(config, network, ray.cluster_resources())  # type: ignore[no-untyped-call]
            self._wait_until_ready()
        except BaseException:
            ray.shutdown()
            self._folder.cleanup()
            raise

    def _join(self, address: str | None, options: Mapping[str, Any]) -> None:
        """Start Ray here, or join the cluster at an address.

        Raises:
            RunError: it does not start, or cannot be reached.
        """
        ray = self._ray
        for is_last in (False, True):
            try:
                ray.init(log_to_driver=False, configure_logging=False, namespace="accelmark", **options)
            except Exception as error:
                ray.shutdown()
                if address is not None:
                    raise RunError(
                        f"Ray could not be reached at {address}: {error}. Does it run there, is it Ray"
                        f" {ray.__version__} as here, and is its token, if it has one, in RAY_AUTH_TOKEN or"
                        " ~/.ray/auth_token?"
                    ) from error
                # Ray gives its first start half a minute, which a machine whose disk or cores are busy can need alone.
                if is_last or "timed out during startup" not in str(error):
                    raise RunError(f"Ray could not be started: {error}") from error
            else:
                return

    def _set_up(self, config: AutomlConfig, network: Network, resources: Mapping[str, float]) -> None:
        devices = config.training.devices_per_trial
        cores, accelerators = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
        check_places(config, cores=cores, accelerators=accelerators)
        threads = 0 if accelerators else max(1, cores // (self.size * devices))
        reserve = {"num_gpus": devices, "num_cpus": 1} if accelerators else {"num_cpus": devices}
        self._class = as_actor(**reserve)
        self._arguments = (
            config.dataset.model_dump_json(),
            network.model_dump_json(),
            devices,
            threads,
        )
        for worker in range(self.size):
            self._hire(worker)

    def _wait_until_ready(self) -> None:
        """Wait for all workers; raises RunError with the reason of the first that cannot start."""
        while self._starting:
            self.listen(_START_S)
        self._hired = True

    @property
    def splits(self) -> Splits:
        """How the data are split; the same on all workers."""
        if self._splits is None:
            raise RunError("no worker has opened the data yet")
        return self._splits

    def _hire(self, worker: int) -> None:
        actor = self._class.remote(*self._arguments)
        self._actors[worker] = actor
        self._starting[actor.ready.remote()] = worker

    def start(self, worker: int, order: TrialOrder, weights: Mapping[str, Array] | None) -> None:
        """Give an idle worker a trial."""
        actor = self._actors[worker]
        self._running[actor.run.remote(order.model_dump_json(), weights)] = worker
        self._draining[actor.drain.remote(_DRAIN_S)] = worker

    def cancel(self, worker: int) -> None:
        """Ask a worker to end its trial where it is."""
        self._actors[worker].cancel.remote()

    def replace(self, worker: int) -> None:
        """Kill a worker and put a new one in its place."""
        self._ray.kill(self._actors[worker], no_restart=True)
        for waiting in (self._starting, self._running, self._draining):
            for reference in [one for one, whose in waiting.items() if whose == worker]:
                del waiting[reference]
        self._hire(worker)

    def listen(self, timeout_s: float) -> list[Message]:
        """Return what was heard, waiting at most so long for something."""
        waiting = [*self._starting, *self._running, *self._draining]
        if not waiting:
            return []
        self._ray.wait(waiting, num_returns=1, timeout=timeout_s)
        done, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        heard: list[Message] = []
        # Reports before results: the last epoch is heard before the trial's end.
        for reference in sorted(done, key=lambda one: (one in self._running, one in self._starting)):
            heard.extend(self._heard(reference))
        return heard

    def _heard(self, reference: Any) -> list[Message]:
        from ray.exceptions import OutOfMemoryError, RayError

        for waiting in (self._draining, self._running, self._starting):
            if reference in waiting:
                worker, kind = waiting.pop(reference), waiting
                break
        else:
            return []
        try:
            value = self._ray.get(reference)
        except OutOfMemoryError as error:
            return self._gone(worker, kind, "out-of-memory", str(error))
        except RayError as error:
            return self._gone(worker, kind, "lost", str(error))
        if kind is self._starting:
            self.fingerprints.add(value[1])
            self.identities.add(value[2])
            self._splits = Splits.of(value[3])
            return [Ready(worker)]
        if kind is self._running:
            return [*self._last_reports(worker), Ended(worker, TrialResult.model_validate_json(value[0]), value[1])]
        return self._reports(worker, value)

    def _reports(self, worker: int, value: tuple[int, list[str]]) -> list[Message]:
        if worker in self._running.values():
            self._draining[self._actors[worker].drain.remote(_DRAIN_S)] = worker
        images, reports = value
        return [
            Progressed(worker, images),
            *(EpochReported(worker, EpochReport.model_validate_json(report)) for report in reports),
        ]

    def _last_reports(self, worker: int) -> list[Message]:
        from ray.exceptions import RayError

        pending = [reference for reference, whose in self._draining.items() if whose == worker]
        found: list[Message] = []
        try:
            for reference in [*pending, self._actors[worker].drain.remote(_DRAIN_S)]:
                self._draining.pop(reference, None)
                found.extend(self._reports(worker, self._ray.get(reference, timeout=30)))
        except RayError:
            return found
        return found

    def _gone(self, worker: int, kind: Mapping[Any, int], status: Any, reason: str) -> list[Message]:
        if kind is self._draining and worker in self._running.values():
            return []  # the result's reference fails too, and tells it
        if kind is self._starting and not self._hired:
            raise RunError(f"worker {worker} cannot start: {_last_line(reason)}")
        return [Lost(worker, status, _last_line(reason))]

    def close(self) -> None:
        """End all workers; a Ray that this process started ends with it."""
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._ray.shutdown()
        self._folder.cleanup()


def _last_line(text: str) -> str:
    """Return the line that says what happened: the last of a traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line.split(":")[0]]
    return (told[-1] if told else lines[0]) if lines else "the worker is gone"
