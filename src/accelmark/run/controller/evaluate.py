"""Evaluate a round's weights and replay some of its steps, in a fresh process without vendor code."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Final

from accelmark.plan.plan import PlannedJob
from accelmark.results.read import round_dir as reading
from accelmark.run.controller.execution import Cancellation, FetchData, execute_job, run_until_signal
from accelmark.run.display.displays import Tail
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import EvaluateJob, ReplayedPair, TrainJob
from accelmark.spec.log.events import Event, Replayed
from accelmark.spec.log.perflog import decode_line
from accelmark.spec.plugins.framework import module_command

MOST_DRAWN: Final = 128
"""Most steps that are replayed of pairs of checkpoints, which have at most as many."""
MOST_REPLAYED: Final = 8 + 5 * MOST_DRAWN
"""Most steps that are replayed after a round: its first steps, the pairs that end in evaluated weights, drawn pairs,
and a pair whose update is an outlier with the pair before it."""
_UNCHECKED_STEPS: Final = 8
"""Steps that are replayed from the initial weights where no checkpoint was written after them."""


def evaluation_of(
    directory: RunDirectory, job: PlannedJob, nonce: str | None = None, *, again: bool = False
) -> PlannedJob | None:
    """Return the evaluation job of a round that succeeded; None where it saved no weights to evaluate.

    Args:
        nonce: chooses the replayed pairs instead of a new secret; ``all``: every pair. The job then gets a directory
            of its own and evaluates nothing.
        again: the job gets a directory of its own where the round's evaluation is complete.
    """
    round_dir = directory.round_dir(job)
    spec = reading.read_job(round_dir)
    train = spec.work
    if not isinstance(train, TrainJob) or not (saved := reading.saved_checkpoints(round_dir)).steps:
        return None
    train = train if spec.seed is None else train.with_seed(spec.seed)
    place = reading.reevaluation_dir(round_dir)
    if nonce is not None:
        place = place.with_name(f"{place.name}-{hashlib.sha256(nonce.encode()).hexdigest()[:12]}")
    elif again and (earlier := reading.read_reevaluation(round_dir)) is not None and earlier.problem is None:
        place = place.with_name(f"{place.name}-again")
    hashes, draw = saved.hashes, nonce
    with contextlib.suppress(RunError):  # of an evaluation that was interrupted: another draw would be another chance
        earlier_work = reading.read_job(place).work
        draw = draw or (earlier_work.draw if isinstance(earlier_work, EvaluateJob) else None)
    draw = draw or secrets.token_hex(16)
    is_all = train.settings.checkpoint.replay_all or nonce == "all"
    replays = tuple(_replays(saved, draw, math.inf if is_all else MOST_DRAWN))
    weights: tuple[str | None, ...] = ()
    if nonce is None and not train.settings.loader.synthetic:
        weights = (max(saved.steps, key=lambda name: saved.steps[name]),) if hashes is None else (hashes.final,)
        weights += (hashes.claimed,) if hashes is not None else ()
    names = tuple(name for name in dict.fromkeys(weights) if name is not None)
    used = {*names, *(name for pair in (*replays, *_pairs(saved)) for name in (pair.start, pair.end))}

    def chosen(sha256: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in sha256.items() if name in used}

    work = EvaluateJob(
        unit=train.unit,
        units_per_sample=train.units_per_sample,
        train=train.model_copy(update={"settings": train.settings.model_copy(update={"compile": "off"})}),
        weights=names,
        replays=replays,
        draw=draw,
        others=() if nonce is not None else tuple(_pairs(saved)),
        sha256=chosen(hashes.sha256 if hashes is not None else {}),
        sha256_on_hosts={rank: chosen(sha256) for rank, sha256 in saved.on_hosts.items()},
    )
    changed: dict[str, object] = {
        "work": work,
        "extern": None,
        "adaptation": None,
        "vendor_environment": {},
        "framework_module": None if job.job.device_type == "cpu" else job.job.framework_module,
        "checkpoint_dir": Path(os.path.relpath(round_dir / job.job.checkpoint_dir, place)),
    }
    command = tuple(module_command("python", work.rank_module, "job.json"))
    nodes = tuple(node.model_copy(update={"command": command}) for node in job.nodes)
    name = place.relative_to(directory.path).as_posix()
    return PlannedJob(directory=name, job=job.job.model_copy(update=changed), nodes=nodes)


async def evaluate(
    directory: RunDirectory,
    evaluation: PlannedJob,
    launcher: Launcher,
    fetch: FetchData,
    stop: Cancellation,
    report: Callable[[str], None],
) -> None:
    """Execute the evaluation job of a round, in place of an earlier one; ``report`` receives its progress every second.

    Raises AccelmarkError: a host cannot run it, or its data changed.
    """
    num_steps = sum(pair.num_steps for pair in _work(evaluation).replays)
    log, num_replayed = Tail(directory.node_dir(evaluation, evaluation.nodes[0]) / "rank0.out.log"), 0

    def tick() -> None:
        nonlocal num_replayed
        for event in chain.from_iterable(map(decode_line, log.lines())):
            if event.event == Event.REPLAYED:
                num_replayed += len(event.value_as(Replayed).losses)
        # An outlier among the updates adds steps to those that were planned.
        report(f"evaluating weights, {num_replayed:,} of {max(num_steps, num_replayed):,} steps replayed")

    shutil.rmtree(directory.round_dir(evaluation), ignore_errors=True)
    tick()
    await execute_job(evaluation, launcher, fetch, stop, tick=tick, interval_s=1.0)


def _replays(saved: reading.SavedCheckpoints, draw: str, num_left: float) -> Iterator[ReplayedPair]:
    """Yield the steps from the initial weights, those up to evaluated ones, then drawn pairs of ``num_left`` steps."""
    hashes, steps = saved.hashes, saved.steps
    if hashes is None:
        return
    first = next((end for start, end in hashes.pairs if start is None and end in steps), None)
    if first is not None:
        yield ReplayedPair(start=None, end=first, first_step=1, num_steps=steps[first])
    elif hashes.final is not None and steps.get(hashes.final):
        yield ReplayedPair(start=None, end=None, first_step=1, num_steps=min(_UNCHECKED_STEPS, steps[hashes.final]))
    pairs = sorted(_pairs(saved), key=lambda pair: hashlib.sha256(f"{draw} {pair.start}".encode()).digest())
    last = [pair for pair in pairs if pair.end in (hashes.final, hashes.claimed)]
    yield from last
    for number, pair in enumerate(pair for pair in pairs if pair not in last):
        num_left -= pair.num_steps
        if number and num_left < 0:
            return
        yield pair


def _pairs(saved: reading.SavedCheckpoints) -> Iterator[ReplayedPair]:
    """Yield the pairs of checkpoints except the one from the initial weights."""
    for start, end in saved.hashes.pairs if saved.hashes is not None else ():
        if start is not None and start in saved.steps and end in saved.steps:
            begin = saved.steps[start]
            yield ReplayedPair(start=start, end=end, first_step=begin + 1, num_steps=saved.steps[end] - begin)


@contextlib.contextmanager
def evaluated_run(
    path: Path, fetch: FetchData, report: Callable[[str], None], nonce: str | None = None
) -> Iterator[Mapping[Path, Path]]:
    """Evaluate the weights of each round of a finished run, or with a nonce replay the steps that it chooses.

    Provides the directory of each round with that of its evaluation job. That is :func:`reevaluation_dir` only where
    the round had no complete evaluation; other directories are removed when the context ends.

    Raises RequestError: no round trained to its end and kept checkpoints.
    """
    directory, places = RunDirectory.open(path), dict[Path, Path]()
    try:
        with directory.locked():
            statuses = directory.statuses()
            evaluations: dict[Path, PlannedJob] = {}
            for job in directory.plan.jobs:
                if statuses[job.directory].state == "succeeded":
                    found = evaluation_of(directory, job, nonce, again=True)
                    if found is not None and (nonce is None or _work(found).replays):
                        evaluations[directory.round_dir(job)] = found
            if not evaluations:
                raise RequestError(
                    f"{path}: no round that succeeded has saved weights{' and pairs' if nonce is not None else ''}; "
                    "only rounds of training on real data have them"
                )
            for evaluation in evaluations.values():
                checkpoints = (directory.round_dir(evaluation) / evaluation.job.checkpoint_dir).resolve()
                for name in _work(evaluation).sha256 if checkpoints.is_dir() else ():  # else they are on hosts
                    if not (checkpoints / name).is_dir():
                        problem = "the checkpoint was removed, so that nothing can be replayed"
                        raise RequestError(f"{checkpoints / name}: {problem}")

            async def run_all() -> None:
                async with create_launcher(directory.plan, directory.path) as launcher:
                    for evaluation in evaluations.values():
                        await evaluate(directory, evaluation, launcher, fetch, Cancellation(), report)

            places |= {round_dir: directory.round_dir(evaluation) for round_dir, evaluation in evaluations.items()}
            run_until_signal(run_all())
        yield places
    finally:
        for round_dir, place in places.items():
            if place != reading.reevaluation_dir(round_dir):
                shutil.rmtree(place, ignore_errors=True)


def _work(evaluation: PlannedJob) -> EvaluateJob:
    assert isinstance(evaluation.job.work, EvaluateJob)  # noqa: S101  made by evaluation_of
    return evaluation.job.work
