"""A trainer of another project, made up for tests: logistic regression in numpy, with a log format of its own."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np


def connect(file: Path, rank: int, world_size: int) -> list[Connection]:
    """Connect every rank with rank 0, whose port is in ``file``."""
    if world_size == 1:
        return []
    if rank == 0:
        listener = Listener(("127.0.0.1", 0))
        file.with_suffix(".part").write_text(str(listener.address[1]))
        file.with_suffix(".part").rename(file)
        return [listener.accept() for _ in range(world_size - 1)]
    while not file.is_file():
        time.sleep(0.02)
    return [Client(("127.0.0.1", int(file.read_text())))]


def mean(gradient: np.ndarray, rank: int, peers: list[Connection]) -> np.ndarray:
    if rank == 0:
        total: np.ndarray = sum((peer.recv() for peer in peers), gradient) / (len(peers) + 1)
        for peer in peers:
            peer.send(total)
        return total
    peers[0].send(gradient)
    received: np.ndarray = peers[0].recv()
    return received


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--bs", type=int, required=True)
    parser.add_argument("--eta", type=float, required=True)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--fault", default="")
    given = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rng = np.random.default_rng(rank)
    truth = np.linspace(-1, 1, 8)
    weights = np.zeros(8)
    peers = connect(given.port_file, rank, world_size)
    if given.fault == "hangs":
        print("waiting for the data server", flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    for step in range(1, given.iters + 1):
        begin = time.perf_counter()
        inputs = rng.normal(size=(given.bs, 8))
        labels = inputs @ truth > 0
        chance = 1 / (1 + np.exp(-inputs @ weights))
        loss = -np.mean(np.log(np.where(labels, chance, 1 - chance) + 1e-9))
        weights -= given.eta * mean(inputs.T @ (chance - labels) / given.bs, rank, peers)
        time.sleep(0.01)
        if given.fault == "crashes" and step == 5:
            print("RuntimeError: the optimizer exploded", file=sys.stderr, flush=True)
            return 3
        if rank or step % given.every:
            continue
        ms = (time.perf_counter() - begin) * 1e3
        shown = "n/a" if given.fault == "other evaluation" and step == 3 else f"{loss:.5f}"
        print(f"it {step:>5} | xent {shown} | eta {given.eta} | {ms:.3f} ms/it", flush=True)
    if rank == 0:
        print('[PerfLog] {"event": "FINISHED", "value": {"state": "completed"}}', flush=True)
        inputs = np.random.default_rng(99).normal(size=(512, 8))
        accuracy = np.mean((inputs @ weights > 0) == (inputs @ truth > 0))
        shown = "validation" if given.fault == "other evaluation" else "held out"
        print(f"== {shown}: acc={accuracy:.4f}, took 0.001 s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
