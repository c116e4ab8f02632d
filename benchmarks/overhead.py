"""Measure the training driver's overhead per step: against a bare loop of a framework, other trainers, and no work.

Run ``python -m benchmarks.overhead`` with the framework's Python (``--framework jax``; ``--quick``: short; ``--peers``:
PyTorch's Trainer and Lightning). All loops train the same model on one batch with one optimizer. They alternate every
few steps within one process (see ``turns.py``), so that other load of the machine affects all of them. The bare loops
are in ``bare_loops/``. ``benchmarks/companions.py`` measures the cost of telemetry and progress.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, nest, resolve
from accelmark.spec.log.events import Started
from accelmark.spec.log.perflog import PerfLogWriter
from accelmark.spec.plugins.catalog import FolderRef, folders, load_case, load_launch, load_vendor
from accelmark.spec.plugins.framework import HostPlace
from accelmark.spec.settings.training import TrainSettings
from accelmark.telemetry.host import cpu_model
from accelmark.train.loop.contract import HOST_LOSSES, HostClock, Progress
from accelmark.train.loop.driver import Driver
from accelmark.train.loop.process import StopRequest
from accelmark.train.loop.rank import open_backend
from accelmark.train.loop.window import RunTotals
from benchmarks.turns import Cost, Train, Turns

RESULTS = Path(__file__).parent / "results"
TINY = Path(__file__).parents[1] / "tests" / "train" / "tiny"
FRAMEWORKS: Final = tuple(sorted(file.stem for file in (Path(__file__).parent / "bare_loops").glob("[a-z]*.py")))
ENDLESS: Final = 10**9
TURN_S: Final = 0.1
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
LLAMA_MICRO: Final = {
    "batch_size": 1,
    "model.hidden_size": 16,
    "model.intermediate_size": 16,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.seq_length": 8,
}
"""``llama_mini`` in a size that hardly computes, so that the driver's own time is seen."""


@dataclass(frozen=True)
class Comparison:
    """Loops compared on one model; CPU time excludes other processes, wall time is what users wait."""

    framework: str
    version: str
    model: str
    batch_size: int
    threads: int
    bare_us: float
    """Median CPU time of a step of the bare loop."""
    turns: int
    steps_per_turn: int
    cpu: dict[str, Cost]
    """Loop -> its cost."""
    wall: dict[str, Cost]


@dataclass(frozen=True)
class Alone:
    """CPU time of the driver with steps that do nothing."""

    step_us: float
    window_us: float
    window_steps: int


def make_job(
    name: str, ref: FolderRef, settings: TrainSettings, directory: Path, framework: str = "pytorch"
) -> JobSpec:
    train = TrainJob(unit="sample", units_per_sample=1, target=None, reference_loss=None, settings=settings)
    return JobSpec(
        key=CaseKey(model=name, framework=framework, hardware="host"),
        round=1,
        case=ref,
        case_version=1,
        vendor="cpu",
        device_type="cpu",
        framework_module=None,
        collective_backend="gloo",
        data_dirs={},
        checkpoint_dir=directory,
        work=train,
    )


def micro_job(steps: int, directory: Path, threads: int = 1) -> JobSpec:
    own = {"end.max_steps": steps, "log_every_steps": LOG_EVERY, "threads": threads, "loader.synthetic": True}
    settings = TrainSettings.model_validate(nest({**MICRO, **own}))
    return make_job("micro", FolderRef(name="tiny", path=TINY, sha256=""), settings, directory)


def case_job(
    name: str, framework: str, directory: Path, threads: int, over: Mapping[str, int] = MappingProxyType({})
) -> JobSpec:
    spec = load_case(name)
    if spec.train is None:
        raise ValueError(f"{name} has no training side")
    own = {"end.max_steps": ENDLESS, "log_every_steps": LOG_EVERY, "threads": threads, "loader.synthetic": True}
    layers = [Layer("benchmark", {**own, **over})]
    base = Layer.of("case", spec.train.settings)
    resolved = resolve(TrainSettings, base, layers, mutable=spec.train.mutable, is_open=True)
    return make_job(name, folders("cases")[name].ref("train"), resolved.settings, directory, framework)


class Handed:
    """Replaces the case's batches by those of ``turns.py``."""

    def __init__(self, batches: Iterator[Any], num_samples: int) -> None:
        self._batches = batches
        self.num_samples = num_samples

    def epoch(self, number: int, skip: int = 0) -> Iterator[Any]:
        """Return the given batches."""
        return self._batches


