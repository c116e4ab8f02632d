"""Check, start and resume a search, and run it: prepare networks, start trials on workers, record their progress."""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any, Final

from accelmark.automl import journal, records
from accelmark.automl.cluster import WorkerPool, check_capacity, cluster_address, ray_workers, write_node_logs
from accelmark.automl.config import AutomlConfig, LocalCluster, SearchName
from accelmark.automl.dataset import Dataset, open_dataset
from accelmark.automl.journal import NETWORK_FILE, SearchDirectory, SearchState, first_broken_line, read_journal
from accelmark.automl.model.counting import count
from accelmark.automl.model.graph import Network
from accelmark.automl.model.morphs import MorphError
from accelmark.automl.model.seeds import SEEDS, resolve_network, seed_weights
from accelmark.automl.model.weights import weight_shapes
from accelmark.automl.records import Hyperparameters, WorkerReady
from accelmark.automl.scoring import summarise
from accelmark.automl.search.schedule import Assignment, Scheduler
from accelmark.automl.search.searchers import SEARCHERS, Population, Searcher, predicted_accuracy
from accelmark.automl.search.tuning import Tuner, within_limits
from accelmark.results.rounds.search import CONFIG_FILE, why_ended
from accelmark.results.store.files import write_atomic
from accelmark.spec.errors import DataError, RequestError, RunError
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import load_vendor
from accelmark.spec.plugins.requirements import require
from accelmark.spec.rules import resolve_rules
from accelmark.telemetry.inventory import default_vendor
from accelmark.telemetry.monitor import recording

_HEARTBEAT_S: Final = 1.0
_REPORT_SPACING: Final = 20
"""Least time between two reports, as a multiple of a report's duration."""
_LISTEN_S: Final = 0.2
_CUT_GRACE_S: Final = 120.0
_MAX_REPLACEMENTS: Final = 3
_PLANNED: Final = 0.9
"""Share of the remaining time that a last training is planned for, so that it is not cut before its rate has fallen."""
_BATCHES: Final = 8
LARGEST_BATCH: Final = 32

Observer = Callable[[SearchState, Scheduler], None]
"""Called about once a second; less often where a call takes long."""


@dataclass
class _Running:
    record: records.TrialRecord
    last_progress_s: float
    operations: int
    cut_s: float | None = None


