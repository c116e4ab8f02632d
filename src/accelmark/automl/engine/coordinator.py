"""Drive a search: networks prepared ahead, trials started, watched and recorded, until the schedule says it is over."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.counting import count
from accelmark.automl.curve import predicted_accuracy
from accelmark.automl.engine.crew import Crew, Ended, EpochReported, Lost, Progressed, Ready
from accelmark.automl.engine.hyperparameters import Settled, open_hyperparameters
from accelmark.automl.engine.journal import Beat, EpochDone, Event, Journal, Note, SessionBegan, SessionEnded, Tried
from accelmark.automl.engine.proposals import Proposals
from accelmark.automl.engine.rundir import RunDirectory
from accelmark.automl.engine.state import RunState
from accelmark.automl.engine.weights import WeightStore, read_weights
from accelmark.automl.records import EpochRecord, Hyperparameters, OperationCost, TrialRecord, TrialStatus
from accelmark.automl.schedule import Assignment, Scheduler
from accelmark.automl.search import Individual
from accelmark.automl.trial.order import Array, EpochReport, TrialOrder, digest
from accelmark.spec.errors import RunError

_BEAT_S: Final = 1.0
_LISTEN_S: Final = 0.2
_GRACE_S: Final = 120.0
_MAX_REPLACEMENTS: Final = 3

Observer = Callable[[RunState, Scheduler], None]


class Coordinator:
    """One session of a run: from taking it up to putting it down."""

    def __init__(
        self,
        run: RunDirectory,
        config: AutomlConfig,
        crew: Crew,
        *,
        fingerprint: str,
        identity: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._run: Final = run
        self._config: Final = config
        self._crew: Final = crew
        self._observer: Final = observer
        self._fingerprint: Final = fingerprint
        self._identity: Final = identity
        self._state = run.state() if (run.path / "journal.jsonl").exists() else RunState()
        self._journal: Final = Journal(run.path)
        self._store: Final = WeightStore(run.weights)
        self._base_s: Final = self._state.clock_s
        self._idle: set[int] = set(range(crew.size))
        self._working: dict[int, TrialRecord] = {}
        self._orders: dict[int, TrialOrder] = {}
        self._seen: dict[int, tuple[int, float]] = {}
        self._cut_asked: dict[int, float] = {}
        self._replaced: dict[int, int] = {}
        self._last_beat = -_BEAT_S
        self._began = time.monotonic()
        self._hyperparameters: Final = open_hyperparameters(
            config, run, fingerprint=fingerprint, sessions=len(self._state.sessions)
        )
        self._scheduler = self._state.scheduler(config.schedule.schedule)
        self._proposals: Final = Proposals(config, self._state.family(config.seed), self._write)

    def ask_to_stop(self) -> None:
        """End the run in order as soon as running trials have been cut."""
        self._scheduler.asked_to_stop = True

    def work(self) -> SessionEnded:
        """Drive the run until it is over or asked to stop; return how the session ended."""
        try:
            self._take_up()
            while not self._scheduler.over(self._now()):
                self._step()
            ended = self._put_down()
            self._write(ended)
            return ended
        finally:
            self._proposals.close()
            self._journal.close()
            self._hyperparameters.close()

    def _now(self) -> float:
        return self._base_s + time.monotonic() - self._began

    def _write(self, event: Event) -> None:
        self._journal.write(event)
        self._state.take(event)

    def _take_up(self) -> None:
        self._hyperparameters.take_up()
        if not self._state.individuals:
            self._proposals.begin(self._run.network())
            self._scheduler.offer(0)
        self._proposals.fill(self._scheduler, wait=True)
        self._began = time.monotonic()
        self._write(
            SessionBegan(
                at=datetime.now(UTC).isoformat(timespec="seconds"),
                clock_s=self._base_s,
                monotonic_s=self._began,
                host=platform.node(),
                pid=os.getpid(),
                experiment=self._run.name,
                dataset_fingerprint=self._fingerprint,
                dataset_identity=self._identity,
                splits=self._crew.splits,
                workers=self._crew.size,
            )
        )
        for record in self._state.trials.values():
            if record.status == "running":
                reason = "the run was interrupted"
                self._write(Tried(trial=_with(record, status="lost", reason=reason, ended_s=self._base_s)))

    def _step(self) -> None:
        now = self._now()
        if self._run.stop_asked():
            self.ask_to_stop()
        self._proposals.fill(self._scheduler)
        self._start_trials()
        if self._scheduler.must_cut(now):
            self._cut(now)
        for message in self._crew.listen(_LISTEN_S):
            match message:
                case Progressed(worker, images):
                    self._progressed(worker, images)
                case EpochReported(worker, report):
                    self._epoch_reported(worker, report)
                case Ended():
                    self._ended(message)
                case Lost(worker, status, reason):
                    self._lost(worker, status, reason)
                case Ready(worker):
                    self._idle.add(worker)
                    self._replaced.pop(worker, None)
        if not self._working and not self._idle and not self._crew_recovers():
            raise RunError("no worker is left; see the notes in the journal for why each was lost")
        self._find_stalled()
        if now - self._last_beat >= _BEAT_S:
            self._last_beat = now
            self._write(Beat(clock_s=now))
            if self._observer is not None:
                self._observer(self._state, self._scheduler)

    def _crew_recovers(self) -> bool:
        return any(times <= _MAX_REPLACEMENTS for times in self._replaced.values())

    def _start_trials(self) -> None:
        for worker in sorted(self._idle):
            if not self._scheduler.ready and not self._scheduler.retries:
                self._proposals.hurry(self._scheduler)
            assignment = self._scheduler.start(self._now())
            if assignment is None:
                return
            self._start(worker, assignment)

    def _start(self, worker: int, assignment: Assignment) -> None:
        one = self._proposals.family.individuals[assignment.individual]
        given = one.network
        settled = self._hyperparameters.settle(assignment, given)
        one = one.model_copy(update={"network": settled.network})
        weights, parent = self._starting_point(one)
        now = self._now()
        order = self._order(assignment, one, settled.hyperparameters, parent, self._scheduler.remaining_s(now))
        record = self._record(worker, assignment, one, settled, weights is not None, now)
        # The trial first: killed in between, no network is left whose hyperparameters no trial tells.
        self._write(Tried(trial=record))
        if one.network != given:
            self._proposals.update(one)
        if settled.note:
            self._note(settled.note)
        self._idle.discard(worker)
        self._working[worker], self._orders[worker] = record, order
        self._seen[worker] = (0, now)
        self._crew.start(worker, order, weights)

    def _starting_point(self, one: Individual) -> tuple[dict[str, Array] | None, Individual | None]:
        """Return the weights that a trial starts from and whose they are; None, None for from scratch."""
        search = self._config.search
        if one.parent is None:
            if search.initial_weights is None:
                return None, None
            return read_weights(search.initial_weights), one
        if search.weights == "from-scratch":
            return None, None
        weights = self._store.load(one.parent)
        return (None, None) if weights is None else (weights, self._proposals.family.individuals[one.parent])

    def _order(
        self,
        assignment: Assignment,
        one: Individual,
        hyper: Hyperparameters,
        parent: Individual | None,
        limit_s: float | None,
    ) -> TrialOrder:
        return TrialOrder(
            trial=assignment.trial,
            individual=one.id,
            attempt=assignment.attempt,
            round=assignment.round,
            network=one.network,
            parent_network=parent.network if parent is not None else None,
            morphs=one.morphs,
            hyperparameters=hyper,
            training=self._config.training,
            epochs=assignment.epochs,
            early_stop=self._config.schedule.early_stop,
            seed=(self._config.seed * 1_000_003 + assignment.trial * 101 + assignment.attempt) % 2**31,
            limit_s=limit_s,
        )

    def _record(
        self,
        worker: int,
        assignment: Assignment,
        one: Individual,
        settled: Settled,
        carried: bool,
        now: float,
    ) -> TrialRecord:
        counted = count(one.network, self._config.counting)
        return TrialRecord(
            trial=assignment.trial,
            individual=one.id,
            round=assignment.round,
            attempt=assignment.attempt,
            worker=worker,
            parent=one.parent,
            morphs=one.morphs,
            hyperparameters=settled.hyperparameters,
            tuned=settled.tuned,
            weights="carried" if carried else "from-scratch",
            epochs_planned=assignment.epochs,
            cost=OperationCost(
                forward=counted.forward,
                backward=counted.backward,
                evaluation=counted.evaluation,
                update=counted.update,
            ),
            parameters=counted.parameters,
            started_s=now,
        )

    def _progressed(self, worker: int, images: int) -> None:
        if worker in self._working and images > self._seen[worker][0]:
            self._seen[worker] = (images, self._now())

    def _epoch_reported(self, worker: int, report: EpochReport) -> None:
        record = self._working.get(worker)
        if record is None:
            return
        values = report.model_dump()
        values |= {
            "trial": record.trial,
            "attempt": record.attempt,
            "begun_s": record.started_s + report.begun_s,
            "ended_s": record.started_s + report.ended_s,
        }
        self._write(EpochDone(epoch=EpochRecord.model_validate(values)))
        self._seen[worker] = (self._seen[worker][0], self._now())

    def _ended(self, message: Ended) -> None:
        record, order = self._working[message.worker], self._orders[message.worker]
        result = message.result
        status: TrialStatus = result.status
        reason = result.reason
        if result.executed is not None and result.executed != digest(order.network):
            status, reason = "crashed", "the worker executed another network than it was given"
        counted = count(order.network, self._config.counting).matrix
        if result.flops_per_image is not None and result.flops_per_image != counted:
            seen = f"{result.flops_per_image:.0f} FLOPs of matrix work an image were seen in the driver"
            status, reason = "crashed", f"{seen}, {counted} are counted"
        done = _with(
            record,
            status=status,
            reason=reason,
            ended_s=record.started_s + result.seconds,
            weights=result.weights,
            held_out_accuracy=result.held_out_accuracy if status in ("finished", "cut") else None,
            held_out_s=result.held_out_s,
            precision=result.precision,
            device=result.device,
            host=result.host,
            ranks=result.ranks,
            trained_images=result.trained_images,
            flops_per_image=result.flops_per_image,
            computing_s=result.computing_s,
            peak_memory_mib=result.peak_memory_mib,
        )
        if message.weights is not None and status in ("finished", "cut"):
            self._store.save(record.individual, message.weights)
        self._close_trial(message.worker, done)
        self._idle.add(message.worker)

    def _lost(self, worker: int, status: TrialStatus, reason: str) -> None:
        self._note(f"worker {worker} was lost: {reason}")
        if worker in self._working:
            record = _with(self._working[worker], status=status, reason=reason, ended_s=self._now())
            self._close_trial(worker, record)
        self._replace(worker)

    def _replace(self, worker: int) -> None:
        self._idle.discard(worker)
        self._replaced[worker] = self._replaced.get(worker, 0) + 1
        if self._replaced[worker] > _MAX_REPLACEMENTS:
            self._note(f"worker {worker} is given up after {_MAX_REPLACEMENTS} replacements in a row")
            return
        self._crew.replace(worker)

    def _close_trial(self, worker: int, done: TrialRecord) -> None:
        curve = [
            epoch.validation_accuracy
            for epoch in self._state.epochs
            if (epoch.trial, epoch.attempt) == (done.trial, done.attempt) and epoch.validation_accuracy is not None
        ]
        worth: float | None = None
        if done.status in ("finished", "cut") and curve:
            worth = predicted_accuracy(curve, max(self._config.schedule.round_epochs))
            done = _with(done, predicted_accuracy=worth)
        self._write(Tried(trial=done))
        self._hyperparameters.tell(done.trial, worth, diverged=done.status == "diverged")
        retried = self._scheduler.ended(done.trial, done.status, self._now())
        if worth is not None:
            self._proposals.observe(done.individual, worth)
        elif not retried:
            self._proposals.lose(done.individual)
        if done.reason:
            again = "; it will be tried again" if retried else ""
            self._note(f"trial {done.trial} {done.status}: {done.reason}{again}")
        self._working.pop(worker, None)
        self._orders.pop(worker, None)
        self._cut_asked.pop(worker, None)
        best = self._state.best_individual
        self._store.keep_only(self._proposals.needed() | (set() if best is None else {best}))

    def _cut(self, now: float) -> None:
        for worker in list(self._working):
            if worker not in self._cut_asked:
                self._cut_asked[worker] = now
                self._crew.cancel(worker)
            elif now - self._cut_asked[worker] > _GRACE_S:
                reason = "did not end when it was told to"
                self._close_trial(worker, _with(self._working[worker], status="cut", reason=reason, ended_s=now))
                self._replace(worker)

    def _find_stalled(self) -> None:
        now, limit = self._now(), self._config.training.stall
        for worker, record in list(self._working.items()):
            if now - self._seen[worker][1] > limit:
                reason = f"no image was processed for {limit:.0f} s"
                self._close_trial(worker, _with(record, status="stalled", reason=reason, ended_s=now))
                self._replace(worker)

    def _note(self, text: str) -> None:
        self._write(Note(clock_s=self._now(), text=text))

    def _put_down(self) -> SessionEnded:
        now = self._now()
        reason = self._scheduler.stop_reason(now) or "asked"
        return SessionEnded(clock_s=now, reason=reason, over=reason != "asked")


def _with(record: TrialRecord, **changes: object) -> TrialRecord:
    return TrialRecord.model_validate(record.model_dump() | changes)
