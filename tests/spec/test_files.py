from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.spec.errors import SpecError
from accelmark.spec.model import parse, read_yaml
from accelmark.spec.plugins.catalog import case_hash, folders, load_case, load_vendor, tree_hash
from accelmark.spec.runfile import RunSpec


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: 1\na: 2\n", "line 2, column 1: is not valid YAML: duplicate key 'a'"),
        ("a: [1\n", "line 2, column 1"),
        ("- 1\n", "must be a mapping, found list"),
        ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
    ],
)
def test_a_bad_file_is_named_with_its_place(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(content)
    with pytest.raises(SpecError) as caught:
        read_yaml(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_unknown_keys_of_a_run_file_come_all_at_once_with_suggestions() -> None:
    written = {"nam": "x", "cases": [{"key": "a", "setings": {}}], "cluster": {"hosts": [{"adress": "h"}]}}
    with pytest.raises(SpecError) as caught:
        parse(RunSpec, written, "run.yaml")
    text = str(caught.value)
    assert "run.yaml: nam: unknown key (did you mean 'name'?)" in text
    assert "did you mean 'settings'?" in text
    assert "did you mean 'address'?" in text


def test_two_vendors_with_one_name_are_both_named(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    (other / "vendors" / "acme").mkdir(parents=True)
    (other / "vendors" / "acme" / "vendor.yaml").write_text("name: acme\n")
    monkeypatch.setenv("ACCELMARK_PLUGINS", f"{plugins}:{other}")
    with pytest.raises(SpecError) as caught:
        folders("vendors")
    assert str(plugins) in str(caught.value)
    assert str(other) in str(caught.value)


def test_a_folder_and_its_file_have_the_same_name(plugins: Path) -> None:
    path = plugins / "cases" / "toy"
    path.rename(path.with_name("tory"))
    with pytest.raises(SpecError, match="is 'toy', but the folder is 'tory'"):
        load_case("tory")


def test_a_chip_is_matched_by_its_whole_name_only(plugins: Path) -> None:
    vendor = load_vendor("acme")
    card = vendor.chip_of("ACME X1 card", 32.0)
    assert card is not None
    assert card.variant == "Card"
    assert vendor.chip_of("Acme X1", 80.0) is None
    assert vendor.chip_of("Acme X1", None) is None
    assert vendor.chip_of("Acme X2", 32.0) is None


def test_the_hash_of_a_folder_sees_every_byte_and_name_but_no_caches_and_of_a_vendors_also_readmes_and_links(
    plugins: Path,
) -> None:
    folder = plugins / "cases" / "toy"
    before = tree_hash(folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    (folder / "README.md").write_text("| accuracy | 0.97 |\n")  # tables of results are written into it anew
    assert tree_hash(folder) == before
    linked = plugins / "linked"
    linked.mkdir()
    (folder / "more").symlink_to(linked)
    (linked / "code.py").write_text("1")
    assert tree_hash(folder) == before
    whole = tree_hash(folder, whole=True)
    (linked / "code.py").write_text("2")
    assert len({before, whole, tree_hash(folder, whole=True)}) == 3
    (folder / "pytorch.py").write_text("#")
    changed = tree_hash(folder)
    (folder / "pytorch.py").rename(folder / "jax.py")
    assert len({before, changed, tree_hash(folder)}) == 3


def test_the_hash_of_training_is_independent_of_inference_and_serving_alone(plugins: Path) -> None:
    folder = plugins / "cases" / "toy"
    described = folder / "case.yaml"
    text = described.read_text()
    train, infer = case_hash(folder, "train"), case_hash(folder, "infer")
    described.write_text(f"{text}infer: {{metric: accuracy}}\nserve: {{}}\n")
    for name in ("infer_pytorch.py", "serve.py"):
        (folder / name).write_text("#")
    (folder / "infer").mkdir()
    (folder / "infer" / "weights.safetensors").write_bytes(b"x")
    assert case_hash(folder, "train") == train
    assert case_hash(folder, "infer") != infer
    described.write_text(text.replace("version: 1", "version: 2"))
    assert case_hash(folder, "train") != train
    described.write_text("infer: &settings {lr: 1.0}\ntrain: *settings\n")
    aliased = case_hash(folder, "train")
    described.write_text("infer: &settings {lr: 2.0}\ntrain: *settings\n")
    assert case_hash(folder, "train") != aliased
    for damaged in (b"a: [", b"- 1", b"\xff"):
        described.write_bytes(damaged)
        assert case_hash(folder, "train") != train


def test_every_shipped_case_and_vendor_is_well_formed() -> None:
    for name in folders("cases"):
        assert load_case(name).title
    for name in folders("vendors"):
        assert load_vendor(name).title