class SearchController:
    """One session of a search."""

    def __init__(
        self, directory: SearchDirectory, config: AutomlConfig, workers: WorkerPool, *, observer: Observer | None = None
    ) -> None:
        self._directory: Final = directory
        self._config: Final = config
        self._workers: Final = workers
        self._observer: Final = observer
        self._state: Final = (state := directory.state(keeps_epochs=False))
        self._journal: Final = journal.Journal(directory.path)
        self._base_s: Final = state.clock_s
        self._idle: set[int] = set(range(workers.size))
        self._running: dict[int, _Running] = {}
        self._replaced: dict[int, int] = {}
        self._last_heartbeat_s = -_HEARTBEAT_S
        self._next_report_s = 0.0
        self._began = time.monotonic()
        self._tuner: Tuner | None = None
        if config.schedule.tuning_round is not None:
            fingerprint = next(iter(workers.ready.values())).fingerprint
            experiment = f"data {fingerprint[:16]}, network {directory.network().digest[:16]}"
            seed, path = config.seed + len(state.sessions), directory.path
            self._tuner = Tuner(config, run=directory.name, experiment=experiment, directory=path, seed=seed)
        self._scheduler: Final = Scheduler.resumed(config.schedule, state.trials.values(), state.individuals)
        method = config.search.method
        self._fallback: Final[SearchName] = "none" if method == "none" else "random"
        self._searchers: Final = {
            name: SEARCHERS[name](config.search.morphs, config.search, len(config.schedule.round_epochs))
            for name in {method, self._fallback}
        }
        self._pool: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._prepared: Future[tuple[list[records.Individual], float]] | None = None
        """The next networks, which a thread prepares; it does not change the state."""
        self._possible_parents: set[int] = set()
        """Of the networks in preparation."""
        ended = (one for one in state.trials.values() if one.status not in (*records.FAILURES, "running"))
        self._committed = sum(record.cost.operations(state.totals_of(record)) for record in ended)
        """Operations of trials that gave a result, and those that running ones are going to use."""

    def request_stop(self) -> None:
        """End the session as soon as running trials have been cut."""
        self._scheduler.asked_to_stop = True

    def run(self) -> journal.SessionEnded:
        """Run the search until it ends or is asked to stop; return how the session ended."""
        try:
            self._begin()
            while not self._scheduler.over(self._now()):
                self._step()
            now = self._now()
            reason = self._scheduler.stop_reason(now) or "asked"
            ended = journal.SessionEnded(clock_s=now, reason=reason, over=reason != "asked")
            self._write(ended)
            self._keep_weights()
            self._report()
            return ended
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._journal.close()
            if self._tuner is not None:
                self._tuner.close()

    def _now(self) -> float:
        return self._base_s + time.monotonic() - self._began

    def _write(self, event: journal.Event, *, sync: bool = True) -> None:
        self._journal.write(event, sync=sync)
        self._state.apply(event)

    def _note(self, text: str) -> None:
        self._write(journal.Remark(clock_s=self._now(), text=text))

    def _begin(self) -> None:
        if self._tuner is not None:
            self._tuner.abandon_running()
        if not self._state.individuals:
            for number in range(max(1, self._config.tuning.seed_trials)):
                seed = records.Individual(id=number, network=self._directory.network())
                self._write(journal.Proposed(individual=seed, searcher="seed"))
                self._scheduler.ready.append(number)
        self._fill(wait=True)
        reports = list(self._workers.ready.values())
        self._began = time.monotonic()
        began = journal.SessionBegan(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            clock_s=self._base_s,
            monotonic_s=self._began,
            host=platform.node(),
            pid=os.getpid(),
            experiment=self._directory.name,
            dataset_fingerprint=reports[0].fingerprint,
            dataset_identity=" or ".join(sorted({report.identity for report in reports})),
            splits=reports[0].splits,
            workers=self._workers.size,
        )
        self._write(began)
        for record in list(self._state.trials.values()):
            if record.status == "running":
                lost = record.updated(status="lost", reason="the run was interrupted", ended_s=self._base_s)
                self._write(journal.TrialEvent(trial=lost))

    def _step(self) -> None:
        now = self._now()
        if self._directory.stop_mark.exists():
            self.request_stop()
        self._fill()
        self._start_trials()
        if self._scheduler.must_cut(now):
            for worker, running in list(self._running.items()):
                if running.cut_s is None:
                    running.cut_s = now
                    self._workers.cancel(worker)
                elif now - running.cut_s > _CUT_GRACE_S:
                    self._fail(worker, "cut", f"did not end within {_CUT_GRACE_S:.0f} s of its cut")
        for worker, message in self._workers.listen(_LISTEN_S):
            training = self._running.get(worker)
            match message:
                case int(images):
                    if images and training:
                        training.last_progress_s = self._now()
                case records.EpochReport():
                    if training:
                        self._write(journal.EpochEvent(epoch=training.record.epoch(message)), sync=False)
                        training.last_progress_s = self._now()
                case records.TrialEnded():
                    self._end_trial(worker, message)
                case records.WorkerLost(status, reason):
                    self._note(f"worker {worker} was lost: {reason}")
                    self._fail(worker, status, reason)
                case records.WorkerReady():
                    self._idle.add(worker)
                    self._replaced.pop(worker, None)
        self._journal.sync()
        replacing = any(times <= _MAX_REPLACEMENTS for times in self._replaced.values())
        if not self._running and not self._idle and not replacing:
            raise RunError("no worker is left; the journal states why each was lost")
        stall_s = self._config.training.stall
        for worker, running in list(self._running.items()):
            if self._now() - running.last_progress_s > stall_s:
                self._fail(worker, "stalled", f"no image was processed for {stall_s:.0f} s")
        if now - self._last_heartbeat_s >= _HEARTBEAT_S:
            self._last_heartbeat_s = now
            self._write(journal.Heartbeat(clock_s=now))
            self._keep_weights()
        if now >= self._next_report_s:
            self._report()

    def _report(self) -> None:
        """Write the status, which readers of a running search show, and call the observer: a twentieth of the time."""
        began = self._now()
        summary = summarise(self._directory, state=self._state, series=False)
        write_atomic(self._directory.path / journal.STATUS_FILE, summary.to_json())
        if self._observer is not None:
            self._observer(self._state, self._scheduler)
        ended = self._now()
        self._next_report_s = ended + max(_HEARTBEAT_S, _REPORT_SPACING * (ended - began))

    def _keep_weights(self) -> None:
        """Remove weights but those of possible parents, parents of pending networks and the best network."""
        population = self._population()
        needed = {one.parent for one in population.pending} | {one.id for one in population.parents}
        kept = needed | self._possible_parents | {self._state.best_individual}
        for path in self._directory.path.glob("weights/*.npz"):
            if not path.stem.isdecimal() or int(path.stem) not in kept:
                path.unlink(missing_ok=True)

    def _population(self) -> Population:
        return Population(self._config.seed, list(self._state.individuals))

    def _fill(self, *, wait: bool = False) -> None:
        """Add the networks that are ready and prepare as many as the scheduler requests; ``wait`` for them."""
        method = self._config.search.method
        while True:
            if self._prepared is not None and (wait or self._prepared.done()):
                try:
                    self._add(*self._prepared.result(), method)
                except MorphError:
                    self._scheduler.exhausted = True
                self._prepared, self._possible_parents = None, set()
            wanted = self._scheduler.wanted()
            if self._prepared is not None or wanted == 0:
                return
            population = self._population()
            self._possible_parents = {one.id for one in population.parents}
            self._prepared = self._pool.submit(_timed, self._searchers[method], population, batch_size(wanted))
            if not wait:
                return

    def _add(self, proposed: list[records.Individual], seconds: float, searcher: str) -> None:
        for one in proposed:
            added = one.model_copy(update={"id": len(self._state.individuals)})
            self._write(journal.Proposed(individual=added, searcher=searcher, seconds=seconds / len(proposed)))
            self._scheduler.ready.append(added.id)

    def _start_trials(self) -> None:
        scheduler = self._scheduler
        for worker in sorted(self._idle):
            if not scheduler.retries:
                if not scheduler.ready and scheduler.wanted():  # rather a random morph at once than an idle worker
                    with suppress(MorphError):
                        proposed = _timed(self._searchers[self._fallback], self._population(), 1)
                        self._add(*proposed, f"{self._fallback} (immediate)")
                if not self._may_start():
                    self._propose_final()
            assignment = scheduler.start(self._now())
            if assignment is None:
                return
            self._start(worker, assignment)

    def _may_start(self) -> bool:
        """Return whether the search may go on with the next network: operations, or time, are left for its trial."""
        schedule, scheduler = self._config.schedule, self._scheduler
        if not scheduler.ready:
            return not (scheduler.exhausted or scheduler.is_last)
        one = self._state.individuals[scheduler.ready[0]]
        if one.epochs is not None:
            return True
        searched = 1.0 - (schedule.final_share or 0.0)
        if schedule.max_operations is None:
            return schedule.max_duration is None or self._now() < searched * schedule.max_duration
        _, epochs, _ = records.plan_of(self._config, scheduler.started_trials, one)
        hyper = self._known_hyperparameters(one) or records.Hyperparameters.of(self._config.training)
        cost = records.OperationCost.of(count(one.network, self._config.counting))
        return self._committed + self._operations(cost, hyper, epochs) <= searched * schedule.max_operations

    def _propose_final(self) -> None:
        """Propose the best network that no worker trains a last time yet, for an equal part of what is left."""
        scheduler, schedule, individuals = self._scheduler, self._config.schedule, self._state.individuals
        scheduler.is_last = True
        scheduler.ready.clear()
        taken = {one.parent for one in individuals if one.epochs}
        searched = [one for one in individuals if one.status == "observed" and not one.epochs and one.id not in taken]
        workers = schedule.concurrency - len(taken) if schedule.final_share else 0
        epochs = 0
        if workers > 0 and searched:
            best = max(searched, key=lambda one: one.rank)
            record = self._record_of(best.id)
            if schedule.max_operations is not None:
                left = (schedule.max_operations - self._committed) // workers
                epochs = max(0, left) // self._operations(record.cost, record.hyperparameters, 1)
            else:
                totals, left_s = self._state.totals_of(record), scheduler.remaining_s(self._now()) or 0.0
                epochs = int(_PLANNED * left_s * totals.epochs / max(totals.length_s, 1e-9))
        if epochs:
            number = len(individuals)
            new = records.Individual(id=number, network=best.network, parent=best.id, round=best.round, epochs=epochs)
            self._write(journal.Proposed(individual=new, searcher="final"))
            scheduler.ready.append(number)
        else:
            scheduler.spent = workers <= 0 or not self._running  # a trial that ends may be of the best network

    def _operations(self, cost: records.OperationCost, hyper: records.Hyperparameters, epochs: int) -> int:
        """Return the operations of so many epochs of a network."""
        splits = self._state.sessions[-1].splits
        steps, images = splits.training // hyper.batch_size, splits.validation
        epoch = records.Totals(trained_images=steps * hyper.batch_size, evaluated_images=images, steps=steps)
        return epochs * cost.operations(epoch)

    def _record_of(self, individual: int) -> records.TrialRecord:
        """Return the latest trial of a network that was trained."""
        return next(one for one in reversed(self._state.trials.values()) if one.individual == individual)

    def _known_hyperparameters(self, one: records.Individual) -> records.Hyperparameters | None:
        """Return those with which the network was trained before, or the seed's best ones; None: others are taken."""
        if one.parent is None:
            return None
        if one.epochs or one.round > 1:
            return self._record_of(one.parent).hyperparameters
        seeds = self._state.individuals[: self._config.tuning.seed_trials]
        trained = [seed for seed in seeds if seed.status == "observed"]
        return self._record_of(max(trained, key=lambda seed: seed.rank).id).hyperparameters if trained else None

    def _start(self, worker: int, assignment: Assignment) -> None:
        one, config = self._state.individuals[assignment.individual], self._config
        number, epochs, is_tuned = records.plan_of(config, assignment.trial, one)
        hyper, network = records.Hyperparameters.of(config.training), one.network
        if self._tuner is not None and is_tuned:
            proposed = self._known_hyperparameters(one) or self._tuner.ask(assignment.trial)
            hyper, network = within_limits(config, network, proposed)
            if hyper.kernel != proposed.kernel:
                instead = "its network keeps its own" if hyper.kernel is None else f"it takes {hyper.kernel}"
                limits = f"kernel {proposed.kernel} exceeds the limits of the search"
                self._note(f"trial {assignment.trial}: {limits}; {instead}")
        weights: records.TrainedWeights = None
        parent_network: Network | None = None
        if one.parent is None:
            if config.search.initial_weights is not None:
                weights, parent_network = seed_weights(config.search.initial_weights), network
        elif one.epochs is not None or config.search.weights == "carried":  # a last training goes on with its network
            weights = self._directory.load_weights(one.parent)
            parent_network = None if weights is None else self._state.individuals[one.parent].network
        counted, now = count(network, config.counting), self._now()
        record = records.TrialRecord(
            **assignment._asdict(),
            round=number,
            epochs_planned=epochs,
            tuned=is_tuned,
            worker=worker,
            parent=one.parent,
            morphs=one.morphs,
            hyperparameters=hyper,
            weights="from-scratch" if weights is None else "carried",
            cost=records.OperationCost.of(counted),
            parameters=counted.parameters,
            started_s=now,
        )
        # The trial first: a kill between the two lines leaves no network with hyperparameters that no trial explains.
        self._write(journal.TrialEvent(trial=record))
        if network != one.network:
            updated = one.model_copy(update={"network": network})
            self._write(journal.Proposed(individual=updated, searcher="hyperparameters"))
        self._idle.discard(worker)
        planned = self._operations(record.cost, hyper, epochs)
        self._committed += planned
        self._running[worker] = _Running(record, now, planned)
        order = records.TrialOrder(
            round=number,
            network=network,
            parent_network=parent_network,
            morphs=one.morphs,
            hyperparameters=hyper,
            training=config.training,
            epochs=epochs,
            early_stop=config.schedule.early_stop and one.epochs is None,
            seed=(config.seed * 1_000_003 + record.trial * 101 + record.attempt) % 2**31,
            limit_s=self._scheduler.remaining_s(now),
        )
        self._workers.start(worker, order, weights)

    def _end_trial(self, worker: int, message: records.TrialEnded) -> None:
        record, result = self._running[worker].record, message.result
        network = self._state.individuals[record.individual].network
        outcome = result.model_dump(exclude={"executed", "seconds"})
        if result.executed not in (None, network.digest):
            outcome |= {"status": "crashed", "reason": "the worker executed another network than the ordered one"}
        counted = count(network, self._config.counting).matrix
        if result.flops_per_image not in (None, counted):
            seen = f"the driver counted {result.flops_per_image:.0f} FLOPs of matrix work per image"
            outcome |= {"status": "crashed", "reason": f"{seen}, the score {counted}"}
        if outcome["status"] not in ("finished", "cut"):
            outcome["held_out_accuracy"] = None
        elif message.weights is not None:
            self._directory.save_weights(record.individual, message.weights)
        self._close_trial(worker, record.updated(**outcome, ended_s=record.started_s + result.seconds))
        self._idle.add(worker)

    def _fail(self, worker: int, status: records.TrialStatus, reason: str) -> None:
        """End the trial of a lost or unresponsive worker, if it has one, and replace the worker."""
        if running := self._running.get(worker):
            self._close_trial(worker, running.record.updated(status=status, reason=reason, ended_s=self._now()))
        self._idle.discard(worker)
        self._replaced[worker] = self._replaced.get(worker, 0) + 1
        if self._replaced[worker] <= _MAX_REPLACEMENTS:
            self._workers.replace(worker)
        else:
            self._note(f"worker {worker} is not replaced again after {_MAX_REPLACEMENTS} replacements in a row")

    def _close_trial(self, worker: int, done: records.TrialRecord) -> None:
        epochs = self._state.epochs_of(done)
        curve = [epoch.validation_accuracy for epoch in epochs if epoch.validation_accuracy is not None]
        value: float | None = None
        if done.status in ("finished", "cut") and curve:
            value = predicted_accuracy(curve, max(self._config.schedule.round_epochs))
            done = done.updated(predicted_accuracy=value)
        self._write(journal.TrialEvent(trial=done))
        if self._tuner is not None:
            self._tuner.tell(done.trial, value, diverged=done.status == "diverged", taken=done.hyperparameters)
        used = 0 if done.status in records.FAILURES else done.cost.operations(self._state.totals_of(done))
        self._committed += used - self._running.pop(worker).operations
        retried = self._scheduler.ended(done.trial, done.status, self._now())
        if value is not None:
            self._write(journal.Valued(individual=done.individual, status="observed", value=value))
        elif not retried:
            self._write(journal.Valued(individual=done.individual, status="lost", value=None))
        if done.reason:
            again = "; it will be tried again" if retried else ""
            self._note(f"trial {done.trial} {done.status}: {done.reason}{again}")


