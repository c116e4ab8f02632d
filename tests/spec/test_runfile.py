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


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"cluster": {"launcher": "ssh", "hosts": [HOST, HOST]}}, "cluster: duplicate hosts: 10.0.0.1"),
        (
            {"cluster": {"hosts": [{"adress": "x", **HOST}]}},
            "cluster.hosts.0.adress: unknown key (did you mean 'address'?)",
        ),
        ({"cluster": 3}, "cluster: must be a mapping of keys, found 3"),
        ({"cases": []}, "cases: needs at least 1 of them"),
        ({"cases": [3]}, "cases.0: must be a mapping of keys, found 3"),
        ({"cases": "resnet_mini"}, "cases: must be a list, found 'resnet_mini'"),
        ({"open": "perhaps"}, "open: must be true or false, found 'perhaps'"),
        ({"timeout_s": "soon"}, "timeout_s: must be a number, found 'soon'"),
        ({"name": 5}, "name: must be a text, found 5"),
    ],
)
def test_exactly_the_wrong_keys_are_named(values: dict[str, Any], problem: str) -> None:
    assert problems(**values) == [f"run.yaml: {problem}"]
