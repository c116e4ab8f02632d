"""A trial on several devices in step: real processes, gradients averaged, images counted once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelmark.automl.config import DatasetConfig, TrainingConfig
from accelmark.automl.records import Hyperparameters
from accelmark.automl.trial.order import TrialOrder
from accelmark.automl.trial.replicas import ReplicaGroup
from tests.automl.pictures import tiny_dataset, tiny_network
from tests.automl.test_trial import Notes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    return tiny_dataset(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def group(dataset: DatasetConfig) -> Iterator[ReplicaGroup]:
    made = ReplicaGroup(dataset, tiny_network(), devices=2, threads=1)
    yield made
    made.close()


def order(**changes: object) -> TrialOrder:
    return TrialOrder(
        trial=0,
        individual=0,
        attempt=1,
        round=1,
        network=tiny_network(),
        parent_network=None,
        morphs=(),
        hyperparameters=Hyperparameters(batch_size=32, learning_rate=0.1),
        training=TrainingConfig(batch_size=32),
        epochs=4,
        early_stop=False,
        seed=3,
        limit_s=None,
    ).model_copy(update=changes)


def test_two_replicas_learn_together_and_count_every_image_once(group: ReplicaGroup) -> None:
    notes = Notes()
    result, weights = group.run(order(), None, notes)
    assert result.status == "finished"
    assert weights is not None
    assert result.held_out_accuracy is not None
    assert result.held_out_accuracy > 0.6
    assert [(report.trained_images, report.steps, report.evaluated_images) for report in notes.epochs] == [
        (256, 8, 64)
    ] * 4
    carried, _ = group.run(order(epochs=1, parent_network=tiny_network()), weights, Notes())
    assert (carried.status, carried.weights) == ("finished", "carried")


def test_cancelling_ends_all_replicas_with_the_part_that_was_done(group: ReplicaGroup) -> None:
    notes = Notes(stop_after=300)
    result, _ = group.run(order(epochs=100_000), None, notes)
    assert result.status == "cut"
    assert not notes.epochs[-1].complete


def test_a_replica_that_breaks_fails_the_trial_and_the_next_one_runs(group: ReplicaGroup) -> None:
    broken, _ = group.run(order(hyperparameters=Hyperparameters(batch_size=32, learning_rate=1e30)), None, Notes())
    assert broken.status == "crashed"
    assert group.run(order(epochs=1), None, Notes())[0].status == "finished"
    group._ranks[1].kill()
    killed, _ = group.run(order(epochs=1), None, Notes())
    assert killed.status == "crashed"
    assert "rank 1 of 2 broke" in killed.reason
    assert group.run(order(epochs=1), None, Notes())[0].status == "finished"