def batch_size(wanted: int) -> int:
    """Return how many of the wanted networks to propose at once: the fewer, the more results the later ones use."""
    return min(LARGEST_BATCH, ceil(wanted / _BATCHES))


def _timed(searcher: Searcher, population: Population, number: int) -> tuple[list[records.Individual], float]:
    began = time.monotonic()
    return searcher.propose(population, number), time.monotonic() - began


_PATHS: Final = {"dataset": ("directory", "train_directory", "held_out_directory"), "search": ("initial_weights",)}

_EXTRAS: Final[dict[SearchName, str]] = {"anneal": "accelmark[anneal]", "smac": "accelmark[smac]"}


def load_config(path: Path) -> AutomlConfig:
    """Return the configuration in a search file, to which relative paths are relative; raises SpecError."""
    values = read_yaml(path)
    resolve_rules(values, path)
    config = parse(AutomlConfig, values, str(path))
    changes: dict[str, Any] = {}
    for section, names in _PATHS.items():
        given = getattr(config, section)
        paths = {name: path.parent / one.expanduser() for name in names if (one := getattr(given, name)) is not None}
        changes[section] = given.model_copy(update={name: one.resolve() for name, one in paths.items()})
    if config.network not in SEEDS and (path.parent / config.network).is_file():
        changes["network"] = str((path.parent / config.network).resolve())
    return config.model_copy(update=changes)


