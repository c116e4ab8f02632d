"""Evaluate a round's weights and replay some of its steps, in a fresh process without vendor code."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from accelmark.plan.plan import PlannedJob
from accelmark.results.read.reevaluation import (
    SavedCheckpoints,
    read_reevaluation,
    reevaluation_dir,
    saved_checkpoints,
)
from accelmark.run.controller.node_jobs import write_job
from accelmark.run.controller.waiting import Cancellation, run_until_signal, start_agents, wait_for_agents
from accelmark.run.launchers import create_launcher
from accelmark.run.launchers.launcher import Launcher
from accelmark.run.record.directory import RunDirectory
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.job import EvaluateJob, JobSpec, ReplayedPair, TrainJob
from accelmark.spec.log.records import DataRecord

FetchData = Callable[[JobSpec, Callable[[str], None]], Mapping[str, DataRecord] | None]
"""Ensures that a job's data is in its ``data_dirs`` and reports progress; raises DataError.

Returns a record of each data set, or None where it did not check."""

MOST_DRAWN: Final = 128
"""Most steps that are replayed of pairs of checkpoints, which have at most as many."""
MOST_REPLAYED: Final = 8 + 2 * MOST_DRAWN
"""Most steps that are replayed after a round: from the initial weights, of drawn pairs, and of one that stands out."""
_UNCHECKED_STEPS: Final = 8
"""Steps that are replayed from the initial weights where no checkpoint was written after them."""


@final
@dataclass(frozen=True, slots=True)
class WeightsCheck:
    """The evaluation job of one round."""

    round_dir: Path
    job: PlannedJob

    @classmethod
    def of(
        cls, directory: RunDirectory, job: PlannedJob, nonce: str | None = None, *, beside: bool = False
    ) -> Self | None:
        """Return the evaluation job of a round that succeeded; None where it saved no weights to evaluate.

        Args:
            directory: the run.
            job: the round.
            nonce: chooses the replayed pair together with the round's log; the job then gets a directory of its own
                and evaluates nothing.
            beside: the job gets a directory of its own where the round's evaluation is complete.
        """
        train, round_dir = job.job.work, directory.round_dir(job)
        saved = saved_checkpoints(round_dir)
        if not isinstance(train, TrainJob) or not saved.steps:
            return None
        place = reevaluation_dir(round_dir)
        if nonce is not None:
            place = place.with_name(f"{place.name}-{hashlib.sha256(nonce.encode()).hexdigest()[:12]}")
        elif beside and (earlier := read_reevaluation(round_dir)) is not None and earlier.problem is None:
            place = place.with_name(f"{place.name}-again")
        hashes = saved.hashes
        replays = tuple(_replays(saved, nonce or ""))
        weights: tuple[str | None, ...] = ()
        if nonce is None and not train.settings.loader.synthetic:
            weights = (max(saved.steps, key=lambda name: saved.steps[name]),) if hashes is None else (hashes.final,)
            weights += (hashes.claimed,) if hashes is not None else ()
        names = tuple(name for name in dict.fromkeys(weights) if name is not None)
        used = {*names, *(name for pair in (*replays, *_pairs(saved)) for name in (pair.start, pair.end))}
        settings = train.settings.model_copy(update={"compile": "off"})
        work = EvaluateJob(
            unit=train.unit,
            units_per_sample=train.units_per_sample,
            train=train.model_copy(update={"settings": settings}),
            weights=names,
            replays=replays,
            others=() if nonce is not None else tuple(_pairs(saved)),
            sha256=_chosen(hashes.sha256 if hashes is not None else {}, used),
            sha256_on_hosts={rank: _chosen(sha256, used) for rank, sha256 in saved.on_hosts.items()},
        )
        changed: dict[str, object] = {
            "work": work,
            "extern": None,
            "adaptation": None,
            "vendor_environment": {},
            "framework_module": None if job.job.device_type == "cpu" else job.job.framework_module,
            "checkpoint_dir": Path(os.path.relpath(round_dir / job.job.checkpoint_dir, place)),
        }
        command = ("python", "-m", work.rank_module, "job.json")
        nodes = tuple(node.model_copy(update={"command": command}) for node in job.nodes)
        name = place.relative_to(directory.path).as_posix()
        return cls(round_dir, PlannedJob(directory=name, job=job.job.model_copy(update=changed), nodes=nodes))

    async def run(
        self,
        directory: RunDirectory,
        launcher: Launcher,
        fetch: FetchData,
        stop: Cancellation,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the job to its end; its records are in :func:`reevaluation_dir`. Calls ``tick`` several times a second.

        Raises:
            AccelmarkError: a host cannot run it, or its data is not what it was.
        """
        tick()
        place = directory.round_dir(self.job)
        shutil.rmtree(place, ignore_errors=True)
        nodes = await write_job(directory, self.job, launcher)
        if launcher.spec.shares_filesystem:
            await asyncio.to_thread(fetch, nodes[0].job, lambda _: None)
        agents = launcher.agents(nodes)
        await asyncio.gather(*(agent.prepare() for agent in agents))
        await start_agents(agents)
        await wait_for_agents(agents, stop, tick, interval_s=0.2)


