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
    "batch_size": 64,
    "optimizer.name": "adamw",
    "optimizer.lr": 0.001,
    "schedule.name": "cosine",
    "model.samples": 64,
    "model.eval_samples": 64,
    "model.features": 64,
    "model.width": 256,
    "model.dropout": 0.0,
    "model.sleep_ms": 0,
    "model.fault": "",
    "model.fault_at": 0,
    "model.fault_rank": 0,
}


@dataclass(frozen=True)
class Comparison:
    """Times of a step in microseconds; ``difference_us`` is the median over pairs of rounds, driver less bare."""

    model: str
    batch_size: int
    steps_per_round: int
    rounds: int
    bare_us: float
    driver_us: float
    difference_us: float
    difference_quartiles_us: tuple[float, float]
    relative: float


@dataclass(frozen=True)
class Alone:
    """The driver around steps that do nothing."""

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
    """What a person would write by hand: no log, no clock, no hook."""

    def __init__(self, job: JobSpec, backend: PyTorchBackend, steps: int) -> None:
        self.case = backend._case
        self.settings = self.case.settings
        torch.manual_seed(0)
        self.model = self.case.build_model()
        if self.settings.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        self.optimizer = self.case.build_optimizer(self.model)
        self.schedule = self.case.build_schedule(self.optimizer, steps, steps)
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
            loss.backward()
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
        bare = BareLoop(job, backend, steps)
        drive = partial(driver_round, job, backend, log)
        drive(), bare.run()
        bare_us, driver_us = [], []
        for number in range(rounds):
            turns = [(bare.run, bare_us), (drive, driver_us)]
            for run, times in turns if number % 2 else reversed(turns):
                times.append(run() / steps * 1e6)
    differences = [driven - plain for driven, plain in zip(driver_us, bare_us, strict=True)]
    quartiles = statistics.quantiles(differences, n=4)
    middle = statistics.median(differences)
    plain = statistics.median(bare_us)
    return Comparison(
        model=name,
        batch_size=job.train.settings.batch_size,
        steps_per_round=steps,
        rounds=rounds,
        bare_us=round(plain, 2),
        driver_us=round(statistics.median(driver_us), 2),
        difference_us=round(middle, 2),
        difference_quartiles_us=(round(quartiles[0], 2), round(quartiles[2], 2)),
        relative=round(middle / plain, 5),
    )


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
            without = driver_round(plain, backend, log)
            within = driver_round(windowed, backend, log)
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
        found = [compare("micro", micro_job, 200, 6 if quick else 40, log)]
        for name, steps in (("resnet_mini", 20), ("llama_mini", 20)):
            if name in folders("cases"):
                found.append(compare(name, partial(case_job, name), steps, 3 if quick else 10, log))
    print(f"driver alone: {own.step_us:.2f} us a step, {own.window_us:.0f} us a window of {own.window_steps} steps")
    print(f"{'model':<14}{'bare us':>12}{'driver us':>12}{'difference us':>16}{'quartiles':>22}{'relative':>10}")
    for item in found:
        low, high = item.difference_quartiles_us
        quartiles = f"{low:.1f} .. {high:.1f}"
        print(
            f"{item.model:<14}{item.bare_us:>12.1f}{item.driver_us:>12.1f}{item.difference_us:>16.1f}"
            f"{quartiles:>22}{item.relative:>10.2%}"
        )
    if not quick:
        machine = {"torch": torch.__version__, "threads": 1, "cores": os.cpu_count(), "load1": os.getloadavg()[0]}
        record = {"machine": machine, "alone": asdict(own), "comparisons": [asdict(item) for item in found]}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