def check_batches(config: AutomlConfig, images: int) -> None:
    """Raise RequestError where a batch is larger than the training split of ``images`` images."""
    first = config.schedule.tuning_round
    searched = config.tuning.batch_size if first is not None else ()
    batches = [("tuning.batch_size", batch) for batch in searched]
    if first != 1 or not searched:  # else no trial uses it
        batches.append(("training.batch_size", config.training.batch_size))
    for key, batch in batches:
        if batch > images:
            raise RequestError(f"{key}: a batch of {batch} is larger than the training split of {images} images")


def check_request(config: AutomlConfig, network: Network, *, seed_trained: bool = False) -> Dataset | None:
    """Check everything that needs nothing to be started; initial weights only if the seed is not trained yet.

    Returns the data where trials run on this machine; else None: the hosts of a cluster check their own.
    """
    tuning = config.tuning
    if (extra := _EXTRAS.get(config.search.method)) is not None:
        require(f"search.method: {config.search.method}", extra)
    # A single searched kernel may be the network's own, so two others are tried.
    kernels = [{"kernel": value} for value in (3, 5, *tuning.kernel)] if tuning.kernel else []
    rates = [{"dropout": value} for value in tuning.dropout or ()]
    plain = Hyperparameters(batch_size=1, learning_rate=1.0)
    for name, values, reason, instead in (
        ("kernel", kernels, "has no spatial convolution except those that read the image", "[]"),
        ("dropout", rates, "has neither dropout nor a dense layer to put it before", "null"),
    ):
        networks = {plain.model_copy(update=value).applied_to(network).digest for value in values}
        if config.schedule.tuning_round is not None and len(networks) == 1:
            what = f"network {network.name!r} {reason}, so no value changes it"
            raise RequestError(f"tuning.{name}: {what}: write tuning.{name}: {instead}")
    if (path := config.search.initial_weights) is not None and not seed_trained:
        expected = weight_shapes(network)
        shapes = {name: array.shape for name, array in seed_weights(path).items()}
        differing = sorted(name for name in {*expected, *shapes} if expected.get(name) != shapes.get(name))
        if differing:
            raise DataError(f"{path}: is not of network {network.name!r}: weights differ: {differing[:6]}")
    if not isinstance(config.cluster, LocalCluster):
        return None
    dataset = open_dataset(config.dataset, network)
    check_batches(config, len(dataset.training))
    return dataset


