"""One rank of a job: ``python -m accelmark.train.loop.rank JOB.json``.

It runs from the event INIT_START to FINISHED, which every rank writes once, last, however it ends.
"""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from accelmark.datasets.verify import DataReads
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK, AccelmarkError, RequestError, RunError, raising
from accelmark.spec.job import CompareJob, EvaluateJob, JobSpec, ReplayedPair, TrainJob
from accelmark.spec.log.events import DataRead, Evaluated, Event, Replayed
from accelmark.spec.log.perflog import EventLog, PerfLogWriter
from accelmark.spec.model import parse
from accelmark.spec.plugins.catalog import find, folder_module, load_framework
from accelmark.spec.plugins.framework import STACKS_SIGNAL, RankPlace
from accelmark.spec.plugins.requirements import Need, require_all
from accelmark.train.loop.checkpoint_writer import hash_of
from accelmark.train.loop.contract import Backend, ForeignStateError, Replay
from accelmark.train.loop.driver import Driver, Observer
from accelmark.train.loop.ends import End
from accelmark.train.loop.process import Cancelled, Stop, StopRequest, process_start, redirect_output
from accelmark.train.loop.window import RunTotals

_OUTLIER_RATIO: Final = 1.3
"""Replay a pair whose parameters moved 1.3 times as far per step as in its neighbours."""


class RankOutcome(NamedTuple):
    """How the work of a rank ended."""

    end: End
    backend: Backend | None
    in_step: bool
    """Whether the ranks ended together, so that they can still communicate."""
    exit_code: int


def run_rank(job: JobSpec, log: EventLog, process_start: float, stop: StopRequest) -> int:
    """Run this rank's part of a job; returns the exit code of its process, 0 only when the work completed."""
    work = job.work
    train = work.train if isinstance(work, (EvaluateJob, CompareJob)) else work
    if not isinstance(train, TrainJob):
        raise RequestError(f"job.json: a training rank cannot do work of kind {work.kind!r}")
    train = train if job.seed is None else train.with_seed(job.seed)
    totals = RunTotals(process_start=process_start, job=train)

    def overdue(signal_name: str) -> None:
        message = f"ended by {signal_name}; the step in progress did not end in time"
        totals.write_finished(End("cancelled", message), log)
        os._exit(EXIT_CANCELLED)

    stop.install(overdue)

    backend = partial(open_backend, job, train, log)
    if isinstance(work, EvaluateJob):
        reads = DataReads(job.data_dirs)
        outcome = run_work(backend, lambda opened: _check(work, job.checkpoint_dir, opened, log, reads), log, totals)
    elif isinstance(work, CompareJob):
        from accelmark.train.loop.comparison import take_first_steps  # NumPy, which a training rank does not need here

        place = RankPlace.from_environment()
        outcome = run_work(backend, lambda opened: take_first_steps(work, opened, place), log, totals)
    else:
        outcome = run_training(train, backend, log, totals, stop)
    stop.finish()
    totals.write_finished(outcome.end, log)
    if outcome.backend is not None:
        outcome.backend.close(together=outcome.in_step)
    return outcome.exit_code


def main(arguments: list[str], run: Callable[[JobSpec, PerfLogWriter, float, StopRequest], int] = run_rank) -> int:
    """Run one rank of the job that ``arguments`` name, by default a training job; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m accelmark.train.loop.rank JOB.json", file=sys.stderr)
        return 2
    start, path = process_start(), Path(arguments[0])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each memory-mapped file of the data stays open
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rank = RankPlace.from_environment().rank
    node_dir = os.environ.get("ACCELMARK_NODE_DIR")
    if node_dir:
        redirect_output(Path(node_dir) / f"rank{rank}.out.log")
        faulthandler.register(STACKS_SIGNAL)
    log = PerfLogWriter(rank)
    try:
        began = {"pid": os.getpid(), "job": str(path), "process_start_mono_ms": round(start * 1e3, 3)}
        log.event(Event.INIT_START, began)
        with raising(RequestError, f"{path}: cannot be read as a job", OSError, ValueError):
            values = json.loads(path.read_text(encoding="utf-8"))
        return run(parse(JobSpec, values, str(path)), log, start, StopRequest())
    except AccelmarkError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        RunTotals(process_start=start).write_finished(End("error", str(error)), log)
        return error.exit_code


def end_process(code: int) -> NoReturn:
    """End the process and its loaders' workers without Python's finalisation, in which a gloo thread may abort."""
    for worker in multiprocessing.active_children():
        worker.terminate()
        worker.join(5.0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def open_backend(job: JobSpec, train: TrainJob, log: EventLog) -> Backend:
    """Create the backend of the job's framework. Raises RequestError: a setting needs a newer version of it."""
    needs = load_framework(job.framework).needs_of(lambda name: reduce(getattr, name.split("."), train.settings))
    require_all(Need(requirement=need, needed_by=by) for by, requires in needs.items() for need in requires)
    module = folder_module(find("frameworks", job.framework, "job.json"), "backend")
    backend: Backend = module.open_backend(job, train, RankPlace.from_environment(), log)
    return backend


