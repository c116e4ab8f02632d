"""Workers as threads of this process: the same worker code without Ray, for benchmarks and for trying things out.

A thread cannot be killed, so a worker that hangs cannot be replaced here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Final

from accelmark.automl.config import DatasetConfig
from accelmark.automl.engine.crew import Ended, EpochReported, Lost, Message, Progressed
from accelmark.automl.engine.journal import Splits
from accelmark.automl.engine.ray_worker import TrialWorker
from accelmark.automl.graph import Network
from accelmark.automl.trial.order import Array, EpochReport, TrialOrder, TrialResult
from accelmark.spec.errors import RunError

_DRAIN_S: Final = 0.2


class ThreadCrew:
    """One thread a worker; all share the process's cores."""

    def __init__(self, dataset: DatasetConfig, network: Network, size: int, *, threads: int = 1) -> None:
        arguments = (dataset.model_dump_json(), network.model_dump_json(), 1, threads)
        self._workers: Final = [TrialWorker(*arguments) for _ in range(size)]
        self._heard: Final[queue.Queue[Message]] = queue.Queue()
        self.fingerprints: Final = {worker.ready()[1] for worker in self._workers}
        self.splits: Final = Splits.of(self._workers[0].ready()[3])

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self._workers)

    def start(self, worker: int, order: TrialOrder, weights: dict[str, Array] | None) -> None:
        """Give an idle worker a trial."""
        threading.Thread(target=self._carry_out, args=(worker, order.model_dump_json(), weights), daemon=True).start()

    def _carry_out(self, number: int, order: str, weights: dict[str, Array] | None) -> None:
        worker = self._workers[number]
        done = threading.Event()
        listener = threading.Thread(target=self._follow, args=(number, done), daemon=True)
        listener.start()
        try:
            result, trained = worker.run(order, weights)
        except Exception as error:  # noqa: BLE001 - whatever the worker dies of, its end must be heard
            done.set()
            listener.join()
            self._heard.put(Lost(number, "lost", str(error)))
            return
        done.set()
        listener.join()
        self._tell(number)
        self._heard.put(Ended(number, TrialResult.model_validate_json(result), trained))

    def _follow(self, number: int, done: threading.Event) -> None:
        while not done.wait(_DRAIN_S):
            self._tell(number)

    def _tell(self, number: int) -> None:
        images, reports = self._workers[number].drain(0.0)
        self._heard.put(Progressed(number, images))
        for report in reports:
            self._heard.put(EpochReported(number, EpochReport.model_validate_json(report)))

    def cancel(self, worker: int) -> None:
        """Ask a worker to end its trial where it is."""
        self._workers[worker].cancel()

    def replace(self, worker: int) -> None:
        """Raise RunError: a thread cannot be killed."""
        raise RunError(f"worker {worker} hangs or broke; workers that are threads cannot be replaced")

    def listen(self, timeout_s: float) -> Sequence[Message]:
        """Return what was heard, waiting at most so long for something."""
        heard: list[Message] = []
        try:
            heard.append(self._heard.get(timeout=timeout_s))
            while True:
                heard.append(self._heard.get_nowait())
        except queue.Empty:
            return heard

    def close(self) -> None:
        """Ask all workers to end."""
        for worker in self._workers:
            worker.cancel()
