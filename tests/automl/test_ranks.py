"""A trial on several devices in step: real processes, gradients averaged, images counted once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from accelmark.automl.config import DatasetConfig, TrainingConfig
from accelmark.automl.dataset import open_dataset
from accelmark.automl.messages import TrialListener, TrialOrder
from accelmark.automl.model.counting import count
from accelmark.automl.model.layers import Convolution, Dense, GlobalPool, Layer, MaxPool, ReLU, Softmax
from accelmark.automl.model.network import INPUT, Network, Node
from accelmark.automl.records import Hyperparameters
from accelmark.automl.trial.executor import RankContext, run_trial
from accelmark.automl.trial.ranks import RankGroup
from tests.automl.images import CLASSES, SIDE, tiny_dataset, tiny_network
from tests.automl.test_trial import Notes


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    return tiny_dataset(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def group(dataset: DatasetConfig) -> Iterator[RankGroup]:
    made = RankGroup(dataset, tiny_network(), devices=2, threads=1)
    yield made
    made.close()


def order(**changes: object) -> TrialOrder:
    return TrialOrder(
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


def test_two_ranks_learn_together_and_count_every_image_once(group: RankGroup) -> None:
    notes = Notes()
    result, weights = group.run(order(), None, notes.listener)
    assert result.status == "finished"
    assert weights is not None
    assert result.held_out_accuracy is not None
    assert result.held_out_accuracy > 0.6
    assert [(report.trained_images, report.steps, report.evaluated_images) for report in notes.epochs] == [
        (256, 8, 64)
    ] * 4
    carried, _ = group.run(order(epochs=1, parent_network=tiny_network()), weights, TrialListener())
    assert (carried.status, carried.weights) == ("finished", "carried")


def test_stopping_a_trial_early_ends_all_ranks_and_reports_the_trained_part(group: RankGroup) -> None:
    notes = Notes(stop_after=300)
    result, _ = group.run(order(epochs=100_000), None, notes.listener)
    assert result.status == "cut"
    assert not notes.epochs[-1].complete


def plain_network() -> Network:
    """Without batch norm, whose statistics are each rank's own: the same whatever the number of ranks."""
    layers: list[tuple[str, Layer]] = [
        ("c1", Convolution(filters=4, kernel=3, padding=1)),
        ("r1", ReLU()),
        ("p1", MaxPool(kernel=2, stride=2)),
        ("c2", Convolution(filters=6, kernel=3, padding=1)),
        ("r2", ReLU()),
        ("pool", GlobalPool()),
        ("dense", Dense(units=CLASSES)),
        ("softmax", Softmax()),
    ]
    names = [INPUT, *(name for name, _ in layers)]
    nodes = tuple(
        Node(name=name, layer=layer, inputs=(before,)) for (name, layer), before in zip(layers, names, strict=False)
    )
    return Network(name="plain", input_shape=(1, SIDE, SIDE), classes=CLASSES, nodes=nodes)


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
    assert group.run(order(hyperparameters=wild), None, TrialListener())[0].status == "diverged"
    assert group.run(order(epochs=1), None, TrialListener())[0].status == "finished"
    assert [process.pid for process in group.processes] == ranks
    group.processes[1].kill()
    killed, _ = group.run(order(epochs=1), None, TrialListener())
    assert killed.status == "crashed"
    assert "rank 1 of 2 ended" in killed.reason
    assert group.run(order(epochs=1), None, TrialListener())[0].status == "finished"
