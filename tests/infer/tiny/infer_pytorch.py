"""A case of a few thousand parameters, whose labels agree with most of the model's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from accelmark.infer.case import InferBatch, InferCase, InMemoryBatches
from accelmark.spec.errors import DataError


class Case(InferCase):
    """Images of 8 x 8 in ten classes."""

    def build_dataloader(self) -> InMemoryBatches:
        images = self._images(self.number("items"), seed=3)
        if "data" in self.data_dirs and not any(self.data_dirs["data"].iterdir()):
            raise DataError(f"{self.data_dirs['data']}: is empty")
        with torch.inference_mode():
            labels = _model(noise=0.02)(images).argmax(1)
        return InMemoryBatches((images,), labels, self.settings.batch_size)

    def calibration_batch(self, size: int) -> InferBatch:
        return InferBatch((self._images(size, seed=4),), None)

    def _images(self, items: int, seed: int) -> Tensor:
        return torch.randn(items, 1, 8, 8, generator=torch.Generator().manual_seed(seed))

    def create_model(self) -> nn.Module:
        model = _model()
        if self.parameters.get("nan"):
            nn.init.constant_(model.get_parameter("4.bias"), float("nan"))
        return nn.Sequential(model, _WithoutLastRow()) if self.parameters.get("short") else model

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        return {"correct": float((outputs[0].argmax(1) == labels).sum()), "count": float(labels.numel())}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"top1": sums["correct"] / sums["count"]}

    def synthetic_batch(self, size: int) -> InferBatch:
        return InferBatch((self._images(size, seed=size),), None)


class _WithoutLastRow(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows[:-1]


def _model(noise: float = 0.0) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return model.eval()