def _chosen(sha256: Mapping[str, str], names: Collection[str | None]) -> dict[str, str]:
    return {name: value for name, value in sha256.items() if name in names}


def _replays(saved: SavedCheckpoints, nonce: str) -> Iterator[ReplayedPair]:
    """Yield the steps from the initial weights, then those of pairs that the round's log and ``nonce`` choose."""
    hashes, steps, seed = saved.hashes, saved.steps, f"{saved.log_sha256} {nonce}"
    if hashes is None:
        return
    first = next((end for start, end in hashes.pairs if start is None and end in steps), None)
    if first is not None:
        yield ReplayedPair(start=None, end=first, first_step=1, num_steps=steps[first])
    elif hashes.final is not None and steps.get(hashes.final):
        yield ReplayedPair(start=None, end=None, first_step=1, num_steps=min(_UNCHECKED_STEPS, steps[hashes.final]))
    num_left = MOST_DRAWN
    for number, pair in enumerate(sorted(_pairs(saved), key=lambda pair: _digest(f"{seed} {pair.start}"))):
        num_left -= pair.num_steps
        if number and num_left < 0:
            return
        yield pair


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _pairs(saved: SavedCheckpoints) -> Iterator[ReplayedPair]:
    """Yield the pairs of checkpoints, without that from the initial weights."""
    for start, end in saved.hashes.pairs if saved.hashes is not None else ():
        if start is not None and start in saved.steps and end in saved.steps:
            begin = saved.steps[start]
            yield ReplayedPair(start=start, end=end, first_step=begin + 1, num_steps=saved.steps[end] - begin)


def evaluate_run(path: Path, fetch: FetchData, nonce: str | None = None) -> dict[Path, Path]:
    """Evaluate the weights of each round of a finished run, or with a nonce replay the steps that it chooses.

    Returns the directory of each round with that of its evaluation job, which is :func:`reevaluation_dir` only where
    the round had no complete evaluation: other directories are the caller's to remove.

    Raises:
        RequestError: no round trained to its end and kept checkpoints.
        AccelmarkError: a host cannot run a job.
    """
    directory = RunDirectory.open(path)
    with directory.locked():
        statuses = directory.statuses()
        succeeded = [job for job in directory.plan.jobs if statuses[job.directory].state == "succeeded"]
        checks = list(filter(None, (WeightsCheck.of(directory, job, nonce, beside=True) for job in succeeded)))
        checks = [check for check in checks if nonce is None or _work(check).replays]
        if not checks:
            raise RequestError(
                f"{path}: no round that succeeded has saved weights{' and pairs' if nonce is not None else ''}; "
                "only rounds of training on real data have them, not those of earlier versions"
            )
        missing = [name for check in checks for name in _missing(directory, check)]
        if missing:
            raise RequestError(f"{missing[0]}: the checkpoint was removed, so that nothing can be replayed")
        places = {check.round_dir: directory.round_dir(check.job) for check in checks}
        try:
            run_until_signal(_run_all(directory, checks, fetch))
        except BaseException:
            remove_repeated(places)
            raise
        return places


def remove_repeated(places: Mapping[Path, Path]) -> None:
    """Remove the evaluation jobs of :func:`evaluate_run` that are not the evaluations of their rounds."""
    for round_dir, place in places.items():
        if place != reevaluation_dir(round_dir):
            shutil.rmtree(place, ignore_errors=True)


def _work(check: WeightsCheck) -> EvaluateJob:
    work = check.job.job.work
    if not isinstance(work, EvaluateJob):
        raise RunError(f"{check.round_dir}: is no evaluation")
    return work


def _missing(directory: RunDirectory, check: WeightsCheck) -> Iterator[Path]:
    """Yield checkpoints that are absent, where they are on this machine."""
    here = (directory.round_dir(check.job) / check.job.job.checkpoint_dir).resolve()
    if here.is_dir():
        yield from (here / name for name in _work(check).sha256 if not (here / name).is_dir())


async def _run_all(directory: RunDirectory, checks: list[WeightsCheck], fetch: FetchData) -> None:
    launcher = create_launcher(directory.plan, directory.path)
    try:
        for check in checks:
            await check.run(directory, launcher, fetch, Cancellation())
    finally:
        await launcher.close()