def check_without_start(config: AutomlConfig) -> tuple[Dataset | None, list[str]]:
    """Check the request; return the data, and the checks that need a start."""
    dataset = check_request(config, resolve_network(config.network))
    unchecked: list[str] = []
    if dataset is None:
        unchecked.append("the cluster: whether it can be reached, has the data, and can run all concurrent trials")
    elif not load_vendor(default_vendor()).uses_host_cpu:
        unchecked.append("whether this machine has enough accelerators for all concurrent trials")
    else:
        check_capacity(config, cores=os.cpu_count() or 1, accelerators=0)
    if config.tuning.storage is not None and config.schedule.tuning_round is not None:
        unchecked.append("the study: whether its storage can be opened (which would write to it) and is of this search")
    return dataset, unchecked


def start_search(
    config: AutomlConfig, root: Path, announce: Callable[[SearchDirectory], None], observer: Observer | None = None
) -> SearchDirectory:
    """Check the request, start the workers, make the directory below ``root``, announce it, and run the search.

    Raises KeyboardInterrupt at SIGINT or SIGTERM before the search runs, or at the second one.
    """
    network = resolve_network(config.network)
    with _on_signals(_interrupt), _workers(config, network, check_request(config, network)) as workers:
        directory = SearchDirectory.create(root, config, network)
        announce(directory)
        with directory.held():
            _run(directory, config, workers, observer)
    return directory


