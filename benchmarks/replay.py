"""Measure how far honest computations differ in a replay: the base of the tolerances in ``audit/reevaluation.py``.

    python -m benchmarks.replay resnet_mini --at 300
    python -m benchmarks.replay llama_mini --at 60 --steps 8

Trains a case to a checkpoint, takes steps from there and from the initial weights, and repeats both with settings that
change rounding only. Each row has the differences that the audit computes: of losses over 8 steps, of the change of the
parameters over 8 steps, and over all steps its size, its cosine and the correlation of the losses.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from accelmark.audit.reevaluation import NUM_CLOSE_STEPS, loss_correlation
from accelmark.frameworks.pytorch.backend import PyTorchBackend
from accelmark.results.read.reevaluation import ReplayedStep
from accelmark.run.controller.data import DataFetcher, data_dirs
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.layers import Layer, resolve
from accelmark.spec.log.perflog import PerfLogWriter
from accelmark.spec.plugins.catalog import folders, load_case
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.contract import Progress
from benchmarks.overhead import make_job

VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "the same": {},
    "channels last or first": {"channels_last": None},
    "torch.compile": {"compile": "default"},
    "optimizer not fused": {"optimizer.fused": False},
    "optimizer fused": {"optimizer.fused": True},
    "fp32 in place of the precision": {"precision": "fp32"},
    "bf16 in place of the precision": {"precision": "bf16"},
}


class Taken(NamedTuple):
    """Steps that were taken: their losses, and the change of all parameters after 8 and after all of them."""

    losses: list[float]
    close: torch.Tensor
    whole: torch.Tensor


def job_of(name: str, directory: Path, **changed: Any) -> JobSpec:
    """Return a job of the case with one thread and the given settings."""
    spec = load_case(name)
    if spec.train is None:
        raise ValueError(f"{name} has no training side")
    settings = {"threads": 1, **changed}
    if settings.get("channels_last", False) is None:
        settings["channels_last"] = not spec.train.settings.get("channels_last", False)
    resolved = resolve(
        Layer.of("case", spec.train.settings),
        [Layer("benchmark", settings)],
        mutable=spec.train.mutable,
        is_open=True,
    )
    job = make_job(name, folders("cases")[name].ref("train"), resolved.settings, directory)
    job = job.model_copy(update={"data_dirs": data_dirs(spec, None)})
    DataFetcher()(job, lambda _: None)
    return job


def backend_of(job: JobSpec, log: PerfLogWriter) -> PyTorchBackend:
    """Return a prepared backend."""
    if not isinstance(job.work, TrainJob):
        raise ValueError("no training side")
    torch._dynamo.reset()
    backend = PyTorchBackend(job, job.work, RankPlace(), log)
    backend.prepare()
    return backend


def take(backend: PyTorchBackend, start: Path | None, num_steps: int) -> Taken:
    """Take steps from a checkpoint, or from the initial weights of a new backend."""
    step = 0 if start is None else backend.checkpoints.load_for_replay(start).global_steps
    before = flat(backend)
    losses: list[float] = []
    close = before
    for batches in backend.open_epoch(*divmod(step, backend.steps_per_epoch)):
        losses.append(float(backend.step(batches)))
        if len(losses) == NUM_CLOSE_STEPS:
            close = flat(backend) - before
        if len(losses) == num_steps:
            break
    return Taken(losses, close, flat(backend) - before)


def flat(backend: PyTorchBackend) -> torch.Tensor:
    """Return all parameters as one tensor in double precision."""
    return torch.cat([each.detach().double().reshape(-1) for each in backend._training.model.parameters()])


def row(trained: Taken, replayed: Taken) -> str:
    """Return the differences as cells of a table."""
    pairs = list(zip(trained.losses, replayed.losses, strict=True))[:NUM_CLOSE_STEPS]
    loss = sum(abs(again - one) / abs(one) for one, again in pairs) / len(pairs)
    close = float((trained.close - replayed.close).norm() / replayed.close.norm())
    size = float(trained.whole.norm() / replayed.whole.norm())
    cosine = float(trained.whole @ replayed.whole / trained.whole.norm() / replayed.whole.norm())
    losses = enumerate(zip(trained.losses, replayed.losses, strict=True))
    correlation = loss_correlation(ReplayedStep(0, step, one, again) for step, (one, again) in losses)
    return f"{loss:.5f} | {close:.4f} | {size:.3f} | {cosine:.3f} | {correlation:.3f}"


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--at", type=int, default=100, help="steps before the checkpoint")
    parser.add_argument("--steps", type=int, default=64, help="steps of each replay")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    if options.at < options.steps:
        parser.error("--at has to be at least --steps")
    with tempfile.TemporaryDirectory() as directory, Path(os.devnull).open("wb") as nothing:
        log = PerfLogWriter(0, nothing.fileno())
        standard = backend_of(job_of(options.case, Path(directory), precision=options.precision), log)
        initial = take(standard, None, options.steps)
        batches = standard.open_epoch(0, options.steps)
        for _ in range(options.at - options.steps):
            standard.step(next(batches))
        progress = Progress(global_steps=options.at)
        checkpoint = Path(directory) / standard.save(progress)
        later = take(standard, checkpoint, options.steps)
        print(f"\n{options.case}, {options.precision}, {options.steps} steps")
        columns = ("losses, 8 steps", "change, 8 steps", "size, all steps", "cosine, all steps", "losses' correlation")
        print(f"| Computed with | From | {' | '.join(columns)} |")
        print("|---|---|---:|---:|---:|---:|---:|")
        for name in options.only:
            settings = {"precision": options.precision, **VARIANTS[name]}
            backend = backend_of(job_of(options.case, Path(directory), **settings), log)
            for label, start, reference in (("initial", None, initial), ("checkpoint", checkpoint, later)):
                print(f"| {name} | {label} | {row(take(backend, start, options.steps), reference)} |", flush=True)


if __name__ == "__main__":
    main()
