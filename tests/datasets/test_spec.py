from __future__ import annotations

from typing import Any

import pytest

from accelmark.datasets.spec import dataset_specs
from accelmark.spec.errors import SpecError
from accelmark.spec.plugins.catalog import folders, load_case

HASH = "0" * 64


def entry(**changes: Any) -> dict[str, Any]:
    file = {"path": "a.bin", "sha256": HASH, "bytes": 1}
    return {"name": "toy", "title": "Toy", "licence": "MIT", "files": [file], **changes}


@pytest.mark.parametrize("path", ["/etc/passwd", "../a", "a/../../b", "a//b", "", ".", "a\\b", "./a"])
def test_a_file_outside_its_directory_cannot_be_declared(path: str) -> None:
    with pytest.raises(SpecError, match="normal relative path"):
        dataset_specs([entry(files=[{"path": path, "sha256": HASH, "bytes": 1}])], "case.yaml")


@pytest.mark.parametrize("base", ["http://example.org/a", "file:///etc", "ftp://example.org", "https:///a"])
def test_an_address_has_to_be_https(base: str) -> None:
    with pytest.raises(SpecError, match="not an https address"):
        dataset_specs([entry(sources=[{"kind": "url", "base": base}])], "case.yaml")


@pytest.mark.parametrize("package", ["--index-url=x", "a b", "-r", "@evil", ""])
def test_a_package_name_cannot_be_an_option(package: str) -> None:
    source = {"kind": "npm", "package": package, "version": "1.0", "sha256": HASH, "root": "package", "bytes": 1}
    with pytest.raises(SpecError, match=r"data\.0\.sources\.0\.package"):
        dataset_specs([entry(sources=[source])], "case.yaml")


def test_all_problems_of_all_entries_are_reported_at_once() -> None:
    twice = [{"path": "a.bin", "sha256": HASH, "bytes": 1}] * 2
    with pytest.raises(SpecError) as caught:
        dataset_specs([entry(licens="MIT"), entry(files=twice), entry(files=[])], "case.yaml")
    message = str(caught.value)
    assert "case.yaml: data.0.licens: unknown key (did you mean 'licence'?)" in message
    assert "data.1: duplicate paths: a.bin" in message
    assert "data.2: give either files" in message


def test_every_case_of_this_tree_declares_readable_data() -> None:
    declared = {name: dataset_specs(load_case(name).data, name) for name in folders("cases")}
    assert [spec.name for spec in declared["minilm_finetune"]] == ["shakespeare", "minilm"]
    assert [spec.name for spec in declared["resnet_mini"]] == ["fashion_mnist"]
    assert declared["llama_mini"][0] == declared["minilm_finetune"][0]


def test_a_checkpoint_is_short_for_a_layout_and_where_to_get_it() -> None:
    own = {"name": "base", "title": "Weights", "licence": "MIT"}
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    (short,) = dataset_specs([{**own, "checkpoint": {"of": "google/t5", "files": files}}], "case.yaml")
    tree = [{"path": "hf", "suffixes": [".safetensors", ".json"], "by_class": False}]
    how = "Put config.json and model.safetensors and tokenizer.json of https://huggingface.co/google/t5 into hf/."
    assert [short] == list(dataset_specs([{**own, "how_to_get": how, "tree": tree}], "case.yaml"))
    with pytest.raises(SpecError, match=r"case\.yaml: data\.0.*checkpoint.*'t5-small' is not a repository"):
        dataset_specs([{**own, "checkpoint": {"of": "t5-small"}}], "case.yaml")
