"""Another project's trainer: ``<name>.yaml`` describes how to start it and how to read its output."""

from __future__ import annotations

from accelmark.spec.model import Spec


class TrainerSpec(Spec):
    """One external trainer."""

    name: str
    framework: str
    """The framework whose launcher starts the trainer's ranks."""
