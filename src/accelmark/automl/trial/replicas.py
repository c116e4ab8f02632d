"""A trial on several devices of one host: one process a device, gradients averaged, images counted together.

The processes live as long as the worker, so that no trial's time is spent on starting them. They talk in JSON lines
over their own pipes; weights pass through files of arrays in a folder that only this user can read.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from accelmark.automl.config import DatasetConfig
from accelmark.automl.data import Dataset
from accelmark.automl.graph import Network
from accelmark.automl.trial.executor import Seat, TorchExecutor, device_type, warm_up
from accelmark.automl.trial.order import Array, EpochReport, Listener, TrialExecutor, TrialOrder, TrialResult
from accelmark.spec.errors import RunError

_START_S: Final = 300.0
_POLL_S: Final = 0.2
_MODULE: Final = "accelmark.automl.trial.rank"


def make_executor(
    data: Dataset, dataset: DatasetConfig, network: Network, *, devices: int, threads: int
) -> TrialExecutor:
    """Return what trains trials on this worker's devices, warm; ``threads`` 0 gives each rank its share of cores."""
    if devices == 1:
        seat = Seat(device_type(), threads=threads or None)
        warm_up(seat)
        return TorchExecutor(data, seat)
    return ReplicaGroup(dataset, network, devices=devices, threads=threads)


class ReplicaGroup:
    """Rank processes in step, one a device; when one breaks, all are ended and started anew for the next trial."""

    def __init__(self, dataset: DatasetConfig, network: Network, *, devices: int, threads: int) -> None:
        self._hello: Final = {
            "world": devices,
            "threads": threads,
            "dataset": dataset.model_dump_json(),
            "network": network.model_dump_json(),
        }
        self._ranks: list[subprocess.Popen[str]] = []
        self._said: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._start()

    def run(
        self, order: TrialOrder, weights: dict[str, Array] | None, listener: Listener
    ) -> tuple[TrialResult, dict[str, Array] | None]:
        """Carry out an order on all ranks; a rank that breaks fails the trial."""
        folder = self._start()
        start = folder / "start.npz"
        start.unlink(missing_ok=True)
        if weights is not None:
            np.savez(start, **weights)  # type: ignore[arg-type]
        for rank in range(len(self._ranks)):
            self._tell(rank, order.model_dump_json())
        results: dict[int, TrialResult] = {}
        cancelled = False
        while len(results) < len(self._ranks):
            if listener.should_stop() and not cancelled:
                cancelled = True
                self._tell(0, "cancel")
            try:
                rank, said = self._said.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if said is None:
                self.close()
                return TrialResult(status="crashed", reason=f"rank {rank} of {self._hello['world']} broke"), None
            if "result" in said:
                results[rank] = TrialResult.model_validate(said["result"])
                if results[rank].status in ("crashed", "out-of-memory"):
                    self.close()  # the others wait for this rank in vain
                    return results[rank], None
            elif rank == 0 and "images" in said:
                listener.progress(int(said["images"]))
            elif rank == 0 and "epoch" in said:
                listener.epoch(EpochReport.model_validate(said["epoch"]))
        best = folder / "best.npz"
        if not best.is_file():
            return results[0], None
        with np.load(best, allow_pickle=False) as arrays:
            trained = {name: arrays[name] for name in arrays.files}
        best.unlink()
        return results[0], trained

    def close(self) -> None:
        """End all ranks."""
        for process in self._ranks:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> Path:
        """Start the ranks unless they live; return their folder. Raises RunError when they do not come up."""
        if self._ranks and self._folder is not None:
            return Path(self._folder.name)
        self._folder = tempfile.TemporaryDirectory(prefix="accelmark-ranks-", ignore_cleanup_errors=True)
        self._said = queue.Queue()
        for rank in range(int(str(self._hello["world"]))):
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._ranks.append(process)
            self._tell(rank, json.dumps({**self._hello, "rank": rank, "folder": self._folder.name}))
            threading.Thread(target=_follow, args=(rank, process.stdout, self._said), daemon=True).start()
        for _ in self._ranks:
            try:
                rank, said = self._said.get(timeout=_START_S)
            except queue.Empty:
                said, rank = None, -1
            if said is None:
                self.close()
                raise RunError(f"rank {rank} did not come up; see the worker's standard error")
        return Path(self._folder.name)

    def _tell(self, rank: int, line: str) -> None:
        stream = self._ranks[rank].stdin
        if stream is not None:
            try:
                stream.write(line + "\n")
                stream.flush()
            except BrokenPipeError:
                self._said.put((rank, None))


def _follow(rank: int, stream: IO[str] | None, said: queue.Queue[tuple[int, dict[str, Any] | None]]) -> None:
    """Pass on what a rank says, and None when it ends."""
    if stream is not None:
        with suppress(ValueError):  # the stream was closed under us: the group is ended
            for line in stream:
                said.put((rank, json.loads(line)))
    said.put((rank, None))
