"""DLRM-DCNv2 on Criteo's click logs in PyTorch."""

from __future__ import annotations

from accelmark.tasks.recommendation.pytorch import ClickPrediction


class Case(ClickPrediction):
    """DLRM-DCNv2 of MLPerf Training."""

    samples = "criteo"
