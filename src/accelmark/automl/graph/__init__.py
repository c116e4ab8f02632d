"""Networks as typed data: layers, shapes, seeds. Nothing here imports a framework but ``graph.module``."""

from accelmark.automl.graph.layers import (
    Add,
    AveragePool,
    BatchNorm,
    Concat,
    Convolution,
    Dense,
    Dropout,
    Flatten,
    GlobalPool,
    Layer,
    MaxPool,
    ReLU,
    Softmax,
)
from accelmark.automl.graph.network import INPUT, Network, NetworkError, Node, load_network, parse_network
from accelmark.automl.graph.paths import Skip, main_chain, skips
from accelmark.automl.graph.seeds import SEEDS, resnet50, seed_network, small
from accelmark.automl.graph.shapes import Shape, find_problems, infer_shapes, output_shape

__all__ = [
    "INPUT",
    "SEEDS",
    "Add",
    "AveragePool",
    "BatchNorm",
    "Concat",
    "Convolution",
    "Dense",
    "Dropout",
    "Flatten",
    "GlobalPool",
    "Layer",
    "MaxPool",
    "Network",
    "NetworkError",
    "Node",
    "ReLU",
    "Shape",
    "Skip",
    "Softmax",
    "find_problems",
    "infer_shapes",
    "load_network",
    "main_chain",
    "output_shape",
    "parse_network",
    "resnet50",
    "seed_network",
    "skips",
    "small",
]
