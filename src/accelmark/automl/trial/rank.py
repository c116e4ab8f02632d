"""One rank of a trial on several devices: takes orders from its standard input, reports on its standard output.

Started by ``trial.replicas``; the first line of input says who it is, each further line is one trial.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import IO, Final

import numpy as np
import torch
import torch.distributed as dist

from accelmark.automl.config import DatasetConfig
from accelmark.automl.data import open_dataset
from accelmark.automl.graph import Network
from accelmark.automl.trial.executor import Seat, TorchExecutor, device_type, warm_up
from accelmark.automl.trial.order import EpochReport, TrialOrder
from accelmark.spec.framework import RankPlace

CANCEL: Final = "cancel"


class _Voice:
    """Writes JSON lines for the process that started this rank; a listener of the trial."""

    def __init__(self, out: IO[str]) -> None:
        self._out: Final = out
        self.cancelled = threading.Event()

    def say(self, **words: object) -> None:
        self._out.write(json.dumps(words) + "\n")
        self._out.flush()

    def progress(self, images: int) -> None:
        self.say(images=images)

    def epoch(self, report: EpochReport) -> None:
        self.say(epoch=report.model_dump(mode="json"))

    def should_stop(self) -> bool:
        return self.cancelled.is_set()


def main() -> int:
    """Serve trials until the input closes; return an exit status."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error, never between our lines
    hello = json.loads(sys.stdin.readline())
    rank, world, folder = int(hello["rank"]), int(hello["world"]), Path(hello["folder"])
    network = Network.model_validate_json(hello["network"])
    dataset = open_dataset(DatasetConfig.model_validate_json(hello["dataset"]), network)
    seat = _seat(RankPlace(rank, rank, world, world), folder, int(hello["threads"]) or None)
    warm_up(seat)
    voice = _Voice(out)
    voice.say(ready=True)
    executor = TorchExecutor(dataset, seat)
    orders: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_listen, args=(voice, orders), daemon=True).start()
    while (order := orders.get()) is not None:
        voice.cancelled.clear()
        weights = None
        if (folder / "start.npz").is_file():
            with np.load(folder / "start.npz", allow_pickle=False) as arrays:
                weights = {name: arrays[name] for name in arrays.files}
        result, trained = executor.run(TrialOrder.model_validate_json(order), weights, voice)
        if rank == 0 and trained is not None:
            np.savez(folder / "best.npz", **trained)  # type: ignore[arg-type]
        voice.say(result=result.model_dump(mode="json"), weights=trained is not None)
    dist.destroy_process_group()
    return 0


def _seat(ranks: RankPlace, folder: Path, threads: int | None) -> Seat:
    """Meet the other ranks, once for all trials: gloo for what is exchanged about control, the device's own beside."""
    kind = device_type()
    own = dist.get_default_backend_for_device(kind)
    backend = own if kind == "cpu" else f"cpu:gloo,{kind}:{own}"
    if kind != "cpu":
        torch.accelerator.set_device_index(ranks.local_rank)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=ranks.rank, world_size=ranks.world_size)
    return Seat(kind, ranks, dist.new_group(backend="gloo"), threads)


def _listen(voice: _Voice, orders: queue.Queue[str | None]) -> None:
    """Take in lines: orders, and the word that cancels the trial under way."""
    for line in sys.stdin:
        if line.strip() == CANCEL:
            voice.cancelled.set()
        else:
            orders.put(line)
    voice.cancelled.set()
    orders.put(None)


if __name__ == "__main__":
    sys.exit(main())
