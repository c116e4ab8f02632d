"""What the training driver costs a step: against a bare PyTorch loop, interleaved, and alone with nothing to train.

Run ``python benchmarks/overhead.py`` (``--quick`` for a look). Both loops train the same model on the same data with
the same optimizer and schedule; they take turns in short rounds within one process, the order turned around every
time, so that whatever else the machine does falls on both. The bare loop neither logs nor times anything.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelmark.spec.catalog import folders, load_case
from accelmark.spec.events import Started
from accelmark.spec.job import FolderRef, JobSpec, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, nest, resolve
from accelmark.spec.settings import TrainSettings
from accelmark.train.account import Account
from accelmark.train.backend import Progress
from accelmark.train.clock import HostClock, HostLosses
from accelmark.train.driver import Driver
from accelmark.train.perflog import PerfLog
from accelmark.train.platform import Ranks
from accelmark.train.process import StopRequest
from accelmark.train.pytorch import PyTorchBackend

RESULTS = Path(__file__).parent / "results" / "overhead.json"
TINY = Path(__file__).parents[1] / "tests" / "train" / "tiny"
LOG_EVERY = 20
MICRO = {
    "batch_size": 32,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.001,
    "schedule.name": "cosine",
    "model.samples": 64,
    "model.eval_samples": 64,
    "model.features": 64,
    "model.width": 128,
    "model.dropout": 0.0,
    "model.sleep_ms": 0,
    "model.fault": "",
    "model.fault_at": 0,
    "model.fault_rank": 0,
}


@dataclass(frozen=True)
class Times:
    """A step in microseconds: medians over the rounds, and over the differences of neighbouring rounds."""

    bare_us: float
    driver_us: float
    difference_us: float
    difference_quartiles_us: tuple[float, float]
    relative: float
    least_bare_us: float
    """The least disturbed round."""
    least_driver_us: float

    @classmethod
    def of(cls, bare: list[float], driver: list[float]) -> Times:
        differences = [driven - plain for driven, plain in zip(driver, bare, strict=True)]
        low, middle, high = statistics.quantiles(differences, n=4)
        plain = statistics.median(bare)
        return cls(
            bare_us=round(plain, 2),
            driver_us=round(statistics.median(driver), 2),
            difference_us=round(middle, 2),
            difference_quartiles_us=(round(low, 2), round(high, 2)),
            relative=round(middle / plain, 5),
            least_bare_us=round(min(bare), 2),
            least_driver_us=round(min(driver), 2),
        )


@dataclass(frozen=True)
class Comparison:
    """One model. CPU time leaves out what other processes took; wall time is what a user waits."""

    model: str
    batch_size: int
    steps_per_round: int
    rounds: int
    cpu: Times
    wall: Times


@dataclass(frozen=True)
class Alone:
    """The driver around steps that do nothing, in CPU time."""

    step_us: float
    window_us: float
    window_steps: int


def make_job(name: str, ref: FolderRef, settings: TrainSettings, directory: Path) -> JobSpec:
    train = TrainJob(unit="sample", units_per_sample=1, target=None, reference_loss=None, settings=settings)
    return JobSpec(
        task="train",
        key=CaseKey(model=name, framework="pytorch", hardware="host"),
        round=1,
        case=ref,
        case_version=1,
        vendor="cpu",
        device_type="cpu",
        framework_module=None,
        distributed_backend="gloo",
        data_dirs={},
        checkpoint_dir=directory,
        train=train,
    )


def micro_job(steps: int, directory: Path) -> JobSpec:
    own = {"end.max_steps": steps, "log_every_steps": LOG_EVERY, "threads": 1, "loader.synthetic": True}
    settings = TrainSettings.model_validate(nest({**MICRO, **own}))
    return make_job("micro", FolderRef(name="tiny", path=TINY, sha256=""), settings, directory)


def case_job(name: str, steps: int, directory: Path) -> JobSpec:
    spec = load_case(name)
    if spec.train is None:
        raise ValueError(f"{name} has no training side")
    own = {"end.max_steps": steps, "log_every_steps": LOG_EVERY, "threads": 1, "loader.synthetic": True}
    layers = [Layer("benchmark", own)]
    resolved = resolve(Layer.of("case", spec.train.settings), layers, mutable=spec.train.mutable, is_open=True)
    return make_job(name, folders("cases")[name].ref(), resolved.settings, directory)


class BareLoop:
    """What a person would write by hand: no log, no clock, no hook.

    It trains the very model that the driver trains, since two of them differ in speed by where their memory lies.
    """

    def __init__(self, backend: PyTorchBackend) -> None:
        training = backend._training
        self.case = backend._case
        self.settings = self.case.settings
        self.model, self.optimizer, self.schedule = training.model, training.optimizer, training.schedule
        self.batches = backend._batches

    def run(self) -> float:
        """Train one round and return its seconds."""
        case, model, optimizer, schedule = self.case, self.model, self.optimizer, self.schedule
        clip = self.settings.gradient_clip_norm
        autocast = self.settings.precision in ("bf16", "fp16")
        start = time.perf_counter()
        for batch in self.batches.epoch(0):
            if autocast:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = case.loss(model, batch)
            else:
                loss = case.loss(model, batch)
            torch.autograd.backward(loss)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        return time.perf_counter() - start


def driver_round(job: JobSpec, backend: Any, log: PerfLog) -> float:
    """Train one round with the driver and return its raw training time in seconds."""
    if job.train is None:
        raise ValueError("no training side")
    account = Account(process_start=time.monotonic(), job=job.train)
    Driver(job.train, backend, log, account, StopRequest(wanted=False)).run()
    if account.train_start is None or account.train_end is None:
        raise RuntimeError("the driver did not run")
    return account.train_end - account.train_start


def compare(name: str, make: Callable[[int, Path], JobSpec], steps: int, rounds: int, log: PerfLog) -> Comparison:
    with tempfile.TemporaryDirectory() as directory:
        job = make(steps, Path(directory))
        if job.train is None:
            raise ValueError("no training side")
        backend = PyTorchBackend(job, job.train, Ranks(), log)
        backend.prepare()
        bare = BareLoop(backend)
        drive = partial(driver_round, job, backend, log)
        drive(), bare.run()
        rows: dict[str, list[tuple[float, float]]] = {"bare": [], "driver": []}
        for number in range(rounds):
            turns: list[tuple[Callable[[], float], str]] = [(bare.run, "bare"), (drive, "driver")]
            for run, name_of_loop in turns if number % 2 else turns[::-1]:
                before = time.process_time()
                wall_s = run()
                rows[name_of_loop].append(((time.process_time() - before) / steps * 1e6, wall_s / steps * 1e6))
    cpu, wall = (Times.of(*([row[column] for row in rows[loop]] for loop in ("bare", "driver"))) for column in (0, 1))
    return Comparison(name, job.train.settings.batch_size, steps, rounds, cpu, wall)


class NothingToTrain:
    """A backend whose steps do nothing, so that all time is the driver's own."""

    world_size = 1
    samples_per_step = 1
    immediate = True
    num_parameters = 0
    flops_per_sample = None
    flops_per_sample_formula = None

    def __init__(self, steps: int) -> None:
        self.steps_per_epoch = steps
        self.clock = HostClock()
        self.losses = HostLosses()
        self._loss = torch.tensor(0.5)

    def prepare(self) -> Started:
        raise RuntimeError("nothing to prepare")

    def step(self, batches: list[Any]) -> Tensor:
        return self._loss

    def restore(self) -> Progress | None:
        return None

    def open_epoch(self, epoch: int, skip_steps: int) -> Iterator[list[Any]]:
        return iter([[]] * self.steps_per_epoch)

    def learning_rate(self) -> float:
        return 0.1

    def synchronize(self) -> None:
        return None

    def peak_memory_mib(self) -> float | None:
        return None


