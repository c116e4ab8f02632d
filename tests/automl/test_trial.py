"""A trial trains its order, reports what it processed, and executes every hyperparameter."""

from __future__ import annotations

import numpy as np
import pytest

from accelmark.automl.config import TrainingConfig
from accelmark.automl.dataset import Dataset, open_dataset
from accelmark.automl.messages import Progress, TrialListener, TrialOrder, TrialResult
from accelmark.automl.model.layers import Convolution
from accelmark.automl.model.morphs import MorphChoices
from accelmark.automl.model.network import Network
from accelmark.automl.model.weights import Array
from accelmark.automl.records import EpochReport, Hyperparameters
from accelmark.automl.trial.executor import RankContext, run_trial
from tests.automl.images import tiny_dataset, tiny_network

PLAIN = Hyperparameters(batch_size=32, learning_rate=0.1)


class Notes:
    """A listener that writes down what it hears and ends the trial after so many images."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.images = 0
        self.epochs: list[EpochReport] = []
        self.stop_after = stop_after
        self.listener = TrialListener(self.report, self.should_stop)

    def report(self, progress: Progress) -> None:
        if isinstance(progress, int):
            self.images += progress
        else:
            self.epochs.append(progress)

    def should_stop(self) -> bool:
        return self.stop_after is not None and self.images >= self.stop_after


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(tiny_dataset(tmp_path_factory.mktemp("images")), tiny_network())


def order(hyperparameters: Hyperparameters = PLAIN, **changes: object) -> TrialOrder:
    plain = TrialOrder(
        round=1,
        network=hyperparameters.applied_to(tiny_network()),
        parent_network=None,
        morphs=(),
        hyperparameters=hyperparameters,
        training=TrainingConfig(batch_size=32),
        epochs=2,
        early_stop=False,
        seed=3,
        limit_s=None,
    )
    return plain.model_copy(update=changes)


def run(
    data: Dataset, given: TrialOrder, weights: dict[str, Array] | None = None, stop_after: int | None = None
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


def test_a_trial_repeats_itself(data: Dataset) -> None:
    one, other = run(data, order())[1], run(data, order())[1]
    assert one is not None
    assert other is not None
    assert all(np.array_equal(one[key], other[key]) for key in one)


def test_a_trial_stopped_early_reports_the_trained_part(data: Dataset) -> None:
    result, _, notes = run(data, order(), stop_after=256 + 64 + 96)
    assert result.status == "cut"
    last = notes.epochs[-1]
    assert (last.complete, last.trained_images, last.steps, last.evaluated_images) == (False, 96, 3, 0)
    assert last.validation_accuracy is None


def test_a_trial_stops_when_its_time_is_up(data: Dataset) -> None:
    result, _, notes = run(data, order(epochs=10_000, limit_s=0.5))
    assert result.status == "cut"
    assert not notes.epochs[-1].complete


def test_early_stop_ends_a_trial_as_finished(data: Dataset) -> None:
    frozen = Hyperparameters(batch_size=32, learning_rate=1e-12)
    result, _, notes = run(data, order(frozen, epochs=40, early_stop=True))
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


def kernels(network: Network) -> list[int]:
    return [node.layer.kernel for node in network.nodes if isinstance(node.layer, Convolution)]


def test_a_searched_kernel_is_what_is_trained(data: Dataset) -> None:
    given = order(PLAIN.model_copy(update={"kernel": 5}), epochs=1)
    result, weights, _ = run(data, given)
    assert weights is not None
    assert weights["c2_conv.weight"].shape[-1] == 5
    assert kernels(given.network) == [3, 5]
    assert result.executed == given.network.digest != tiny_network().digest


def test_a_searched_learning_rate_and_dropout_change_the_weights(data: Dataset) -> None:
    plain = run(data, order(epochs=1))[1]
    for change in ({"learning_rate": 0.05}, {"dropout": 0.5}):
        changed = run(data, order(PLAIN.model_copy(update=change), epochs=1))[1]
        assert plain is not None
        assert changed is not None
        assert not np.array_equal(plain["dense.weight"], changed["dense.weight"])


def test_the_precision_recorded_is_the_one_that_was_computed_in(data: Dataset) -> None:
    half = TrainingConfig(batch_size=32, precision="bf16")
    assert run(data, order(epochs=1))[0].precision == "fp32"
    assert run(data, order(training=half, epochs=1))[0].precision == "bf16"


def test_a_trial_that_diverges_is_recorded_as_such_with_the_part_that_it_trained(data: Dataset) -> None:
    result, weights, notes = run(data, order(Hyperparameters(batch_size=32, learning_rate=1e30)))
    assert (result.status, weights, result.held_out_accuracy) == ("diverged", None, None)
    assert "the loss was not finite at step" in result.reason
    (part,) = notes.epochs
    assert (part.complete, part.train_loss, part.validation_accuracy) == (False, None, None)
    assert part.trained_images == 32 * part.steps


def test_a_trial_that_raises_is_recorded_as_crashed(data: Dataset) -> None:
    broken = run(data, order(parent_network=tiny_network()), {"dense.weight": np.zeros((1, 1), np.float32)})[0]
    assert broken.status == "crashed"
    assert "KeyError" in broken.reason


def test_a_trial_that_needs_too_much_memory_is_recorded_as_such(data: Dataset) -> None:
    huge = tiny_network().with_layers({"c2_conv": Convolution(filters=1_000_000, kernel=999, padding=499)})
    assert run(data, order(network=huge))[0].status == "out-of-memory"