def resume_search(directory: SearchDirectory, observer: Observer | None = None) -> None:
    """Continue a search that was stopped or killed; raises RequestError where it is complete or its data changed."""
    config, network = directory.config(), directory.network()
    with _on_signals(_interrupt), directory.held():
        if first_broken_line(directory.path, islice(read_journal(directory.path), 1)):
            changed = f"{CONFIG_FILE} or {NETWORK_FILE} changed since the search began"
            raise RequestError(f"{directory.path}: {changed}: restore it, or start another search")
        state = directory.state(keeps_epochs=False)
        if state.ended is not None and state.ended.over:
            why = why_ended(state.ended.reason)
            again = "start another one with 'accelmark automl run'"
            raise RequestError(f"{directory.path}: this search has ended ({why}) and cannot be resumed; {again}")
        seed_trained = any(one.id == 0 and one.status != "pending" for one in state.individuals)
        dataset = check_request(config, network, seed_trained=seed_trained)
        with _workers(config, network, dataset) as workers:
            fingerprints = {report.fingerprint for report in workers.ready.values()}
            if {session.dataset_fingerprint for session in state.sessions} - fingerprints:
                raise RequestError(f"{directory.path}: the data are not those that this search began with")
            directory.stop_mark.unlink(missing_ok=True)
            _run(directory, config, workers, observer)


