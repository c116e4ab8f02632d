"""The schedule, the study of hyperparameters, distances between networks, the Gaussian process, and the searchers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import reduce
from math import log10
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.automl.config import AutomlConfig, ScheduleConfig, SearchName, TuningConfig
from accelmark.automl.model.counting import count
from accelmark.automl.model.graph import Convolution, Network
from accelmark.automl.model.morphs import MorphChoices, MorphError, MorphLimits, apply_morph
from accelmark.automl.model.seeds import small
from accelmark.automl.records import Individual, IndividualStatus, TrialStatus
from accelmark.automl.search import searchers
from accelmark.automl.search.schedule import Scheduler, stops_early
from accelmark.automl.search.searchers import SEARCHERS, GaussianProcess, Population, Reference, predicted_accuracy
from accelmark.automl.search.tuning import Tuner
from accelmark.spec.errors import RequestError

ENDS: list[TrialStatus] = ["finished", "finished", "crashed", "lost", "stalled", "out-of-memory"]


def simulated(schedule: ScheduleConfig, seed: int) -> tuple[Scheduler, list[int], int, float]:
    """Run a schedule to its end with trials of random length and fate; return also the starts and the peak."""
    generator = np.random.default_rng(seed)
    scheduler, now, peak = Scheduler(schedule), 0.0, 0
    starts: list[int] = []
    offered = 0
    ends: dict[int, float] = {}
    while not scheduler.over(now):
        for _ in range(scheduler.wanted()):
            scheduler.ready.append(offered)
            offered += 1
        while (assignment := scheduler.start(now)) is not None:
            starts.append(assignment.trial)
            ends[assignment.trial] = now + float(generator.uniform(1, 5))
        peak = max(peak, len(scheduler.running))
        if scheduler.must_cut(now):
            for trial in list(scheduler.running):
                assert not scheduler.ended(trial, "cut", now)
            continue
        trial = min(scheduler.running, key=lambda one: ends[one])
        bound = schedule.max_duration if schedule.max_duration is not None else float("inf")
        if ends[trial] >= bound:
            now = bound
            continue
        now = ends[trial]
        scheduler.ended(trial, ENDS[int(generator.integers(len(ENDS)))], now)
    return scheduler, starts, peak, now


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 3), st.integers(0, 10_000))
def test_as_many_trials_start_as_were_asked_and_never_more_at_a_time(
    concurrency: int, trials: int, attempts: int, seed: int
) -> None:
    schedule = ScheduleConfig(concurrency=concurrency, max_trials=trials, max_attempts=attempts)
    _, starts, peak, _ = simulated(schedule, seed)
    assert set(starts) == set(range(trials))
    assert peak == min(concurrency, trials)
    assert max(starts.count(trial) for trial in set(starts)) <= attempts


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.floats(0.5, 60), st.integers(0, 10_000))
def test_no_trial_starts_after_the_time_is_up_and_all_end_then(concurrency: int, max_s: float, seed: int) -> None:
    scheduler, _, _, now = simulated(ScheduleConfig(concurrency=concurrency, max_duration=max_s), seed)
    assert now == max_s
    assert not scheduler.running
    assert scheduler.stop_reason(now) == "time"


@pytest.mark.parametrize(("status", "attempts"), [("crashed", 3), ("diverged", 1)])
def test_a_crashed_trial_is_tried_again_and_one_that_diverged_is_not(status: TrialStatus, attempts: int) -> None:
    scheduler = Scheduler(ScheduleConfig(concurrency=1, max_trials=1, max_attempts=3))
    scheduler.ready.append(0)
    for attempt in range(1, attempts + 1):
        assert scheduler.start(0.0) == (0, 0, attempt)
        assert scheduler.ended(0, status, 1.0) is (attempt < attempts)
    assert scheduler.over(2.0)
    assert scheduler.started_trials == 1


def test_early_stop_waits_its_patience_and_restarts_after_progress() -> None:
    for number, patience in ((1, 8), (4, 14), (7, 20), (30, 20)):
        losses = [1.0, 0.9995, 0.5, *[0.4999] * patience]
        ends = [stops_early(number, losses[:count]) for count in range(1, len(losses) + 1)]
        assert ends == [False] * (len(losses) - 1) + [True]


def test_a_logarithmic_curve_is_extrapolated_and_a_prediction_is_never_below_what_was_seen() -> None:
    true = [0.1 * np.log2(epoch + 2) + 0.2 for epoch in range(1, 61)]
    assert predicted_accuracy(true[:10], 60) == pytest.approx(true[59], abs=0.01)
    assert predicted_accuracy([0.5, 0.6, 0.4], 60) >= 0.6
    assert predicted_accuracy([0.9, 0.95, 0.99, 0.995], 10_000) <= 1
    assert predicted_accuracy([0.3, 0.4], 60) == 0.4


SEED = small((1, 12, 12), 4, filters=(4, 6))


def started(seed_network: Network, seed: int) -> Population:
    return Population(seed, [Individual(id=0, network=seed_network)])


def set_value(population: Population, number: int, status: IndividualStatus, value: float | None) -> None:
    changes = {"status": status, "value": value}
    population.individuals[number] = population.individuals[number].model_copy(update=changes)


def relative(steps: int, seed: int) -> Network:
    network, generator = SEED, np.random.default_rng(seed)
    for _ in range(steps):
        _, network = MorphChoices(network).draw(generator)
    return network


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 10_000))
def test_distances_are_zero_on_the_diagonal_symmetric_and_independent_of_batching(
    left: int, right: int, seed: int
) -> None:
    one, other = searchers.sketch(relative(left, seed)), searchers.sketch(relative(right, seed + 1))
    assert Reference([one]).distances(one)[0] == pytest.approx(0)
    together = Reference([searchers.sketch(SEED), other]).distances(one)
    assert together[1] == pytest.approx(Reference([one]).distances(other)[0])
    assert together[1] == pytest.approx(Reference([other]).distances(one)[0])
    assert (together >= 0).all()


def test_the_process_interpolates_observations_and_is_uncertain_elsewhere() -> None:
    places = np.array([0.0, 1.0, 2.0, 4.0, 6.0])
    values = np.sin(places)
    model = GaussianProcess.fitted(np.abs(places[:, None] - places[None, :]), values)
    at_seen, far = model.predict(np.abs(places - 2.0)), model.predict(np.abs(places - 40.0))
    assert at_seen[0] == pytest.approx(np.sin(2.0), abs=0.1)
    assert far[0] == pytest.approx(values.mean(), abs=1e-6)
    assert far[1] > 3 * at_seen[1]


def filters_reached(network: Network) -> float:
    """A stand-in for training: wider convolutions are better, with a ceiling."""
    widest = max(node.layer.filters for node in network.nodes if isinstance(node.layer, Convolution))
    return min(0.9, 0.1 * float(np.log2(widest)))


def searched(name: SearchName, seed: int, steps: int = 14) -> Population:
    searcher, population = SEARCHERS[name](), started(SEED, seed)
    set_value(population, 0, "observed", filters_reached(SEED))
    for _ in range(steps):
        (one,) = searcher.propose(population)
        set_value(population, one.id, "observed", filters_reached(one.network))
    return population


@pytest.mark.parametrize("name", get_args(SearchName))
def test_a_search_follows_from_its_seed_or_json_and_its_networks_from_their_morphs(name: SearchName) -> None:
    population = searched(name, 7, steps=6)
    assert searched(name, 7, steps=6) == population
    for one in population.individuals[1:]:
        assert one.network == reduce(apply_morph, one.morphs, population.individuals[one.parent or 0].network)
    again = Population(7, [Individual.model_validate_json(one.model_dump_json()) for one in population.individuals])
    assert again == population
    assert SEARCHERS[name]().propose(again) == SEARCHERS[name]().propose(population)


@pytest.mark.heavy
def test_bayesian_search_reaches_better_networks_than_random_morphs() -> None:
    def mean_best(name: SearchName) -> float:
        return float(np.mean([max(one.rank for one in searched(name, seed).observed)[0] for seed in range(3)]))

    assert mean_best("bayesian") > mean_best("random")


def test_parallel_proposals_differ() -> None:
    population = searched("bayesian", 2, steps=4)
    searcher = SEARCHERS["bayesian"]()
    proposed = [one.network for number in (1, 1, 4) for one in searcher.propose(population, number)]
    assert len({network.digest for network in proposed}) == 6


def test_limits_hold_for_every_network_proposed() -> None:
    bound = 2 * count(SEED, "accelmark").parameters
    searcher = SEARCHERS["random"](limits=MorphLimits(max_parameters=bound, max_kernel=5))
    population = started(SEED, 5)
    set_value(population, 0, "observed", 0.1)
    try:
        for _ in range(12):
            (one,) = searcher.propose(population)
            set_value(population, one.id, "observed", 0.1)
    except MorphError:
        pass
    assert len(population.individuals) > 2
    assert all(count(one.network, "accelmark").parameters <= bound for one in population.individuals)


def test_a_tree_search_without_allowed_morphs_does_not_end_the_search() -> None:
    seed = small((1, 8, 8), 2, filters=(4,), name="seed")
    morph, grown = MorphChoices(seed).draw(np.random.default_rng(0), ["widen"])
    limits = MorphLimits(max_forward_operations=count(grown, "accelmark").matrix_forward)
    for number in range(12):
        population = started(seed, number)
        set_value(population, 0, "observed", 0.2)
        for value in (0.8, 0.9):
            set_value(population, population.add(grown, 0, (morph,)).id, "observed", value)
        (proposed,) = SEARCHERS["bayesian"](kinds=("widen",), limits=limits).propose(population)
        assert proposed.parent == 0


def test_halving_promotes_the_best_third_of_a_round_and_starts_with_doubled_filters() -> None:
    searcher, population = SEARCHERS["halving"](rounds=3), started(SEED, 0)
    set_value(population, 0, "observed", 0.9)
    for _ in range(14):
        (one,) = searcher.propose(population)
        set_value(population, one.id, "observed", 0.9 - 0.01 * one.id)
    rounds = [one.round for one in population.individuals]
    assert rounds.count(2) == rounds.count(1) // 3
    assert rounds.count(3) == rounds.count(2) // 3
    for one in population.individuals:
        if one.round > 1:
            parent = population.individuals[one.parent or 0]
            assert (one.network, one.morphs, one.round) == (parent.network, (), parent.round + 1)
    points = [one.point for one in population.individuals if one.point and one.round == 1]
    assert [tuple(point.values()) for point in points[:3]] == [(1, 1, 0, 1), (1, 1, 0, 0), (2, 2, 0, 1)]
    limits = MorphLimits(max_parameters=20 * count(SEED, "accelmark").parameters)
    (largest,) = SEARCHERS["halving"](limits=limits).propose(started(SEED, 0))
    assert tuple((largest.point or {}).values()) == (2, 2, 0, 0)


def test_every_point_of_the_space_is_tried_once_within_the_limits() -> None:
    limits = MorphLimits(max_parameters=2 * count(SEED, "accelmark").parameters)
    searcher, population = SEARCHERS["batch"](limits=limits), started(SEED, 0)
    searcher.propose(population, 10_000)
    with pytest.raises(MorphError, match="space"):
        searcher.propose(population)
    points = [tuple((one.point or {}).values()) for one in population.individuals[1:]]
    assert len(points) == len(set(points)) > 2
    assert all(limits.allow(one.network) for one in population.individuals)


@pytest.mark.parametrize("method", ["tpe", "anneal", "smac"])
def test_a_librarys_sampler_proposes_new_points_that_follow_from_the_values_alone(method: SearchName) -> None:
    def proposed(sign: float) -> list[dict[str, int]]:
        population = started(SEED, 0)
        set_value(population, 0, "observed", 0.5)
        for _ in range(14):
            (one,) = SEARCHERS[method]().propose(population)
            assert one.point is not None
            set_value(population, one.id, "observed", 0.5 + sign * 0.05 * sum(one.point.values()))
        return [one.point for one in population.individuals if one.point is not None]

    points = proposed(1.0)
    assert len({tuple(sorted(point.items())) for point in points}) == len(points) == 14
    assert proposed(1.0) == points
    assert proposed(-1.0) != points


SPACE = TuningConfig(kernel=(3, 5), batch_size=(16, 32), learning_rate=(1e-3, 1e-1), dropout=(0.0, 0.5))

OPEN: list[Tuner] = []


def tuner(directory: Path, space: TuningConfig = SPACE, *, run: str = "one", experiment: str = "data") -> Tuner:
    config = AutomlConfig(schedule=ScheduleConfig(max_trials=1), tuning=space)
    made = Tuner(config, run=run, experiment=experiment, directory=directory, seed=4)
    OPEN.append(made)
    return made


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def test_tpe_learns_from_reported_values_and_stays_within_the_space(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    asked = []
    for number in range(40):
        point = one.ask(number)
        asked.append(point)
        one.tell(number, -abs(log10(point.learning_rate / 0.01)))
    early = sum(abs(log10(point.learning_rate / 0.01)) for point in asked[:10])
    assert sum(abs(log10(point.learning_rate / 0.01)) for point in asked[-10:]) < 0.7 * early
    assert {point.kernel for point in asked} <= {3, 5}
    assert {point.batch_size for point in asked} <= {16, 32}
    assert all(1e-3 <= point.learning_rate <= 1e-1 for point in asked)
    assert all(point.dropout is not None and 0 <= point.dropout <= 0.5 for point in asked)


def test_tpe_avoids_where_trials_diverged_and_ignores_crashed_ones(tmp_path: Path) -> None:
    one = tuner(tmp_path, TuningConfig(kernel=(), learning_rate=(1e-3, 1e1)))
    asked = []
    for number in range(30):
        point = one.ask(number)
        asked.append(point.learning_rate)
        diverged = point.learning_rate > 0.1
        one.tell(number, None if diverged else 0.5, diverged=diverged)
    assert sum(rate > 0.1 for rate in asked[15:]) < sum(rate > 0.1 for rate in asked[:15])
    one.ask(30)
    one.tell(30, None)
    assert {trial.state.name for trial in one.trials} == {"COMPLETE", "PRUNED", "FAIL"}


def test_a_killed_run_finds_its_study_again_and_abandons_running_trials(tmp_path: Path) -> None:
    first = tuner(tmp_path)
    first.ask(0)
    first.tell(0, 0.5)
    first.ask(1)
    second = tuner(tmp_path)
    assert [trial.value for trial in second.trials] == [0.5, None]
    assert second.abandon_running() == 1
    assert [trial.state.name for trial in second.trials] == ["COMPLETE", "FAIL"]
    second.tell(99, 0.1)


def test_the_study_gets_executed_hyperparameters_where_they_differ_from_the_proposal(tmp_path: Path) -> None:
    one = tuner(tmp_path, TuningConfig(kernel=(3, 7), dropout=(0.0, 0.5)))
    executed = []
    for number, value in enumerate((0.5, 0.6, None)):
        asked = one.ask(number)
        executed.append(None if number == 1 else {3: 7, 7: 3}[asked.kernel or 0])
        one.tell(number, value, taken=asked.model_copy(update={"kernel": executed[-1]}))
    (known,) = [trial for trial in one.trials if trial.state.name != "FAIL"]
    assert (known.params["kernel"], known.value) == (executed[0], 0.5)
    assert known.params["dropout"] == one.trials[0].params["dropout"]
    assert len(one.trials) == 4


def shared(folder: Path, storage: str | None = None) -> TuningConfig:
    return SPACE.model_copy(update={"storage": storage or f"sqlite:///{folder / 'study.db'}", "study": "ours"})


def test_two_runs_share_a_study_by_url_and_name_and_abandon_only_their_own_trials(tmp_path: Path) -> None:
    one, other = tuner(tmp_path, shared(tmp_path)), tuner(tmp_path, shared(tmp_path), run="two")
    one.ask(0)
    one.tell(0, 0.7)
    assert [trial.value for trial in other.trials] == [0.7]
    one.ask(1)
    other.ask(0)
    assert tuner(tmp_path, shared(tmp_path), run="two").abandon_running() == 1
    assert [trial.state.name for trial in one.trials] == ["COMPLETE", "RUNNING", "FAIL"]
    one.tell(1, 0.8)
    assert one.trials[1].value == 0.8


def test_a_study_of_another_experiment_is_refused(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    one.ask(0)
    one.tell(0, 0.1)
    with pytest.raises(RequestError, match="another experiment"):
        tuner(tmp_path, TuningConfig(kernel=(3,)))
    with pytest.raises(RequestError, match="another experiment"):
        tuner(tmp_path, experiment="other data")


def test_a_shared_study_with_another_list_of_values_is_refused_and_one_with_another_range_is_not(
    tmp_path: Path,
) -> None:
    space = shared(tmp_path)
    tuner(tmp_path, space).ask(0)
    tuner(tmp_path, space.model_copy(update={"dropout": (0.0, 0.3)}), run="two").ask(0)
    late = tuner(tmp_path, shared(tmp_path).model_copy(update={"study": "other"}), run="three")
    with pytest.raises(RequestError, match=r"searched kernel in .*\(3, 5\).*, tuning.kernel is .*\(3, 5, 7\)"):
        tuner(tmp_path, space.model_copy(update={"kernel": (3, 5, 7)}), run="two")
    tuner(tmp_path, space.model_copy(update={"kernel": (3, 5, 7), "study": "other"}), run="two").ask(0)
    with pytest.raises(RequestError, match="another run searches another space"):
        late.ask(0)


@pytest.fixture
def postgresql() -> Iterator[str]:
    """A real PostgreSQL server of our own, on a socket in a folder of its own; gives its URL."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not programs:
        pytest.skip("PostgreSQL is not installed; tests/requirements.sh does")
    programs_of = programs[-1].parent
    owner = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="acmpg-"))
    if owner:
        shutil.chown(folder, owner)
    make = [str(programs_of / "initdb"), "-D", str(folder / "data"), "-U", "accelmark", "-A", "trust", "--no-sync"]
    subprocess.run(make, check=True, user=owner, cwd="/", stdout=subprocess.DEVNULL)
    options = ["-D", str(folder / "data"), "-k", str(folder), "-c", "listen_addresses=", "-F"]
    server = subprocess.Popen([str(programs_of / "postgres"), *options], user=owner, cwd="/", stderr=subprocess.DEVNULL)
    ready = [str(programs_of / "pg_isready"), "-h", str(folder), "-U", "accelmark", "-d", "postgres", "-t", "20"]
    while subprocess.run(ready, check=False, stdout=subprocess.DEVNULL).returncode:
        assert server.poll() is None
        time.sleep(0.1)
    yield f"postgresql://accelmark@/postgres?host={folder}"
    server.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown: open connections are cut
    server.wait(20)
    shutil.rmtree(folder)


def test_a_study_can_be_stored_in_postgresql(tmp_path: Path, postgresql: str) -> None:
    one, other = tuner(tmp_path, shared(tmp_path, postgresql)), tuner(tmp_path, shared(tmp_path, postgresql), run="two")
    for number in range(6):
        one.tell(number, -abs(log10(one.ask(number).learning_rate / 0.01)))
    assert [trial.value for trial in other.trials] == [trial.value for trial in one.trials]
    one.ask(6)
    assert tuner(tmp_path, shared(tmp_path, postgresql)).abandon_running() == 1
    with pytest.raises(RequestError, match="another experiment"):
        tuner(tmp_path, shared(tmp_path, postgresql), experiment="other data")


def test_an_unreachable_server_is_reported_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be opened") as caught:
        tuner(tmp_path, shared(tmp_path, "postgresql://me:secret@127.0.0.1:1/none?connect_timeout=2"))
    assert "secret" not in str(caught.value)
    assert "me:***@127.0.0.1" in str(caught.value)