def run_training(
    train: TrainJob,
    open_backend: Callable[[], Backend],
    log: EventLog,
    totals: RunTotals,
    stop: Stop,
    observer: Observer | None = None,
) -> RankOutcome:
    """Train, and turn every error into an end; the caller writes FINISHED."""

    def body(backend: Backend) -> End:
        end = Driver(train, backend, totals, stop, observer).run()
        backend.trained()
        return end

    return run_work(open_backend, body, log, totals)


def run_work(
    open_backend: Callable[[], Backend], body: Callable[[Backend], End], log: EventLog, totals: RunTotals
) -> RankOutcome:
    """Create and prepare a backend, run ``body`` with it, and turn every error into an end."""
    backend: Backend | None = None
    code = EXIT_FAILED
    in_step = False
    try:
        backend = open_backend()
        totals.backend = backend
        log.event(Event.INIT_END, backend.prepare().model_copy(update={"init_cpu_s": sum(os.times()[:4])}))
        end = body(backend)
        in_step = True
    except Cancelled as cancelled:
        end = End("cancelled", f"ended by {cancelled}")
    except Exception as error:  # noqa: BLE001 - every error must end in FINISHED
        end = End("error", str(error) if isinstance(error, AccelmarkError) else f"{type(error).__name__}: {error}")
        if backend is not None:
            end = End(*backend.explain(error))
        if isinstance(error, AccelmarkError):
            code = error.exit_code
        else:
            traceback.print_exc()
            frames = traceback.extract_tb(error.__traceback__)
            inside = [frame for frame in frames if {"cases", "vendors"} & set(Path(frame.filename).parts)]
            if inside and end.reason == "error":  # in the code of a case or a vendor
                end = End("error", f"{end.message} ({Path(inside[-1].filename).name}:{inside[-1].lineno})")
        log.event(Event.ERROR, {"type": type(error).__name__, "message": end.message})
    if totals.peak_device_memory_mib is None and backend is not None:
        totals.peak_device_memory_mib = backend.peak_memory_mib()
    code = EXIT_OK if end.completed else EXIT_CANCELLED if end.reason == "cancelled" else code
    return RankOutcome(end, backend, in_step, code)


def _check(work: EvaluateJob, directory: Path, backend: Backend, log: EventLog, reads: DataReads) -> End:
    """Replay steps first, since the initial weights are those that were just built, evaluate, hash what was read."""
    rank = RankPlace.from_environment().rank
    for name, sha256 in (work.sha256 if rank == 0 else work.sha256_on_hosts.get(rank, {})).items():
        if hash_of(directory / name) != sha256:
            raise RunError(f"the checkpoint {directory / name} was changed after the end of training")
    first = [_replay(replay, directory, backend, log) for replay in work.replays][:1]
    for outlier in _outliers(first, work.others, directory, backend):
        if outlier not in work.replays:
            _replay(outlier, directory, backend, log)
    for name in work.weights:
        began = time.monotonic()
        metrics = backend.evaluate(directory / name)
        log.event(Event.EVALUATED, Evaluated(weights=name, metrics=dict(metrics), duration_s=time.monotonic() - began))
    log.event(Event.DATA_READ, DataRead(sample=reads.sample(f"{work.draw} {rank}")))
    return End("evaluated")


def _replay(pair: ReplayedPair, directory: Path, backend: Backend, log: EventLog) -> float:
    """Replay the steps of a pair, and log their losses and effect; returns how far training moved a step."""
    start, end = (None if name is None else directory / name for name in (pair.start, pair.end))
    try:
        done = backend.replay(start, pair.num_steps, end)
    except ForeignStateError as error:
        log.event(Event.WARNING, {"message": f"no steps were replayed from {pair.start}: {error}"})
        return 0.0
    if done.first_step != pair.first_step:
        step = done.first_step - 1
        raise RunError(f"the checkpoint {start} says step {step}, the log of training {pair.first_step - 1}")
    log.event(Event.REPLAYED, Replayed(checkpoint=pair.start, end=pair.end, **vars(done)))
    return _distance(done, pair)


def _distance(replay: Replay, pair: ReplayedPair) -> float:
    return math.sqrt(replay.update.saved) / pair.num_steps if replay.update is not None else 0.0


def _outliers(
    before: list[float], pairs: Sequence[ReplayedPair], directory: Path, backend: Backend
) -> Sequence[ReplayedPair]:
    """Return the pair in which parameters moved farthest a step compared with those next to it, and that before.

    Weights from elsewhere, loaded once between two checkpoints, show in this way; an optimizer's state that carries
    them shows at the end of the pair before. ``before`` is the distance in the first steps.
    """
    moved = [*before]
    for pair in pairs:
        start, end = (None if name is None else directory / name for name in (pair.start, pair.end))
        try:
            moved.append(_distance(backend.replay(start, 0, end), pair))
        except ForeignStateError:
            return ()
    if len(moved) < 3 or not all(moved):
        return ()
    around = [math.sqrt(first * last) for first, last in zip(moved, moved[2:])]
    around = [moved[1], *around, moved[-2]]
    farther = [each / last for each, last in zip_strict(moved, around)][len(before) :]
    number = max(range(len(farther)), key=farther.__getitem__)
    return pairs[max(number - 1, 0) : number + 1] if farther[number] > _OUTLIER_RATIO else ()


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
