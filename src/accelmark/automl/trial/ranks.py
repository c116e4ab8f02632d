"""A trial on several devices of one host: one process per device, gradients averaged, alive as long as the worker."""

from __future__ import annotations

import ctypes
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from accelmark.automl.config import DatasetConfig
from accelmark.automl.dataset import open_dataset
from accelmark.automl.model.graph import Network
from accelmark.automl.records import TrainedWeights, TrialEnded, TrialListener, TrialOrder, TrialResult
from accelmark.automl.trial.training import RankContext, device_type, run_trial, warm_up
from accelmark.frameworks.pytorch.training.platform import join_ranks
from accelmark.spec.errors import RunError
from accelmark.spec.plugins.framework import RankPlace

_START_S: Final = 300.0
_POLL_S: Final = 0.2
_Arguments = tuple[DatasetConfig, Network, int]
"""Data, seed network, and threads of a rank, 0: its share."""


class RankGroup:
    """Rank processes that train together. If one fails, its trial fails and all are restarted for the next one."""

    def __init__(self, dataset: DatasetConfig, network: Network, *, devices: int, threads: int) -> None:
        self._devices: Final = devices
        self._arguments: Final[_Arguments] = (dataset, network, threads)
        self.processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._start()

    def run(self, order: TrialOrder, weights: TrainedWeights, listener: TrialListener) -> TrialEnded:
        """Run a trial on all ranks."""
        self._start()
        self._is_cut.value = False
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # that the rank ended is received next
                pipe.send((order, weights))
        ended: dict[int, TrialEnded] = {}
        while len(ended) < self._devices:
            if listener.should_stop():
                self._is_cut.value = True
            for rank, message in self._receive(_POLL_S):
                match message:
                    case None:
                        self.close()
                        reason = f"rank {rank} of {self._devices} ended"
                        return TrialEnded(TrialResult(status="crashed", reason=reason), None)
                    case TrialEnded(result):
                        ended[rank] = message
                        if result.status in ("crashed", "out-of-memory"):
                            self.close()  # the other ranks would wait for this one
                            return TrialEnded(result, None)
                    case _:
                        listener.report(message)
        return ended[0]

    def close(self) -> None:
        """End all ranks."""
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        if self.processes:
            self._folder.cleanup()
        self.processes, self._pipes = [], []

    def _start(self) -> None:
        """Start the ranks unless they run; raises RunError where one does not start."""
        if self.processes:
            return
        context = multiprocessing.get_context("spawn")
        self._is_cut = context.RawValue(ctypes.c_bool, False)
        self._folder = tempfile.TemporaryDirectory(prefix="accelmark-ranks-", ignore_cleanup_errors=True)
        for rank in range(self._devices):
            here, there = context.Pipe()
            place = RankPlace(rank, rank, self._devices, self._devices)
            arguments = (place, self._folder.name, there, self._is_cut, self._arguments)
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)
        ready: set[int] = set()
        while len(ready) < self._devices:
            found = dict(self._receive(_START_S))
            if not found or None in found.values():
                self.close()
                rank = next((rank for rank, message in found.items() if message is None), -1)
                raise RunError(f"rank {rank} did not start; see the worker's standard error")
            ready |= found.keys()

    def _receive(self, timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Yield messages with their ranks, None from a rank that ended; waits at most ``timeout_s`` for the first."""
        for pipe in wait(self._pipes, timeout_s):
            rank = self._pipes.index(pipe)  # type: ignore[arg-type]
            try:
                yield rank, self._pipes[rank].recv()
            except (EOFError, OSError):
                yield rank, None


def _run_rank(ranks: RankPlace, folder: str, pipe: Connection, is_cut: ctypes.c_bool, given: _Arguments) -> None:
    """Run trials as one rank until the pipe closes."""
    config, network, threads = given
    data = open_dataset(config, network)
    kind = device_type()
    own, store = dist.get_default_backend_for_device(kind), FileStore(f"{folder}/rendezvous", ranks.world_size)
    if kind != "cpu":
        torch.accelerator.set_device_index(ranks.local_rank)
    group = join_ranks(own, ranks, torch.device(kind), needed=True, store=store)
    place = RankContext(kind, ranks, group, threads or None)
    warm_up(place)
    listener = TrialListener(should_stop=lambda: is_cut.value)
    if ranks.rank == 0:  # reports for all ranks
        listener = listener._replace(report=pipe.send)
    pipe.send("ready")
    with suppress(EOFError, OSError):  # the worker ended
        while True:
            order, weights = pipe.recv()
            result, trained = run_trial(data, place, order, weights, listener)
            pipe.send(TrialEnded(result, trained if ranks.rank == 0 else None))
    dist.destroy_process_group()