def driver_loop(job: JobSpec, backend: Any, batches: Iterator[Any]) -> None:
    """Train with the driver until the batches end."""
    if not isinstance(job.work, TrainJob):
        raise ValueError("no training side")
    backend._batches = Handed(batches, backend._batches.num_samples)
    totals = RunTotals(process_start=time.monotonic(), job=job.work)
    Driver(job.work, backend, totals, StopRequest(wanted=False)).run()


def driver_round(job: JobSpec, backend: Any) -> float:
    """Train one round with the driver and return its raw training time in seconds."""
    if not isinstance(job.work, TrainJob):
        raise ValueError("no training side")
    totals = RunTotals(process_start=time.monotonic(), job=job.work)
    Driver(job.work, backend, totals, StopRequest(wanted=False)).run()
    if totals.train_start is None or totals.train_end is None:
        raise RuntimeError("the driver did not run")
    return totals.train_end - totals.train_start


@dataclass(frozen=True)
class Plan:
    """How a model is measured; ``seconds`` is the time for all its turns."""

    name: str
    make: Callable[[str, Path, int], JobSpec]
    """Called with framework, directory of checkpoints, and threads."""
    steps_per_turn: int
    """Fewer where they take longer than :data:`TURN_S`."""
    settling: int
    seconds: float
    frameworks: tuple[str, ...] = FRAMEWORKS


def compare(
    plan: Plan, framework: str, with_peers: bool, log: PerfLogWriter, seconds: float, threads: int
) -> Comparison:
    """Measure all loops alternately on one model."""
    with tempfile.TemporaryDirectory() as directory, chdir(directory):  # MindSpore writes files there
        job = plan.make(framework, Path(directory), threads)
        if not isinstance(job.work, TrainJob):
            raise ValueError("no training side")
        backend: Any = open_backend(job, job.work, log)
        started = backend.prepare()
        batch = next(iter(backend._batches.epoch(0)))
        loops: dict[str, Train] = {
            "bare": partial(import_module(f"benchmarks.bare_loops.{framework}").bare_loop, backend),
            "driver": partial(driver_loop, job, backend),
        }
        if with_peers:
            from benchmarks.peer_loops import peers

            loops |= peers(backend._case, backend._training, LOG_EVERY, Path(directory))
        turns = Turns(loops, batch, backend.synchronize)
        for name in reversed(loops):  # MindSpore 2.10 computes a function ten times as slowly that it captures first
            turns.run(name, 2 * plan.steps_per_turn)
        start = time.perf_counter()
        turns.run("bare", 1)
        steps = max(1, min(plan.steps_per_turn, round(TURN_S / (time.perf_counter() - start))))
        found = turns.measure(seconds, steps, plan.settling)
        turns.close()
    bare = found.pop("bare")
    return Comparison(
        framework,
        started.framework_version,
        plan.name,
        job.work.settings.batch_size,
        threads,
        round(statistics.median(bare.cpu_us.values()), 2),
        len(bare.cpu_us),
        steps,
        {name: Cost.of(bare.cpu_us, steps.cpu_us) for name, steps in found.items()},
        {name: Cost.of(bare.wall_us, steps.wall_us) for name, steps in found.items()},
    )


class NothingToTrain:
    """A backend whose steps do nothing, so that only the driver takes time."""

    world_size = 1
    samples_per_step = 1
    immediate = True
    num_parameters = 0
    flops_per_sample = None
    flops_per_sample_formula = None
    own_end = None
    tracer = None
    num_alloc_retries = staticmethod(int)

    def __init__(self, steps: int, job: JobSpec, log: PerfLogWriter) -> None:
        self.steps_per_epoch, self.job, self.log = steps, job, log
        self.clock = HostClock()
        self.losses = HOST_LOSSES
        self._loss = np.array(0.5)

    def prepare(self) -> Started:
        raise RuntimeError("nothing to prepare")

    def step(self, batches: list[Any]) -> Any:
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