def alone(rounds: int, log: PerfLog) -> Alone:
    """Measure the driver with windows and with none, and tell step and window apart."""
    steps = 2000
    with tempfile.TemporaryDirectory() as directory:
        windowed = micro_job(steps, Path(directory))
        whole = {**MICRO, "end.max_steps": steps, "log_every_steps": 10**9, "loader.synthetic": True}
        if windowed.train is None:
            raise ValueError("no training side")
        train = windowed.train.model_copy(update={"settings": TrainSettings.model_validate(nest(whole))})
        plain = windowed.model_copy(update={"train": train})
        backend = NothingToTrain(steps)
        per_step, per_window = [], []
        for _ in range(rounds):
            start = time.process_time()
            driver_round(plain, backend, log)
            between = time.process_time()
            driver_round(windowed, backend, log)
            without, within = between - start, time.process_time() - between
            per_step.append(without / steps * 1e6)
            per_window.append((within - without) / (steps / LOG_EVERY) * 1e6)
    return Alone(round(statistics.median(per_step), 3), round(statistics.median(per_window), 2), LOG_EVERY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing is written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    with tempfile.TemporaryFile() as file:
        log = PerfLog(0, file.fileno())
        own = alone(5 if quick else 21, log)
        found = [compare("micro", micro_job, 100, 10 if quick else 40, log)]
        for name, steps in (("resnet_mini", 60), ("llama_mini", 12)):
            if name in folders("cases"):
                found.append(compare(name, partial(case_job, name), steps, 3 if quick else 12, log))
    print(f"driver alone: {own.step_us:.2f} us a step, {own.window_us:.0f} us a window of {own.window_steps} steps")
    titles = f"{'bare us':>12}{'driver us':>12}{'difference us':>15}{'quartiles':>22}{'':>9}{'least bare, driver':>24}"
    print(f"{'model':<14}{'clock':>6}{titles}")
    for item in found:
        for clock, times in (("cpu", item.cpu), ("wall", item.wall)):
            low, high = times.difference_quartiles_us
            print(
                f"{item.model:<14}{clock:>6}{times.bare_us:>12.1f}{times.driver_us:>12.1f}{times.difference_us:>15.1f}"
                f"{f'{low:.1f} .. {high:.1f}':>22}{times.relative:>9.2%}"
                f"{f'{times.least_bare_us:.1f}, {times.least_driver_us:.1f}':>24}"
            )
    if not quick:
        machine = {"torch": torch.__version__, "threads": 1, "cores": os.cpu_count(), "load1": os.getloadavg()[0]}
        record = {"machine": machine, "alone": asdict(own), "comparisons": [asdict(item) for item in found]}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
