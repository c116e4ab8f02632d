"""Run files: what is wrong is told in the file's own words, and once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelmark.spec.errors import SpecError
from accelmark.spec.model import parse
from accelmark.spec.runfile import RunSpec

HOST = {"address": "10.0.0.1"}


def problems(**values: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse(RunSpec, {"cases": ["resnet_mini"], **values}, "run.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_a_single_word_is_a_case_and_a_path_is_a_cluster_file() -> None:
    run = parse(RunSpec, {"cases": ["resnet_mini:pytorch:CPU:1:1"], "cluster": "cluster.yaml"}, "run.yaml")
    assert run.cases[0].key == "resnet_mini:pytorch:CPU:1:1"
    assert run.cluster == Path("cluster.yaml")
