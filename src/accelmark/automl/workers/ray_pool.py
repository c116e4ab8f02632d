"""Workers as Ray actors, on this machine or on a cluster."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

from accelmark.automl.config import AutomlConfig, check_capacity
from accelmark.automl.model.network import Network
from accelmark.automl.workers.pool import WorkerPool
from accelmark.automl.workers.worker import TrialWorker
from accelmark.spec.errors import RunError

_RAY_VARIABLES: Final = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayPool(WorkerPool):
    """Workers as Ray actors; accelerators and cores are reserved, so that no two trials share them.

    ``address`` None starts Ray on this machine.
    """

    def __init__(self, config: AutomlConfig, network: Network, *, address: str | None) -> None:
        import ray

        super().__init__(config.schedule.concurrency)
        os.environ.update({name: value for name, value in _RAY_VARIABLES.items() if name not in os.environ})
        self._ray: Final = ray
        self._folder: Final = tempfile.TemporaryDirectory(prefix="acmray-", ignore_cleanup_errors=True)
        own = {"include_dashboard": False, "_temp_dir": self._folder.name}
        self._connect(address, {"address": address} if address else own)
        self._actors: dict[int, Any] = {}
        try:
            self._class, self._arguments = self._actor_class(config, network)
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _connect(self, address: str | None, options: Mapping[str, Any]) -> None:
        """Start Ray here or connect to the cluster at an address; raises RunError where that fails."""
        ray = self._ray
        for is_last in (False, True):
            try:
                ray.init(log_to_driver=False, configure_logging=False, namespace="accelmark", **options)
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
            else:
                return

    def _actor_class(self, config: AutomlConfig, network: Network) -> tuple[Any, tuple[object, ...]]:
        resources = self._ray.cluster_resources()  # type: ignore[no-untyped-call]
        devices = config.training.devices_per_trial
        cores, accelerators = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
        check_capacity(config, cores=cores, accelerators=accelerators)
        threads = 0 if accelerators else max(1, cores // (self.size * devices))
        reserved = {"num_gpus": devices, "num_cpus": 1} if accelerators else {"num_cpus": devices}
        # Several threads let the actor answer while it trains.
        actor = self._ray.remote(TrialWorker).options(max_concurrency=4, max_restarts=0, **reserved)
        return actor, (config.dataset.model_dump_json(), network.model_dump_json(), devices, threads)

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
