"""A morphed network computes the same function as its parent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accelmark.automl.model.morphs import (
    MORPH_KINDS,
    Morph,
    MorphChoices,
    MorphError,
    MorphKind,
    apply_morph,
    with_dropout,
    with_kernel,
)
from accelmark.automl.model.network import Network, find_problems
from accelmark.automl.model.seeds import resnet50, small
from accelmark.automl.model.weights import Weights, carry_weights, fitted_weights
from accelmark.automl.trial.training import GraphModule, channel_statistics, load_weights, to_weights

QUIET = small((2, 12, 12), 5, filters=(4, 6), dropout=0.0, name="tiny")


def trained_module(network: Network, seed: int = 0) -> GraphModule:
    """A module whose weights and running statistics are all different from their defaults."""
    torch.manual_seed(seed)
    module = GraphModule(network)
    with torch.no_grad():
        for key, value in module.state_dict().items():
            if key.endswith("running_var") or (value.dim() == 1 and key.endswith("weight")):
                value.uniform_(0.5, 1.5)
            elif value.is_floating_point() and value.dim() == 1:
                value.normal_(0, 0.3)
    return module


def built(network: Network, weights: Weights) -> GraphModule:
    module = GraphModule(network)
    load_weights(module, weights)
    return module


def images_for(network: Network) -> torch.Tensor:
    return torch.randn(6, *network.input_shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", MORPH_KINDS)
def test_one_morph_of_each_kind_preserves_the_function_when_evaluating_and_training(kind: MorphKind) -> None:
    parent = trained_module(QUIET)
    images = images_for(QUIET)
    for morph in MorphChoices(QUIET).of(kind):
        named = morph.model_copy(update={"label": "m1", "seed": 5})
        child_network = apply_morph(QUIET, named)
        statistics = channel_statistics(parent, images, named.at)
        weights = carry_weights(QUIET, child_network, named, to_weights(parent), statistics)
        with torch.no_grad():
            child = built(child_network, weights).eval()
            torch.testing.assert_close(child(images), parent.eval()(images), rtol=1e-4, atol=1e-5)
            before = to_weights(parent)
            trained = parent.train()(images)
            load_weights(parent, before)
            torch.testing.assert_close(child.train()(images), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_a_sequence_of_random_morphs_preserves_the_function(seed: int) -> None:
    network, generator = QUIET, np.random.default_rng(seed)
    module = trained_module(network, seed).eval()
    images = images_for(network)
    expected, weights = module(images), to_weights(module)
    for _ in range(8):
        morph, child = MorphChoices(network).draw(generator)
        weights = carry_weights(network, child, morph, weights)
        network = Network.model_validate_json(child.to_json())
    assert not find_problems(network)
    with torch.no_grad():
        torch.testing.assert_close(built(network, weights).eval()(images), expected, rtol=1e-3, atol=1e-4)


def test_skips_and_deepened_blocks_get_gradients() -> None:
    for kind in ("deepen", "add-skip", "concat-skip"):
        morph, child_network = MorphChoices(QUIET).draw(np.random.default_rng(0), [kind])
        child = built(child_network, carry_weights(QUIET, child_network, morph, to_weights(trained_module(QUIET))))
        child(images_for(QUIET)).square().sum().backward()
        added = [value for key, value in child.named_parameters() if f".{morph.label}_" in key]
        assert any(value.grad is not None and bool(value.grad.abs().sum() > 0) for value in added)


@pytest.mark.parametrize(
    "morph",
    [
        Morph(kind="deepen", at="c1_conv", size=3, label="m1"),
        Morph(kind="widen", at="c1_relu", size=8),
        Morph(kind="widen", at="c1_conv", size=3),
        Morph(kind="kernel-grow", at="c1_conv", size=4),
        Morph(kind="add-skip", at="c2_relu", to="c1_relu", label="m1"),
        Morph(kind="concat-skip", at="c1_relu", to="nowhere", label="m1"),
        Morph(kind="deepen", at="nowhere", size=3, label="m1"),
    ],
)
def test_a_morph_that_the_network_does_not_allow_is_refused(morph: Morph) -> None:
    with pytest.raises(MorphError):
        apply_morph(QUIET, morph)


def test_a_searched_kernel_is_executed_and_growing_it_keeps_the_function() -> None:
    module = trained_module(QUIET).eval()
    grown = with_kernel(QUIET, 5)
    child = built(grown, fitted_weights(grown, to_weights(module))).eval()
    assert dict(child.named_parameters())["layers.c2_conv.weight"].shape[-2:] == (5, 5)
    assert dict(child.named_parameters())["layers.c1_conv.weight"].shape[-2:] == (3, 3)
    images = images_for(QUIET)
    torch.testing.assert_close(child(images), module(images), rtol=1e-4, atol=1e-5)
    assert with_kernel(grown, 3) == QUIET


@pytest.mark.parametrize("network", [QUIET, resnet50(classes=5, side=33)], ids=lambda network: network.name)
def test_a_searched_dropout_is_executed(network: Network) -> None:
    module = GraphModule(with_dropout(network, 0.5))
    assert [layer.p for layer in module.layers.values() if isinstance(layer, torch.nn.Dropout)] == [0.5]
    images = images_for(network)
    torch.manual_seed(0)
    assert not torch.equal(module(images), module(images))
