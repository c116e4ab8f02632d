"""Networks as data, their counted operations (PyTorch's own counter and AIPerf's counts agree), and morphs of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from accelmark.automl.model import graph, morphs
from accelmark.automl.model.counting import MODES, count
from accelmark.automl.model.graph import Network, Node, find_problems, infer_shapes
from accelmark.automl.model.morphs import MORPH_KINDS, Morph, MorphChoices, MorphError, MorphKind, apply_morph
from accelmark.automl.model.seeds import resnet50, resolve_network, seed_weights, small
from accelmark.automl.model.weights import Weights, carry_weights, fitted_weights, weight_shapes
from accelmark.automl.records import OperationCost, Totals
from accelmark.automl.trial.training import GraphModule, channel_statistics, load_weights, to_weights
from accelmark.datasets.images import IMAGENET_MEAN_AND_DEVIATION
from accelmark.spec.errors import DataError, RequestError, SpecError
from benchmarks.automl_counting import measured


def test_the_shapes_inferred_are_those_that_pytorch_computes() -> None:
    network = resnet50(classes=7, side=65)
    shapes = infer_shapes(network)
    seen: dict[str, tuple[int, ...]] = {}
    module = GraphModule(network).eval()
    for name, layer in module.layers.items():
        layer.register_forward_hook(lambda _, __, value, name=name: seen.update({name: tuple(value.shape[1:])}))
    with torch.no_grad():
        module(torch.zeros(1, 3, 65, 65))
    assert len(seen) == len(network.nodes) - 1
    assert all(shapes[name] == shape for name, shape in seen.items())


def write_keras_file(path: Path) -> dict[str, list[NDArray[np.float32]]]:
    """Write random weights with the layers and the layout of Keras' file of ResNet-50; return them by layer."""
    h5py = pytest.importorskip("h5py")
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"conv1": (7, 7, 3, 64), "bn_conv1": (64,), "fc1000": (2048, 1000)}
    channels = 64
    for stage, (letters, filters) in enumerate((("abc", 64), ("abcd", 128), ("abcdef", 256), ("abc", 512)), start=2):
        for letter in letters:
            for branch, kernel, source, out in (
                *((("1", 1, channels, 4 * filters),) if letter == "a" else ()),
                ("2a", 1, channels, filters), ("2b", 3, filters, filters), ("2c", 1, filters, 4 * filters),
            ):  # fmt: skip
                shapes[f"res{stage}{letter}_branch{branch}"] = (kernel, kernel, source, out)
                shapes[f"bn{stage}{letter}_branch{branch}"] = (out,)
            channels = 4 * filters
    layers: dict[str, list[NDArray[np.float32]]] = {"input_1": []}
    with h5py.File(path, "w") as file:
        for layer, shape in shapes.items():
            sizes = [shape] * 4 if len(shape) == 1 else [shape, shape[-1:]]
            layers[layer] = [random.uniform(0.1, 1.0, size).astype(np.float32) for size in sizes]
        for layer, arrays in layers.items():
            group = file.create_group(layer)
            group.attrs["weight_names"] = np.array([f"{layer}_{number}:0" for number in range(len(arrays))], dtype="S")
            for number, array in enumerate(arrays):
                group.create_dataset(f"{layer}_{number}:0", data=array)
    return layers


def test_keras_weights_of_resnet50_compute_the_same(tmp_path: Path) -> None:
    path = tmp_path / "resnet50_weights_tf_dim_ordering_tf_kernels.h5"
    layers = write_keras_file(path)
    weights = seed_weights(path)
    assert {name: array.shape for name, array in weights.items()} == weight_shapes(resnet50())
    picture = np.random.default_rng(1).uniform(0, 1, (1, 3, 16, 16)).astype(np.float32)  # red, green, blue
    mean, deviation = (np.array(values, np.float32).reshape(3, 1, 1) for values in IMAGENET_MEAN_AND_DEVIATION)
    keras_input = (255 * picture)[:, ::-1] - np.array([103.939, 116.779, 123.68], np.float32).reshape(3, 1, 1)
    (kernel, bias), (*_, their_mean, _) = layers["conv1"], layers["bn_conv1"]
    theirs = torch.nn.functional.conv2d(
        torch.tensor(keras_input.copy()), torch.tensor(kernel.transpose(3, 2, 0, 1).copy()), torch.tensor(bias)
    )
    ours = torch.nn.functional.conv2d(
        torch.tensor((picture - mean) / deviation), torch.tensor(weights["stem_conv.weight"])
    )
    means = [torch.tensor(values).reshape(-1, 1, 1) for values in (weights["stem_bn.running_mean"], their_mean)]
    assert torch.allclose(ours - means[0], theirs - means[1], rtol=1e-4, atol=0.05)
    assert np.allclose(weights["s3b1_0_bn.running_mean"], layers["bn3a_branch1"][2] - layers["res3a_branch1"][1])
    assert np.allclose(weights["s5b3_3_bn.running_var"] + 1e-5, layers["bn5c_branch2c"][3] + 1e-3)
    assert np.array_equal(weights["dense.weight"], layers["fc1000"][0].T)
    path.write_bytes(b"damaged")
    with pytest.raises(DataError, match="Keras"):
        seed_weights(path)


