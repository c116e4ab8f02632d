"""JSON schemas of the files that users write: ``python -m accelmark.explain.schemas`` writes them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel

from accelmark.automl.config import AutomlConfig
from accelmark.explain.fields import SCHEMA_DIRECTORY, json_schema
from accelmark.results.schema import json_schema as results_schema
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.plugins.launcher import launcher_options
from accelmark.spec.plugins.trainer import TrainerSpec
from accelmark.spec.plugins.vendor import VendorSpec
from accelmark.spec.runfile import RunSpec

FILES: Final[Mapping[str, tuple[type[BaseModel], str]]] = {
    "run": (RunSpec, "Run file"),
    "cluster": (ClusterSpec, "Cluster file"),
    "case": (CaseSpec, "case.yaml"),
    "vendor": (VendorSpec, "vendor.yaml"),
    "framework": (FrameworkSpec, "framework.yaml"),
    "trainer": (TrainerSpec, "trainer.yaml"),
    "search": (AutomlConfig, "Search file"),
}


def schemas() -> dict[str, str]:
    """Return file name -> JSON schema of every kind of file, and of results."""
    made = {f"{name}.json": json_schema(model, f"AccelMark: {title}") for name, (model, title) in FILES.items()}
    model, title = FILES["cluster"]
    made["cluster.json"] = json_schema(model, f"AccelMark: {title}", launcher_options().values())
    return {**made, "result.json": results_schema()}


def schema_line(kind: str) -> str:
    """Return the comment that tells an editor's YAML language server which schema a file has."""
    return f"# yaml-language-server: $schema={(SCHEMA_DIRECTORY / f'{kind}.json').as_uri()}"


if __name__ == "__main__":
    for name, text in schemas().items():
        (SCHEMA_DIRECTORY / name).write_text(text, encoding="utf-8")
