"""Workers as threads of this process, for tests and benchmarks. A worker that hangs cannot be replaced."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from accelmark.automl.config import DatasetConfig
from accelmark.automl.model.network import Network
from accelmark.automl.pool import WorkerPool
from accelmark.automl.workers.worker import TrialWorker
from accelmark.spec.errors import RunError


class ThreadPool(WorkerPool):
    def __init__(self, dataset: DatasetConfig, network: Network, size: int, *, threads: int = 1) -> None:
        super().__init__(size)
        self._arguments: Final = (dataset, network, 1, threads)
        self._workers: dict[int, TrialWorker] = {}
        self._pool: Final = ThreadPoolExecutor(max_workers=3 * size, thread_name_prefix="trial")
        self._start_all()

    def _submit(self, worker: int, method: str, *arguments: object) -> Future[Any]:
        return self._pool.submit(getattr(self._workers[worker], method), *arguments)

    def _restart(self, worker: int) -> None:
        if worker in self._workers:
            raise RunError(f"worker {worker} hangs or failed; a thread cannot be replaced")
        self._workers[worker] = TrialWorker(*self._arguments)

    def close(self) -> None:
        """Cut all trials."""
        for worker in self._workers.values():
            worker.cancel()
        self._pool.shutdown(wait=False)