def check_equal_data(ready: Iterable[WorkerReady], dataset: Dataset | None) -> None:
    """Raise RequestError with the hosts and hashes where not all workers opened the same data."""
    found = {report.host: report.fingerprint for report in ready}
    found |= {} if dataset is None else {"this machine": dataset.fingerprint}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{host} {fingerprint[:12]}" for host, fingerprint in sorted(found.items()))
        hashes = f"the data differ between hosts (SHA-256 of labels): {listed}"
        raise RequestError(f"dataset: {hashes}: copy one to the others")


@contextmanager
def _workers(config: AutomlConfig, network: Network, dataset: Dataset | None) -> Iterator[WorkerPool]:
    # Ray prints about lost workers to standard output, which may be read as JSON.
    with (
        redirect_stdout(sys.stderr),
        cluster_address(config.cluster) as address,
        ray_workers(config, network, address=address) as workers,
    ):
        check_equal_data(workers.ready.values(), dataset)
        check_batches(config, workers.ready[0].splits.training)
        yield workers


def _run(directory: SearchDirectory, config: AutomlConfig, workers: WorkerPool, observer: Observer | None) -> None:
    session = len(directory.state().sessions) + 1
    controller = SearchController(directory, config, workers, observer=observer)
    # Hosts of a cluster have their own monitoring.
    monitoring = recording(directory.telemetry(session)) if isinstance(config.cluster, LocalCluster) else nullcontext()

    def stop(number: int, _frame: object) -> None:
        controller.request_stop()
        signal.signal(number, _interrupt)

    with monitoring, _on_signals(stop):
        try:
            controller.run()
        finally:
            write_node_logs(directory.path / "ray" / f"session{session}")


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _on_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    with ExitStack() as former:
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                former.callback(signal.signal, number, signal.signal(number, handle))
        yield
