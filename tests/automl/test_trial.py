"""A trial trains its order, reports what it processed, and executes every hyperparameter, on one rank or two."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np
import pytest

from accelmark.automl.config import DatasetConfig, TrainingConfig
from accelmark.automl.dataset import Dataset, open_dataset
from accelmark.automl.model.counting import count
from accelmark.automl.model.graph import Convolution, Dense, GlobalPool, MaxPool, Network, ReLU, Softmax
from accelmark.automl.model.morphs import MorphChoices
from accelmark.automl.model.weights import Array
from accelmark.automl.records import EpochReport, Hyperparameters, Progress, TrialListener, TrialOrder, TrialResult
from accelmark.automl.trial.training import GraphModule, RankContext, RankGroup, run_trial, to_weights
from tests.automl.images import CLASSES, chain, tiny_dataset, tiny_network

PLAIN = Hyperparameters(batch_size=32, learning_rate=0.1)


class Notes:
    """A listener that writes down what it hears and ends the trial after so many images."""

    def __init__(self, stop_after: float = inf) -> None:
        self.images = 0
        self.epochs: list[EpochReport] = []
        self.listener = TrialListener(self.report, lambda: self.images >= stop_after)

    def report(self, progress: Progress) -> None:
        if isinstance(progress, int):
            self.images += progress
        else:
            self.epochs.append(progress)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    return tiny_dataset(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def data(dataset: DatasetConfig) -> Dataset:
    return open_dataset(dataset, tiny_network())


def order(hyperparameters: Hyperparameters = PLAIN, **changes: object) -> TrialOrder:
    plain = TrialOrder(
        round=1,
        network=hyperparameters.applied_to(tiny_network()),
        hyperparameters=hyperparameters,
        training=TrainingConfig(batch_size=32),
        epochs=2,
        early_stop=False,
        seed=3,
    )
    return plain.model_copy(update=changes)


def run(
    data: Dataset, given: TrialOrder, weights: dict[str, Array] | None = None, stop_after: float = inf
) -> tuple[TrialResult, dict[str, Array] | None, Notes]:
    notes = Notes(stop_after)
    result, trained = run_trial(data, RankContext("cpu", threads=1), given, weights, notes.listener)
    return result, trained, notes


def test_a_trial_learns_and_reports_the_images_it_really_processed(data: Dataset) -> None:
    result, weights, notes = run(data, order(epochs=6))
    assert result.status == "finished"
    assert result.executed == tiny_network().digest
    assert result.held_out_accuracy is not None
    assert result.held_out_accuracy > 0.7
    assert weights is not None
    assert len(notes.epochs) == 6
    for report in notes.epochs:
        assert report.complete
        assert (report.trained_images, report.steps, report.evaluated_images) == (256, 8, 64)
        assert report.training_s + report.evaluating_s <= report.ended_s - report.begun_s + 1e-6
    assert notes.images == 6 * (256 + 64) + 80


def test_a_trial_stopped_early_or_by_its_time_reports_the_trained_part(data: Dataset) -> None:
    result, _, notes = run(data, order(), stop_after=256 + 64 + 96)
    assert result.status == "cut"
    last = notes.epochs[-1]
    assert (last.complete, last.trained_images, last.steps, last.evaluated_images) == (False, 96, 3, 0)
    assert last.validation_accuracy is None
    result, _, notes = run(data, order(epochs=10_000, limit_s=0.5))
    assert result.status == "cut"
    assert not notes.epochs[-1].complete


def test_early_stop_ends_a_trial_as_finished(data: Dataset) -> None:
    result, _, notes = run(data, order(Hyperparameters(batch_size=32, learning_rate=1e-12), epochs=40, early_stop=True))
    assert result.status == "finished"
    assert len(notes.epochs) <= 14


def test_carried_weights_start_a_child_where_its_parent_ended(data: Dataset) -> None:
    _, trained, parent = run(data, order(epochs=5))
    morph, child = MorphChoices(tiny_network()).draw(np.random.default_rng(1), ["deepen"])
    frozen = Hyperparameters(batch_size=32, learning_rate=1e-9)
    given = order(frozen, network=child, parent_network=tiny_network(), morphs=(morph,), epochs=1)
    result, _, notes = run(data, given, trained)
    best = max(report.validation_accuracy or 0 for report in parent.epochs)
    assert result.weights == "carried"
    assert notes.epochs[0].validation_accuracy == pytest.approx(best, abs=0.1)
    scratch = run(data, order(frozen, network=child, epochs=1))
    assert scratch[0].weights == "from-scratch"
    assert (scratch[2].epochs[0].validation_accuracy or 0) < best - 0.2


def test_a_searched_kernel_is_what_is_trained(data: Dataset) -> None:
    given = order(PLAIN.model_copy(update={"kernel": 5}), epochs=1)
    result, weights, _ = run(data, given)
    assert weights is not None
    assert weights["c2_conv.weight"].shape[-1] == 5
    assert [layer.kernel for layer in given.network.convolutions.values()] == [3, 5]
    assert result.executed == given.network.digest != tiny_network().digest


def test_the_precision_recorded_is_the_one_that_was_computed_in(data: Dataset) -> None:
    assert run(data, order(epochs=1))[0].precision == "fp32"
    assert run(data, order(training=TrainingConfig(batch_size=32, precision="bf16"), epochs=1))[0].precision == "bf16"


def test_a_trial_whose_weights_do_not_fit_says_in_one_line_which(data: Dataset) -> None:
    weights = to_weights(GraphModule(tiny_network())) | {"dense.bias": np.zeros(9, np.float32)}
    result, _, _ = run(data, order(parent_network=tiny_network()), weights)
    assert result.status == "crashed"
    assert "dense.bias" in result.reason
    assert "\n" not in result.reason


def test_a_trial_that_diverges_is_recorded_as_such_with_the_part_that_it_trained(data: Dataset) -> None:
    result, weights, notes = run(data, order(Hyperparameters(batch_size=32, learning_rate=1e30)))
    assert (result.status, weights, result.held_out_accuracy) == ("diverged", None, None)
    assert "the loss was not finite at step" in result.reason
    (part,) = notes.epochs
    assert (part.complete, part.train_loss, part.validation_accuracy) == (False, None, None)
    assert part.trained_images == 32 * part.steps


def test_a_trial_that_needs_too_much_memory_is_recorded_as_such(data: Dataset) -> None:
    huge = tiny_network().with_layers({"c2_conv": Convolution(filters=1_000_000, kernel=999, padding=499)})
    assert run(data, order(network=huge))[0].status == "out-of-memory"


@pytest.fixture(scope="module")
def group(dataset: DatasetConfig) -> Iterator[RankGroup]:
    made = RankGroup(dataset, tiny_network(), devices=2, threads=1)
    yield made
    made.close()


def test_two_ranks_learn_together_and_count_every_image_once(group: RankGroup) -> None:
    notes = Notes()
    result, weights = group.run(order(epochs=4), None, notes.listener)
    assert result.status == "finished"
    assert weights is not None
    assert result.held_out_accuracy is not None
    assert result.held_out_accuracy > 0.6
    counts = [(report.trained_images, report.steps, report.evaluated_images) for report in notes.epochs]
    assert counts == [(256, 8, 64)] * 4
    carried, _ = group.run(order(epochs=1, parent_network=tiny_network()), weights, TrialListener())
    assert (carried.status, carried.weights) == ("finished", "carried")


def test_stopping_a_trial_early_ends_all_ranks_and_reports_the_trained_part(group: RankGroup) -> None:
    notes = Notes(stop_after=300)
    result, _ = group.run(order(epochs=100_000), None, notes.listener)
    assert result.status == "cut"
    assert not notes.epochs[-1].complete


def plain_network() -> Network:
    """Without batch norm, whose statistics are each rank's own: the same whatever the number of ranks."""
    first, second = (Convolution(filters=filters, kernel=3, padding=1) for filters in (4, 6))
    pool = MaxPool(kernel=2, stride=2)
    return chain("plain", first, ReLU(), pool, second, ReLU(), GlobalPool(), Dense(units=CLASSES), Softmax())


