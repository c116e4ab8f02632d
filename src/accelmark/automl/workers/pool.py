"""A pool of workers: the protocol between controller and workers, over futures of method calls."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from accelmark.automl.records import EpochReport
from accelmark.automl.workers import messages
from accelmark.spec.errors import RunError

_DRAIN_S: Final = 0.5
_LAST_DRAIN_S: Final = 30.0
_START_S: Final = 5.0
_IDLE_S: Final = 0.02


class _Call(NamedTuple):
    worker: int
    method: Literal["report", "drain", "run"]


class WorkerPool(ABC):
    """Runs trials on workers whose methods are called through futures."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reports: dict[int, messages.WorkerReport] = {}
        self._pending: dict[Future[Any], _Call] = {}
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

    def _call(self, worker: int, method: Literal["report", "drain", "run"], *arguments: object) -> None:
        self._pending[self._submit(worker, method, *arguments)] = _Call(worker, method)

    def _start_all(self) -> None:
        """Start all workers and wait until they are ready; raises RunError with the reason where one is not."""
        for worker in range(self.size):
            self.replace(worker)
        while len(self.reports) < self.size:
            for message in self.listen(_START_S):
                if isinstance(message, messages.WorkerLost):
                    raise RunError(f"worker {message.worker} cannot start: {message.reason}")

    def start(self, worker: int, order: messages.TrialOrder, weights: messages.TrainedWeights) -> None:
        """Give an idle worker a trial."""
        self._training.add(worker)
        self._call(worker, "run", order.model_dump_json(), weights)
        self._call(worker, "drain", _DRAIN_S)

    def cancel(self, worker: int) -> None:
        """Ask a worker to cut its trial."""
        self._submit(worker, "cancel")

    def replace(self, worker: int) -> None:
        """Kill a worker and start a new one."""
        for future in [future for future, call in self._pending.items() if call.worker == worker]:
            del self._pending[future]
        self._training.discard(worker)
        self._restart(worker)
        self._call(worker, "report")

    def listen(self, timeout_s: float) -> Sequence[messages.Message]:
        """Return messages; waits at most ``timeout_s`` for the first."""
        if not self._pending:
            time.sleep(min(timeout_s, _IDLE_S))  # yields the processor to the preparation of the next network
        done = wait(self._pending, timeout=timeout_s, return_when=FIRST_COMPLETED).done
        # Reports before results: the last epoch is reported before the trial's end.
        ordered = sorted(done, key=lambda future: self._pending[future].method == "run")
        return [message for future in ordered for message in self._messages(future)]

    def _messages(self, future: Future[Any]) -> list[messages.Message]:
        call = self._pending.pop(future, None)
        if call is None:
            return []
        worker = call.worker
        if call.method == "run":
            self._training.discard(worker)
        try:
            value = future.result()
        except Exception as error:  # noqa: BLE001 - any failure means that the worker is lost
            if call.method == "drain" and worker in self._training:
                return []  # the result's future fails too and is reported
            status: Literal["lost", "out-of-memory"] = (
                "out-of-memory" if type(error).__name__ == "OutOfMemoryError" else "lost"
            )
            return [messages.WorkerLost(worker, status, _last_line(str(error)))]
        match call.method:
            case "report":
                self.reports[worker] = messages.WorkerReport.model_validate_json(value)
                return [messages.WorkerReady(worker)]
            case "drain":
                if worker in self._training:
                    self._call(worker, "drain", _DRAIN_S)
                return _progress(worker, value)
        drains = [one for one, other in self._pending.items() if other == _Call(worker, "drain")]
        for one in drains:
            del self._pending[one]
        found: list[messages.Message] = []
        with suppress(Exception):  # the worker may be lost now, but the trial's result is known
            for one in (*drains, self._submit(worker, "drain", _DRAIN_S)):
                found += _progress(worker, one.result(_LAST_DRAIN_S))
        return [*found, messages.TrialEnded(worker, messages.TrialResult.model_validate_json(value[0]), value[1])]


def _progress(worker: int, value: tuple[int, list[str]]) -> list[messages.Message]:
    images, reports = value
    epochs = [messages.EpochEnded(worker, EpochReport.model_validate_json(report)) for report in reports]
    return [messages.Progress(worker, images), *epochs]


def _last_line(text: str) -> str:
    """Return the line with the error's type and message: the last of a traceback, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0]]
    return errors[-1] if errors else lines[0] if lines else "the worker is gone"
