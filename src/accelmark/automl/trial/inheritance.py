"""The weights that a child starts from: its parent's, carried through the morphs between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from accelmark.automl.data import Dataset
from accelmark.automl.graph import Network
from accelmark.automl.graph.module import Array, GraphModule, channel_statistics, load_weights
from accelmark.automl.morphs import apply_morph, carry_weights, fitted_weights
from accelmark.automl.trial.order import TrialOrder

_CALIBRATION_IMAGES: Final = 256


def inherited(order: TrialOrder, parent: Network, weights: Mapping[str, Array], dataset: Dataset) -> dict[str, Array]:
    """Carry ``weights`` of ``parent`` through the order's morphs; statistics of real images keep deepening exact."""
    network, carried = parent, dict(weights)
    for morph in order.morphs:
        statistics = None
        if morph.kind == "deepen":
            module = GraphModule(network)
            load_weights(module, carried)
            statistics = channel_statistics(module, _calibration(dataset), [morph.at])
        child = apply_morph(network, morph)
        carried = carry_weights(network, child, morph, carried, statistics)
        network = child
    return fitted_weights(order.network, carried)


def _calibration(dataset: Dataset) -> torch.Tensor:
    count = min(_CALIBRATION_IMAGES, len(dataset.training))
    images = dataset.training.batch(np.arange(count), None).astype(np.float32) / 255
    shape = (1, -1, 1, 1)
    mean, deviation = np.array(dataset.mean, np.float32), np.array(dataset.deviation, np.float32)
    return torch.from_numpy((images - mean.reshape(shape)) / deviation.reshape(shape))