def test_two_ranks_give_the_result_and_the_counts_of_one_with_the_same_global_batch(
    group: RankGroup, dataset: DatasetConfig
) -> None:
    given = order(network=plain_network(), epochs=3)
    together, alone = Notes(), Notes()
    shared, trained = group.run(given, None, together.listener)
    data = open_dataset(dataset, plain_network())
    single, expected = run_trial(data, RankContext("cpu", threads=1), given, None, alone.listener)
    assert (shared.status, shared.ranks, single.status, single.ranks) == ("finished", 2, "finished", 1)
    assert trained is not None
    assert expected is not None
    assert trained.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(trained[key], values, rtol=1e-3, atol=1e-5, err_msg=key)
    assert shared.held_out_accuracy == pytest.approx(single.held_out_accuracy, abs=1.01 / 80)
    assert shared.flops_per_image == single.flops_per_image == count(plain_network(), "accelmark").matrix
    for one, other in zip(together.epochs, alone.epochs, strict=True):
        counts = [(each.epoch, each.trained_images, each.steps, each.evaluated_images) for each in (one, other)]
        assert counts[0] == counts[1]
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-4)
        assert one.validation_loss == pytest.approx(other.validation_loss, rel=1e-4)


@pytest.mark.heavy
def test_ranks_diverge_together_and_one_that_ends_fails_the_trial(group: RankGroup) -> None:
    ranks = [process.pid for process in group.processes]
    wild = Hyperparameters(batch_size=32, learning_rate=1e30)
    assert group.run(order(wild), None, TrialListener())[0].status == "diverged"
    assert group.run(order(epochs=1), None, TrialListener())[0].status == "finished"
    assert [process.pid for process in group.processes] == ranks
    group.processes[1].kill()
    killed, _ = group.run(order(epochs=1), None, TrialListener())
    assert killed.status == "crashed"
    assert "rank 1 of 2 ended" in killed.reason
    assert group.run(order(epochs=1), None, TrialListener())[0].status == "finished"
