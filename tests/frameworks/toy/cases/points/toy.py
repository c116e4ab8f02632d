"""Softmax regression over points in four corners."""

from typing import Any

import numpy as np

from accelmark.spec.settings.training import TrainSettings


class Case:
    num_features, num_classes = 3, 4

    def __init__(self, settings: TrainSettings) -> None:
        random = np.random.default_rng(7)
        corners = np.array([(x, y) for x in (-1, 1) for y in (-1, 1)])
        labels = random.integers(0, 4, 800)
        points = corners[labels] + random.normal(scale=0.3, size=(800, 2))
        points = np.hstack([points, np.ones((800, 1))])
        self.train, self.test = (points[:640], labels[:640]), (points[640:], labels[640:])

    def loss_and_gradient(self, weights: Any, points: Any, labels: Any) -> tuple[float, Any]:
        logits = points @ weights
        shares = np.exp(logits - logits.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        loss = -np.log(shares[np.arange(len(labels)), labels]).mean()
        shares[np.arange(len(labels)), labels] -= 1
        return loss, points.T @ shares / len(labels)