def test_all_problems_of_a_network_are_reported_at_once() -> None:
    nodes = (
        Node(name="a", layer=graph.Convolution(filters=4, kernel=9), inputs=("input",)),
        Node(name="b", layer=graph.Convolution(filters=4, kernel=3), inputs=("inptu",)),
        Node(name="c", layer=graph.Dense(units=5), inputs=("input",)),
        Node(name="c", layer=graph.Flatten(), inputs=("input",)),
        Node(name="d", layer=graph.Add(), inputs=("input",)),
    )
    with pytest.raises(SpecError) as caught:
        infer_shapes(Network(name="test", input_shape=(3, 8, 8), classes=10, nodes=nodes))
    text = str(caught.value)
    assert "a window of 9x9 does not fit into 8x8" in text
    assert "did you mean 'input'?" in text
    assert "a dense reads a flat input" in text
    assert "the name 'c' is used twice" in text
    assert "reads two or more inputs, not 1" in text
    assert "the last node is add, must be a softmax" in text
    assert len(caught.value.problems) >= 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "invalid JSON"),
        ('{"name": "x"}', "input_shape"),
        ('{"schema_version": 2}', "schema_version"),
        (resolve_network("small28").to_json().replace('"filters": 16', '"filters": 0'), "greater than or equal to 1"),
        (resolve_network("small28").to_json().replace('"relu"', '"swish"'), "swish"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "net.json").write_text(text)
    with pytest.raises(SpecError, match=message):
        graph.load_network(tmp_path / "net.json")


def test_an_unknown_seed_comes_with_the_nearest_name() -> None:
    with pytest.raises(RequestError, match="did you mean 'resnet50'"):
        resolve_network("resnet5")


def test_the_main_chain_of_resnet50_passes_all_bottlenecks_and_sixteen_skips_leave_it() -> None:
    network = resnet50()
    chain = graph.main_chain(network)
    assert len([name for name in chain if isinstance(network.by_name[name].layer, graph.Convolution)]) == 1 + 3 * 16
    assert len(graph.skips(network)) == 16


def morphed(kind: MorphKind) -> Iterator[Network]:
    generator, network = np.random.default_rng(11), small((3, 16, 16), 4, filters=(4, 8, 8))
    for _ in range(3):
        _, network = MorphChoices(network).draw(generator, [kind])
        yield network


@pytest.mark.parametrize("kind", [*MORPH_KINDS, None])
def test_resnet50_and_every_kind_of_morph_are_counted_as_executed(kind: MorphKind | None) -> None:
    for network in [resnet50()] if kind is None else morphed(kind):
        executed = measured(network)
        for mode in MODES:
            counted = count(network, mode)
            assert (counted.matrix_forward, counted.matrix_backward) == executed


REFERENCE_PARTS = {
    "convolution": 7_711_850_496,
    "batch_norm": 74_109_952,
    "relu": 9_081_856,
    "add": 5_519_360,
    "max_pool": 1_806_336,
    "global_pool": 106_496,
    "dense": 4_096_000,
    "softmax": 12_999,
}


def test_resnet50_and_its_parts_count_as_aiperf_counts_them() -> None:
    counted = count(resnet50(), "aiperf-v1")
    assert counted.forward == sum(REFERENCE_PARTS.values()) == 7_806_583_495
    assert counted.backward == 15_246_874_820
    for kind, operations in REFERENCE_PARTS.items():
        assert sum(layer.forward for layer in counted.layers if layer.kind == kind) == operations


def test_accelmark_agrees_on_matrix_work_counts_batch_norm_backward_in_full_and_the_update_once_a_step() -> None:
    ours, theirs = count(resnet50(), "accelmark"), count(resnet50(), "aiperf-v1")
    assert ours.matrix_forward == theirs.matrix_forward
    assert ours.matrix_backward == theirs.matrix_backward
    assert sum(layer.backward for layer in ours.layers if layer.kind == "batch_norm") == 9 * 74_109_952 // 7
    assert theirs.backward - theirs.update_in_backward < ours.backward
    assert ours.update == 4 * 25_557_032
    assert OperationCost.of(ours).operations(Totals(steps=3)) == 3 * ours.update


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
    grown = morphs.with_kernel(QUIET, 5)
    child = built(grown, fitted_weights(grown, to_weights(module))).eval()
    assert dict(child.named_parameters())["layers.c2_conv.weight"].shape[-2:] == (5, 5)
    assert dict(child.named_parameters())["layers.c1_conv.weight"].shape[-2:] == (3, 3)
    images = images_for(QUIET)
    torch.testing.assert_close(child(images), module(images), rtol=1e-4, atol=1e-5)
    assert morphs.with_kernel(grown, 3) == QUIET


@pytest.mark.parametrize("network", [QUIET, resnet50(classes=5, side=33)], ids=lambda network: network.name)
def test_a_searched_dropout_is_executed(network: Network) -> None:
    module = GraphModule(morphs.with_dropout(network, 0.5))
    assert [layer.p for layer in module.layers.values() if isinstance(layer, torch.nn.Dropout)] == [0.5]
    images = images_for(network)
    torch.manual_seed(0)
    assert not torch.equal(module(images), module(images))
