"""Measure how far honest computations differ in a replay: the base of the tolerances in ``audit/reevaluation.py``.

    python -m benchmarks.replay resnet_mini --at 8 300
    python -m benchmarks.replay llama_mini --seeds 1 2 3 --set gradient_accumulation_steps=2 --record

Trains a case to checkpoints, takes steps from each and from the initial weights, and repeats them with settings that
change rounding only, or, for comparison, with batches in another order. Each row has the differences that the audit
computes: of losses over 8 steps, of the change of the parameters over 8 steps, and over 16, 32, 64 and 128 steps its
size and cosine, and the correlation of the losses. ``--record`` adds the rows to ``results/replay.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import yaml
from torch import nn

from accelmark.audit.reevaluation import NUM_CLOSE_STEPS, loss_correlation
from accelmark.frameworks.pytorch.backend import PyTorchBackend
from accelmark.results.read.round_dir import ReplayedStep
from accelmark.run.controller.data import DataFetcher, data_dirs
from accelmark.spec.job import JobSpec, TrainJob
from accelmark.spec.layers import Layer, resolve
from accelmark.spec.log.perflog import PerfLogWriter
from accelmark.spec.plugins.catalog import folders, load_case
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.settings.training import TrainSettings
from accelmark.train.loop.contract import Progress
from benchmarks.overhead import RESULTS, make_job

FILE: Final = RESULTS / "replay.json"
FLAT: Final = "optimizer over one flat buffer"
NO_ONEDNN: Final = "PyTorch's own kernels in place of oneDNN's"
OTHER_ORDER: Final = "batches in another order"
VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "the same": {},
    "channels last or first": {"channels_last": None},
    "torch.compile": {"compile": "default"},
    "optimizer not fused": {"optimizer.fused": False},
    "optimizer fused": {"optimizer.fused": True},
    FLAT: {"optimizer.fused": False},
    "attention math": {"attention": "math"},
    "2 threads": {"threads": 2},
    NO_ONEDNN: {},
    "fp32 in place of the precision": {"precision": "fp32"},
    "bf16 in place of the precision": {"precision": "bf16"},
    OTHER_ORDER: {"seed": 999},
}


MARKS: Final = (NUM_CLOSE_STEPS, 16, 32, 64, 128)


class Taken(NamedTuple):
    """Steps that were taken: their losses, and the change of all parameters after some of :data:`MARKS`."""

    losses: list[float]
    changes: dict[int, torch.Tensor]


class Row(NamedTuple):
    """Differences of steps from the same steps taken with other settings."""

    losses: float
    update: float
    sizes: dict[int, float]
    """Number of steps -> norm of the change of the parameters over that of the other steps."""
    cosines: dict[int, float]
    correlation: float | None


def job_of(name: str, directory: Path, **changed: Any) -> JobSpec:
    """Return a job of the case with one thread and the given settings."""
    spec = load_case(name)
    if spec.train is None:
        raise ValueError(f"{name} has no training side")
    settings = {"threads": 1, **changed}
    if settings.get("channels_last", False) is None:
        settings["channels_last"] = not spec.train.settings.get("channels_last", False)
    base, layer = Layer.of("case", spec.train.settings), Layer("benchmark", settings)
    resolved = resolve(TrainSettings, base, [layer], mutable=spec.train.mutable, is_open=True)
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


def flatten(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer compute on one buffer of all parameters of a group, as vendors' fused ones do."""

    def step(closure: Any = None) -> None:
        for group in optimizer.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            joined = nn.Parameter(torch.cat([each.detach().reshape(-1) for each in parameters]))
            joined.grad = torch.cat([each.grad.reshape(-1) for each in parameters])
            inner = type(optimizer)([{**group, "params": [joined]}], lr=group["lr"])  # type: ignore[call-arg]
            states = [optimizer.state[each] for each in parameters]
            inner.state[joined] = {
                name: torch.cat([state[name].reshape(-1) for state in states]) if name != "step" else value.clone()
                for name, value in states[0].items()
            }
            inner.step()
            sizes = [each.numel() for each in parameters]
            for each, part in zip(parameters, torch.split(joined.detach(), sizes), strict=True):
                each.detach().copy_(part.view_as(each))
            for name, value in inner.state[joined].items():
                parts = torch.split(value, sizes) if name != "step" else [value.clone() for _ in sizes]
                for each, state, part in zip(parameters, states, parts, strict=True):
                    state[name] = part.view_as(each).clone() if name != "step" else part

    optimizer.step = step  # type: ignore[method-assign,assignment]


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Switch off oneDNN where a variant says so."""
    with torch.backends.mkldnn.flags(enabled=name != NO_ONEDNN):
        yield


def take(backend: PyTorchBackend, start: Path | None, num_steps: int) -> Taken:
    """Take steps from a checkpoint, or from the initial weights of a new backend."""
    step = 0 if start is None else backend.checkpoints.load_for_replay(start).global_steps
    before = flat(backend)
    losses: list[float] = []
    changes: dict[int, torch.Tensor] = {}
    for batches in backend.open_epoch(*divmod(step, backend.steps_per_epoch)):
        losses.append(float(backend.step(batches)))
        if len(losses) in MARKS:
            changes[len(losses)] = flat(backend) - before
        if len(losses) == num_steps:
            break
    return Taken(losses, changes)


def flat(backend: PyTorchBackend) -> torch.Tensor:
    """Return all parameters as one tensor in double precision."""
    return torch.cat([each.detach().double().reshape(-1) for each in backend._training.model.parameters()])


def row(trained: Taken, replayed: Taken) -> Row:
    """Return the differences."""
    pairs = list(zip(trained.losses, replayed.losses, strict=True))
    norms = {
        mark: (float(trained.changes[mark].norm()), float(replayed.changes[mark].norm())) for mark in trained.changes
    }
    return Row(
        sum(abs(again - one) / abs(one) for one, again in pairs[:NUM_CLOSE_STEPS]) / NUM_CLOSE_STEPS,
        float((trained.changes[NUM_CLOSE_STEPS] - replayed.changes[NUM_CLOSE_STEPS]).norm())
        / norms[NUM_CLOSE_STEPS][1],
        {mark: round(one / other, 5) for mark, (one, other) in norms.items()},
        {
            mark: round(float(trained.changes[mark] @ replayed.changes[mark]) / (one * other), 5)
            for mark, (one, other) in norms.items()
        },
        loss_correlation(ReplayedStep(0, step, one, again) for step, (one, again) in enumerate(pairs)),
    )


def measure(
    options: argparse.Namespace, settings: Mapping[str, Any], directory: Path, log: PerfLogWriter
) -> Iterator[tuple[str, int, Row]]:
    """Yield each variant with the step from which its steps begin, and their differences."""
    standard = backend_of(job_of(options.case, directory, **settings), log)
    starts: dict[int, tuple[Path | None, Taken]] = {0: (None, take(standard, None, NUM_CLOSE_STEPS))}
    done = NUM_CLOSE_STEPS
    for at in sorted(options.at):
        if (before := starts[max(starts)][0]) is not None:
            standard.checkpoints.load_for_replay(before)
        batches = standard.open_epoch(*divmod(done, standard.steps_per_epoch))
        for _ in range(at - done):
            standard.step(next(batches))
        done = at
        saved = directory / standard.save(Progress(global_steps=at))
        starts[at] = (saved, take(standard, saved, options.steps))
    for name in options.only:
        with variant(name):
            backend = backend_of(job_of(options.case, directory, **{**settings, **VARIANTS[name]}), log)
            if name == FLAT:
                flatten(backend._training.optimizer)
            for start, (checkpoint, taken) in starts.items():
                if start or name != OTHER_ORDER:  # another seed has other initial weights
                    yield name, start, row(take(backend, checkpoint, len(taken.losses)), taken)


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--at", type=int, nargs="*", default=[8, 200], help="steps before each checkpoint, at least 8")
    parser.add_argument("--steps", type=int, default=128, help="steps of each replay")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the case for all rows")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--record", action="store_true", help=f"add the rows to {FILE.name}")
    options = parser.parse_args()
    changed = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in options.set)}
    context = {"precision": options.precision, **changed}
    what = {"case": options.case, **context, "torch": torch.__version__}
    rows: list[dict[str, Any]] = []
    print(f"\n{options.case}, {context}, {options.steps} steps")
    columns = ("losses, 8 steps", "change, 8 steps", "size", f"cosine at {MARKS}", "losses' correlation")
    print(f"| Computed with | From step | Seed | {' | '.join(columns)} |\n|---|---:|---:|---:|---:|---:|---:|---:|")
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as directory, Path(os.devnull).open("wb") as nothing:
            log = PerfLogWriter(0, nothing.fileno())
            for name, start, found in measure(options, {**context, "seed": seed}, Path(directory), log):
                values = {
                    key: round(value, 6) if isinstance(value, float) else value
                    for key, value in found._asdict().items()
                }
                rows.append({**what, "seed": seed, "with": name, "from": start, **values})
                sizes, cosines = ([f"{each:.3f}" for each in by.values()] for by in (found.sizes, found.cosines))
                cells = f"{found.losses:.5f} | {found.update:.4f} | {sizes[-1]} | {' '.join(cosines)}"
                print(f"| {name} | {start} | {seed} | {cells} | {found.correlation} |", flush=True)
    if options.record:
        known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
        lines = ",\n".join(json.dumps(each) for each in [*known, *rows])
        FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
