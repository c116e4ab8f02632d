"""Workers as threads of this process, for tests and benchmarks."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from accelmark.automl.cluster import WorkerPool
from accelmark.automl.config import DatasetConfig
from accelmark.automl.model.network import Network
from accelmark.automl.trial.worker import TrialWorker


class ThreadActor:
    """A worker with the interface of a Ray actor: ``actor.method.remote(...).future()``."""

    def __init__(self, *arguments: Any) -> None:
        self.worker = TrialWorker(*arguments)
        self.threads = ThreadPoolExecutor(max_workers=3, thread_name_prefix="trial")

    def __getattr__(self, method: str) -> SimpleNamespace:
        def remote(*arguments: object) -> SimpleNamespace:
            future: Future[Any] = self.threads.submit(getattr(self.worker, method), *arguments)
            return SimpleNamespace(future=lambda: future)

        return SimpleNamespace(remote=remote)

    def end(self) -> None:
        """Cut the trial; a thread that hangs cannot be killed."""
        self.worker.cancel()
        self.threads.shutdown(wait=False)


def thread_pool(dataset: DatasetConfig, network: Network, size: int, *, threads: int = 1) -> WorkerPool:
    return WorkerPool(size, lambda: ThreadActor(dataset, network, 1, threads), ThreadActor.end)
