"""The analytic matrix work equals the count of PyTorch's own counter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelmark.automl.model.counting import MODES, Mode, count
from accelmark.automl.model.morphs import MORPH_KINDS, MorphChoices, MorphKind
from accelmark.automl.model.network import Network
from accelmark.automl.model.seeds import resnet50, small
from accelmark.automl.trial.module import GraphModule

BATCH = 2


def measured(network: Network) -> tuple[int, int]:
    """Matrix operations per image, forward and backward, as executed (on shapes alone, without data)."""
    with torch.device("meta"):
        module = GraphModule(network)
        images = torch.empty(BATCH, *network.input_shape)
    with FlopCounterMode(display=False) as forward:
        loss = module(images).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops() // BATCH, backward.get_total_flops() // BATCH


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MORPH_KINDS)
def test_every_kind_of_morph_is_counted_as_executed(mode: Mode, kind: MorphKind) -> None:
    generator = np.random.default_rng(11)
    network = small((3, 16, 16), 4, filters=(4, 8, 8))
    for _ in range(3):
        _, network = MorphChoices(network).draw(generator, [kind])
        counted = count(network, mode)
        assert (counted.matrix_forward, counted.matrix_backward) == measured(network)


@pytest.mark.parametrize("mode", MODES)
def test_resnet50_is_counted_as_executed(mode: Mode) -> None:
    network = resnet50()
    counted = count(network, mode)
    assert (counted.matrix_forward, counted.matrix_backward) == measured(network)


def test_the_parameters_counted_are_those_of_the_module() -> None:
    _, network = MorphChoices(resnet50(classes=5, side=33)).draw(np.random.default_rng(0), ["concat-skip"])
    with torch.device("meta"):
        module = GraphModule(network)
    assert count(network, "accelmark").parameters == sum(value.numel() for value in module.parameters())
