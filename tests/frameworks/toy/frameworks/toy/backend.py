"""Softmax regression in NumPy: the backend of a framework that times windows of steps only."""

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import numpy as np

from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.log.events import Event, Started, UpdateSquares
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.plugins.catalog import folder_module
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.contract import Backend, Progress, Replay


class Group:
    """Reduces arrays over the ranks of one host, through rank 0."""

    def __init__(self, place: RankPlace) -> None:
        self._peers: list[Any] = []
        address = f"\0{os.environ['TOY_SOCKET']}"
        if place.rank == 0 and place.world_size > 1:
            with Listener(address, "AF_UNIX") as listener:
                (Path(os.environ["ACCELMARK_NODE_DIR"]) / "toy.ready").touch()
                self._peers = [listener.accept() for _ in range(place.world_size - 1)]
        elif place.rank > 0:
            while not (Path(os.environ["ACCELMARK_NODE_DIR"]) / "toy.ready").exists():
                time.sleep(0.01)
            self._peers = [Client(address, "AF_UNIX")]
        self._is_root = place.rank == 0

    def reduce(self, values: Any, operation: Callable[..., Any] = np.sum) -> Any:
        if not self._is_root:
            self._peers[0].send(values)
            return self._peers[0].recv()
        total = operation([values, *(peer.recv() for peer in self._peers)], axis=0)
        for peer in self._peers:
            peer.send(total)
        return total


class ToyBackend(Backend):
    def __init__(self, job: JobSpec, train: TrainJob, place: RankPlace, log: EventLog) -> None:
        super().__init__(job, train, place, log)
        self.immediate = True

    def prepare(self) -> Started:
        settings, place = self.settings, self.place
        self._case = folder_module(self.job.case, "toy").Case(settings)
        self.eval_batches = self._case.test
        self._group = Group(place)
        self._weights = np.zeros((self._case.num_features, self._case.num_classes), np.float32)
        self.samples_per_step = settings.batch_size * place.world_size
        self.steps_per_epoch = len(self._case.train[0]) // self.samples_per_step
        self.num_parameters = self._weights.size
        self.flops_per_sample_formula = 6.0 * self._weights.size
        self.log.event(Event.LAUNCH_TRAINING, {"hooks": {}})
        structure = hashlib.sha256(str(self._weights.shape).encode()).hexdigest()
        values = hashlib.sha256(self._weights.tobytes()).hexdigest()
        return Started(
            framework="toy", framework_version=np.__version__, device_type="cpu", device_name=None, device_index=None,
            world_size=place.world_size, hostname=socket.gethostname(), threads=1, seed=settings.seed,
            precision=settings.precision, model_class="Softmax", num_parameters=self._weights.size,
            parameter_hash=structure, standard_parameter_hash=structure, checkpoint_hash=values,
            optimizer_class="SGD", standard_optimizer_class="SGD", compute_type="float32",
            train_samples=self.steps_per_epoch * self.samples_per_step, eval_samples=len(self._case.test[0]),
            hooks={}, library_versions={"numpy": np.__version__},
        )  # fmt: skip

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        order = np.random.default_rng((self.settings.seed, epoch)).permutation(len(self._case.train[0]))
        for step in range(skip_steps, self.steps_per_epoch):
            start = step * self.samples_per_step + self.place.rank * self.settings.batch_size
            chosen = order[start : start + self.settings.batch_size]
            yield [tuple(part[chosen] for part in self._case.train)]

    def step(self, batches: list[Any]) -> Any:
        loss, gradient = self._case.loss_and_gradient(self._weights, *batches[0])
        self._weights -= self.learning_rate() * self._group.reduce(gradient) / self.world_size
        return loss

    def learning_rate(self) -> float:
        return self.settings.optimizer.lr

    def load(self, checkpoint: Path) -> Progress:
        self._weights = np.load(checkpoint / "weights.npy")
        return Progress(global_steps=int(checkpoint.name.removeprefix("step")))

    def evaluate_on(self, batches: Any) -> dict[str, float]:
        mine = [part[self.place.rank :: self.world_size] for part in batches]
        right = self._group.reduce(np.array([(mine[0] @ self._weights).argmax(1) == mine[1]]).sum().astype(float))
        return {"accuracy": float(right) / len(batches[0])}

    def replay(self, start: Path | None, num_steps: int, end: Path | None) -> Replay:
        first = 1 if start is None else self.load(start).global_steps + 1
        before, replay = self._weights.copy(), Replay(first)
        for number in range(first - 1, first - 1 + num_steps):
            epoch, step = divmod(number, self.steps_per_epoch)
            replay.losses.append(float(self.step(next(self.open_epoch(epoch, step)))))
        if end is not None:
            changes = (self._weights - before, np.load(end / "weights.npy") - before)
            squares = [float((change**2).sum()) for change in (*changes, changes[0] - changes[1])]
            replay.update = UpdateSquares(replayed=squares[0], saved=squares[1], difference=squares[2])
        return replay

    def save(self, progress: Progress) -> str:
        name = f"step{progress.global_steps:09d}"
        if self.place.rank == 0:
            (self.job.checkpoint_dir / name).mkdir(parents=True)
            np.save(self.job.checkpoint_dir / name / "weights.npy", self._weights)
        return name

    def synchronize(self) -> None:
        pass

    def exchange_max(self, values: list[float]) -> Callable[[], list[float]]:
        largest = self._group.reduce(np.array(values), np.max)
        return lambda: [float(value) for value in largest]

    def mean(self, values: list[float]) -> list[float]:
        return [float(value) for value in self._group.reduce(np.array(values)) / self.world_size]

    def peak_memory_mib(self) -> float | None:
        return None

    def device_label(self) -> str:
        return "cpu"

    def is_out_of_memory(self, error: BaseException) -> bool:
        return False

    def close(self, *, together: bool) -> None:
        pass


open_backend = ToyBackend