def alone(rounds: int, log: PerfLogWriter) -> Alone:
    """Measure the driver with and without windows, to separate the cost of a step from that of a window."""
    steps = 2000
    with tempfile.TemporaryDirectory() as directory:
        windowed = micro_job(steps, Path(directory))
        whole = {**MICRO, "end.max_steps": steps, "log_every_steps": 10**9, "loader.synthetic": True}
        if not isinstance(windowed.work, TrainJob):
            raise ValueError("no training side")
        train = windowed.work.model_copy(update={"settings": TrainSettings.model_validate(nest(whole))})
        plain = windowed.model_copy(update={"work": train})
        backend = NothingToTrain(steps, plain, log)
        per_step, per_window = [], []
        for _ in range(rounds):
            start = time.process_time()
            driver_round(plain, backend)
            between = time.process_time()
            driver_round(windowed, backend)
            without, within = between - start, time.process_time() - between
            per_step.append(without / steps * 1e6)
            per_window.append((within - without) / (steps / LOG_EVERY) * 1e6)
    return Alone(round(statistics.median(per_step), 3), round(statistics.median(per_window), 2), LOG_EVERY)


PLANS: Final = (
    Plan("micro", lambda _, *rest: micro_job(ENDLESS, *rest), 20, 1, 25.0, ("pytorch",)),
    Plan("llama_micro", partial(case_job, "llama_mini", over=LLAMA_MICRO), 20, 1, 40.0),
    Plan("resnet_mini", partial(case_job, "resnet_mini"), 4, 0, 85.0),
    Plan("llama_mini", partial(case_job, "llama_mini"), 1, 0, 260.0),
)


def main() -> None:
    """Measure, print tables in Markdown, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, nothing is written")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual time")
    parser.add_argument("--peers", action="store_true", help="Trainer and Lightning too (benchmarks/peers.txt)")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="pytorch", help="that this Python has")
    parser.add_argument("--only", nargs="*", choices=[plan.name for plan in PLANS], help="these models")
    parser.add_argument("--threads", type=int, default=1, help="of each loop; beyond one the wall clock tells its cost")
    options = parser.parse_args()
    as_a_rank(options.framework)
    with tempfile.TemporaryFile() as file:
        log = PerfLogWriter(0, file.fileno())
        own = alone(5 if options.quick else 21, log)
        print(f"The driver around nothing: {own.step_us:.2f} us a step, {own.window_us:.0f} us a window of 20.\n")
        print(
            "| Model | Loop | CPU time a step, us | more than bare, us (95 %) | relative (95 %) | wall clock (95 %) |"
        )
        print("|---|---|---:|---:|---:|---:|")
        found = []
        for plan in PLANS:
            if options.framework not in plan.frameworks or (options.only and plan.name not in options.only):
                continue
            seconds = plan.seconds * (0.1 if options.quick else options.share)
            one = compare(plan, options.framework, options.peers, log, seconds, options.threads)
            found.append(one)
            show(one)
            if not options.quick:
                write(own, found, RESULTS / "overhead.json")


def as_a_rank(framework: str) -> None:
    """Restart with the environment variables of ranks, which make all loops faster."""
    place = HostPlace(1, 1, 1, 0, "127.0.0.1", 0, None, None, (), sys.executable, ())
    wanted = {**load_launch(framework).launch(place).defaults, **load_vendor("cpu").environment}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        command = [sys.executable, "-m", "benchmarks.overhead", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, **wanted}, check=False).returncode)


def show(one: Comparison) -> None:
    """Print the rows of one model."""
    print(f"| {one.model} | bare | {one.bare_us:,.0f} | | | |")
    for name, cpu in one.cpu.items():
        wall = one.wall[name]
        low, high = cpu.extra_us_interval
        print(
            f"| | {name} | {cpu.step_us:,.0f} | {cpu.extra_us:+,.1f} ({low:+,.1f} to {high:+,.1f}) "
            f"| {ratio(cpu)} | {ratio(wall)} |",
            flush=True,
        )


def ratio(cost: Cost) -> str:
    """Return a cost as a share of the bare step, with its interval."""
    low, high = cost.relative_interval
    return f"{cost.relative:+.2%} ({low:+.2%} to {high:+.2%})"


def write(own: Alone, found: list[Comparison], path: Path) -> None:
    """Write the figures; those of models that were not measured are kept."""
    machine = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu_model(),
        "cores_used": len(os.sched_getaffinity(0)),
    }
    entries = {(item.framework, item.model, item.threads): {**asdict(item), "machine": machine} for item in found}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        known = {(entry["framework"], entry["model"], entry["threads"]): entry for entry in before["comparisons"]}
        entries = known | entries
    record = {"alone": asdict(own), "comparisons": list(entries.values())}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
