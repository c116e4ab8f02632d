"""Inference: settings and cases, configuration layers, events, and the names of engines."""

from accelmark.spec.inference.settings import (
    RUN_TIME_KEYS,
    EngineOption,
    InferCaseSpec,
    InferPrecision,
    InferSettings,
    InferStep,
    Note,
    PlannedStep,
    Reference,
    ScenarioName,
    file_at,
    planned_steps,
)

__all__ = [
    "RUN_TIME_KEYS",
    "EngineOption",
    "InferCaseSpec",
    "InferPrecision",
    "InferSettings",
    "InferStep",
    "Note",
    "PlannedStep",
    "Reference",
    "ScenarioName",
    "file_at",
    "planned_steps",
]
