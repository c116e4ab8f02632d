"""Pretraining of Aquila 7B in PyTorch: the architecture and data of Aquila2 7B."""

from accelmark.cases.aquila2_7b.pytorch import Case as Case
