"""A trial on several devices of one host: one process per device, gradients averaged.

The processes live as long as the worker. Messages are JSON lines over pipes; weights are .npz files in a private
directory. ``python -m accelmark.automl.trial.ranks`` is one rank: the first line of its input is its description, each
further line a trial's order or ``cancel``.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import torch
import torch.distributed as dist

from accelmark.automl.config import DatasetConfig
from accelmark.automl.dataset import Dataset, open_dataset, read_weights
from accelmark.automl.model.network import Network
from accelmark.automl.records import EpochReport
from accelmark.automl.trial.executor import RankContext, TorchExecutor, device_type, warm_up
from accelmark.automl.workers.messages import TrainedWeights, TrialListener, TrialOrder, TrialResult
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.framework import RankPlace

_START_S: Final = 300.0
_POLL_S: Final = 0.2
_CANCEL: Final = "cancel"
_INPUT: Final = "start.npz"
_OUTPUT: Final = "best.npz"

_Line = dict[str, Any] | None


def make_executor(
    data: Dataset, dataset: DatasetConfig, network: Network, *, devices: int, threads: int
) -> TorchExecutor | RankGroup:
    """Return a warmed-up executor on this worker's devices; ``threads`` 0: each rank's share of the cores."""
    if devices == 1:
        place = RankContext(device_type(), threads=threads or None)
        warm_up(place)
        return TorchExecutor(data, place)
    return RankGroup(dataset, network, devices=devices, threads=threads)


class RankGroup:
    """Rank processes that train together. If one fails, its trial fails and all are restarted for the next one."""

    def __init__(self, dataset: DatasetConfig, network: Network, *, devices: int, threads: int) -> None:
        self._devices: Final = devices
        data, net = dataset.model_dump_json(), network.model_dump_json()
        self._description: Final = {"world": devices, "threads": threads, "dataset": data, "network": net}
        self.processes: list[subprocess.Popen[str]] = []
        self._lines: queue.Queue[tuple[int, _Line]] = queue.Queue()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._start()

    def run(
        self, order: TrialOrder, weights: TrainedWeights, listener: TrialListener
    ) -> tuple[TrialResult, TrainedWeights]:
        """Run a trial on all ranks."""
        folder = self._start()
        (folder / _INPUT).unlink(missing_ok=True)
        if weights is not None:
            np.savez(folder / _INPUT, **weights)  # type: ignore[arg-type]
        for rank in range(self._devices):
            self._send(rank, order.model_dump_json())
        results: dict[int, TrialResult] = {}
        cancelled = False
        while len(results) < self._devices:
            if listener.should_stop() and not cancelled:
                cancelled = True
                self._send(0, _CANCEL)
            try:
                rank, line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if line is None:
                self.close()
                return TrialResult(status="crashed", reason=f"rank {rank} of {self._devices} ended"), None
            if "result" in line:
                results[rank] = TrialResult.model_validate(line["result"])
                if results[rank].status in ("crashed", "out-of-memory"):
                    self.close()  # the other ranks would wait for this one
                    return results[rank], None
            elif rank == 0 and "images" in line:
                listener.progress(int(line["images"]))
            elif rank == 0 and "epoch" in line:
                listener.epoch(EpochReport.model_validate(line["epoch"]))
        best = folder / _OUTPUT
        trained = read_weights(best) if best.is_file() else None
        best.unlink(missing_ok=True)
        return results[0], trained

    def close(self) -> None:
        """End all ranks."""
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):
                        stream.close()
        self.processes = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> Path:
        """Start the ranks unless they run; return their directory. Raises RunError where one does not start."""
        if self._folder is not None:
            return Path(self._folder.name)
        self._folder = tempfile.TemporaryDirectory(prefix="accelmark-ranks-", ignore_cleanup_errors=True)
        self._lines = queue.Queue()
        for rank in range(self._devices):
            process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.processes.append(process)
            self._send(rank, json.dumps({**self._description, "rank": rank, "folder": self._folder.name}))
            threading.Thread(target=_read, args=(rank, process.stdout, self._lines), daemon=True).start()
        for _ in range(self._devices):
            try:
                rank, line = self._lines.get(timeout=_START_S)
            except queue.Empty:
                rank, line = -1, None
            if line is None:
                self.close()
                raise RunError(f"rank {rank} did not start; see the worker's standard error")
        return Path(self._folder.name)

    def _send(self, rank: int, line: str) -> None:
        stream = self.processes[rank].stdin
        try:
            if stream is not None:
                stream.write(line + "\n")
                stream.flush()
        except BrokenPipeError:
            self._lines.put((rank, None))


def _read(rank: int, stream: IO[str] | None, lines: queue.Queue[tuple[int, _Line]]) -> None:
    """Put a rank's lines into the queue, and None when it ends."""
    with suppress(ValueError):  # the group was closed
        for line in stream or ():
            lines.put((rank, json.loads(line)))
    lines.put((rank, None))


class _PipeListener:
    """Writes a trial's progress as JSON lines."""

    def __init__(self, out: IO[str]) -> None:
        self._out: Final = out
        self.cancelled = threading.Event()

    def write(self, **values: object) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()

    def progress(self, images: int) -> None:
        self.write(images=images)

    def epoch(self, report: EpochReport) -> None:
        self.write(epoch=report.model_dump(mode="json"))

    def should_stop(self) -> bool:
        return self.cancelled.is_set()


def main() -> int:
    """Run trials as one rank until the input closes; return an exit code."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' prints must not mix with the messages
    description = json.loads(sys.stdin.readline())
    rank, world, folder = int(description["rank"]), int(description["world"]), Path(description["folder"])
    network = Network.model_validate_json(description["network"])
    dataset = open_dataset(DatasetConfig.model_validate_json(description["dataset"]), network)
    place = _place(RankPlace(rank, rank, world, world), folder, int(description["threads"]) or None)
    warm_up(place)
    listener = _PipeListener(out)
    listener.write(ready=True)
    executor = TorchExecutor(dataset, place)
    orders: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read_orders, args=(listener, orders), daemon=True).start()
    while (order := orders.get()) is not None:
        listener.cancelled.clear()
        weights = read_weights(folder / _INPUT) if (folder / _INPUT).is_file() else None
        result, trained = executor.run(TrialOrder.model_validate_json(order), weights, listener)
        if rank == 0 and trained is not None:
            np.savez(folder / _OUTPUT, **trained)  # type: ignore[arg-type]
        listener.write(result=result.model_dump(mode="json"))
    dist.destroy_process_group()
    return 0


def _place(ranks: RankPlace, folder: Path, threads: int | None) -> RankContext:
    """Open the process groups of all trials: gloo for control, and the device's own backend."""
    kind = device_type()
    own = dist.get_default_backend_for_device(kind)
    backend = own if kind == "cpu" else f"cpu:gloo,{kind}:{own}"
    if kind != "cpu":
        torch.accelerator.set_device_index(ranks.local_rank)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=rendezvous, rank=ranks.rank, world_size=ranks.world_size)
    return RankContext(kind, ranks, dist.new_group(backend="gloo"), threads)


def _read_orders(listener: _PipeListener, orders: queue.Queue[str | None]) -> None:
    for line in sys.stdin:
        if line.strip() == _CANCEL:
            listener.cancelled.set()
        else:
            orders.put(line)
    listener.cancelled.set()
    orders.put(None)


if __name__ == "__main__":
    sys.exit(main())
