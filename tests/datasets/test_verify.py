from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from accelmark.datasets.spec import DatasetSpec, dataset_specs
from accelmark.datasets.verify import DataReads, fingerprint, sample_differences, verify
from accelmark.spec.errors import SpecError
from accelmark.spec.model import parse
from tests.datasets.conftest import CONTENT, Reports, collect_in, dataset, sha256, write


def tree(*parts: dict[str, Any]) -> DatasetSpec:
    values = {"name": "images", "title": "Images", "licence": "MIT", "tree": parts}
    return parse(DatasetSpec, values, "test")


def images(root: Path, classes: int = 3, each: int = 2) -> Path:
    names = [f"train/n{number:03}/{image}.JPEG" for number in range(classes) for image in range(each)]
    return write(root, dict.fromkeys(names, b"jpeg"))


def test_the_right_files_have_no_problems_and_the_declared_fingerprint(tmp_path: Path, reports: Reports) -> None:
    spec = dataset()
    assert verify(spec, write(tmp_path), progress=collect_in(reports)) == []
    assert fingerprint(spec, tmp_path) == spec.fingerprint
    total = sum(map(len, CONTENT.values()))
    assert reports[-1] == ("checking toy", total, total)


def test_a_corrupt_file_is_named_with_both_hashes(tmp_path: Path) -> None:
    write(tmp_path, {**CONTENT, "b.txt": b"to be or not to bee"})
    (problem,) = verify(dataset(), tmp_path)
    assert problem.where == str(tmp_path / "b.txt")
    assert sha256(b"to be or not to bee") in problem.what
    assert sha256(CONTENT["b.txt"]) in problem.what
    assert fingerprint(dataset(), tmp_path) != dataset().fingerprint


@pytest.mark.parametrize(
    ("content", "lacks"),
    [
        ({"b.txt": CONTENT["b.txt"], "other/c.txt": b""}, "files of toy: {}; found b.txt, other/; missing train/a.bin"),
        ({"c.txt": b""}, "all files of toy: {}; found c.txt"),
    ],
)
def test_a_wrong_layout_names_what_was_expected_and_found(
    tmp_path: Path, content: dict[str, bytes], lacks: str
) -> None:
    (problem,) = verify(dataset(how_to_get="ask Bernardo"), write(tmp_path, content))
    expected = lacks.format("expected train/a.bin, b.txt")
    assert str(problem) == f"{tmp_path}: lacks {expected} (ask Bernardo)"


def test_part_of_a_tree_passes_only_where_a_subset_is_allowed(tmp_path: Path) -> None:
    spec = tree({"path": "train", "classes": 4, "files": 8})
    assert verify(tree({"path": "train", "classes": 3, "files": 6}), images(tmp_path)) == []
    (found,) = verify(spec, tmp_path)
    assert found.what.rpartition("; ")[2] == "found 3 classes, 6 files"
    assert verify(spec, tmp_path, allow_subset=True) == []
    too_many = tree({"path": "train", "classes": 2, "files": 5})
    assert len(verify(too_many, tmp_path, allow_subset=True)) == 1
    (found,) = verify(spec, images(tmp_path / "small", classes=1, each=1))
    assert found.what.rpartition("; ")[2] == "found 1 class, 1 file"


def test_a_tree_of_plain_files_is_recognised_by_their_ending(tmp_path: Path) -> None:
    spec = tree({"path": "train", "by_class": False, "suffixes": [".bin"]})
    assert verify(spec, write(tmp_path, {"train/0.bin": b"x"})) == []
    assert verify(tree({"path": "train", "by_class": False, "suffixes": [".idx"]}), tmp_path) != []


def test_a_sample_of_the_files_that_were_read_finds_contents_that_another_copy_does_not_have(tmp_path: Path) -> None:
    own = images(tmp_path / "own")
    reads = DataReads({"images": own, "others": tmp_path / "others"})
    for name in ("train/n000/0.JPEG", "train/n000/1.JPEG"):
        (own / name).read_bytes()
    with multiprocessing.get_context("fork").Pool(1) as workers:  # as those of a data loader
        workers.map(Path.read_bytes, [own / "train/n001/0.JPEG"])
    recorded = reads.sample("a secret")
    places = ["train/n000/0.JPEG@0", "train/n000/1.JPEG@0", "train/n001/0.JPEG@0"]
    assert (sorted(recorded["images"]), recorded["others"]) == (places, {}), "not of the files that nobody read"
    other = images(tmp_path / "other")
    assert list(sample_differences(recorded["images"], other)) == []
    (other / "train/n000/0.JPEG").write_bytes(b"jpeG")
    (other / "train/n001/0.JPEG").unlink()
    assert sorted(sample_differences(recorded["images"], other)) == ["train/n000/0.JPEG@0", "train/n001/0.JPEG@0"]


def test_the_secret_chooses_the_files_and_places_of_a_sample(tmp_path: Path) -> None:
    large = write(tmp_path, {f"{number}.bin": bytes(3 << 20) for number in range(70)})
    reads = DataReads({"large": large})
    for path in large.iterdir():
        path.open("rb").close()
    samples = [sorted(reads.sample(secret)["large"]) for secret in ("one", "one", "two")]
    assert samples[0] == samples[1] != samples[2]
    assert len(samples[0]) == 64
    assert {place.partition("@")[2] for place in samples[0]} == {"0", str(1 << 20), str(2 << 20)}


def test_the_fingerprint_of_a_tree_follows_names_and_sizes(tmp_path: Path) -> None:
    spec = tree({"path": "train"})
    first = fingerprint(spec, images(tmp_path))
    assert fingerprint(spec, tmp_path) == first
    (tmp_path / "train/n000/0.JPEG").write_bytes(b"longer")
    assert fingerprint(spec, tmp_path) != first


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


def test_a_checkpoint_is_short_for_a_layout_and_where_to_get_it() -> None:
    own = {"name": "base", "title": "Weights", "licence": "MIT"}
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    (short,) = dataset_specs([{**own, "checkpoint": {"of": "google/t5", "files": files}}], "case.yaml")
    tree = [{"path": "hf", "suffixes": [".safetensors", ".json"], "by_class": False}]
    how = "Put config.json and model.safetensors and tokenizer.json of https://huggingface.co/google/t5 into hf/."
    assert [short] == list(dataset_specs([{**own, "how_to_get": how, "tree": tree}], "case.yaml"))
    with pytest.raises(SpecError, match=r"case\.yaml: data\.0.*checkpoint.*'t5-small' is not a repository"):
        dataset_specs([{**own, "checkpoint": {"of": "t5-small"}}], "case.yaml")
