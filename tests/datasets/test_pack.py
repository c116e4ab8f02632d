"""Images packed into shards, and TFRecord as TensorFlow writes it: written, read and verified; damage is named."""

from __future__ import annotations

import base64
import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.datasets.catalogue import known_of
from accelmark.datasets.prepare import preparation
from accelmark.datasets.prepare.preparation import pack
from accelmark.datasets.shards import features, integers, opened, records, tar_members, write_records
from accelmark.datasets.verify import fingerprint, verify
from accelmark.spec.errors import DataError, RequestError
from accelmark.tasks.images.data import ArrayImages
from tests.cases import tiny_data
from tests.frameworks.environments import framework_python

IMAGENET = known_of("imagenet").spec


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return tiny_data.imagenet(tmp_path)["imagenet"]


@pytest.fixture
def shards(tmp_path: Path, folders: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(preparation, "IMAGES_PER_SHARD", 5)
    assert pack(IMAGENET, folders, tmp_path / "shards", allow_subset=True) == 22
    return tmp_path / "shards"


def images(directory: Path, split: str = "train", num_classes: int = 2) -> ArrayImages:
    return ArrayImages(directory, split, num_classes=num_classes, size=8, train=False)


def pixels(found: ArrayImages) -> dict[bytes, int]:
    samples = [found.read(index, np.random.default_rng(0)) for index in range(len(found))]
    return {sample["image"].tobytes(): int(sample["label"]) for sample in samples}


def test_shards_have_the_same_images_and_classes_as_the_folders(folders: Path, shards: Path) -> None:
    assert [path.name for path in sorted((shards / "train").iterdir())] == [f"{number:06}.tar" for number in range(4)]
    for split, count in (("train", 16), ("val", 6)):
        expected = pixels(images(folders, split))
        assert len(expected) == count
        assert pixels(images(shards, split)) == expected


def test_shards_are_in_webdatasets_format_and_mixed(shards: Path) -> None:
    with tarfile.open(shards / "train" / "000000.tar") as archive:
        names = archive.getnames()
        content = [archive.extractfile(name) for name in names]
        labels = [file.read() for name, file in zip(names, content, strict=True) if file and name.endswith(".cls")]
    assert [Path(name).suffix for name in names] == [".jpg", ".cls"] * 5
    assert all(Path(first).stem == Path(second).stem for first, second in zip(names[::2], names[1::2], strict=True))
    assert set(labels) == {b"0", b"1"}


def test_tfrecord_has_the_same_images_and_classes_as_the_folders(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    assert pack(IMAGENET, folders, tmp_path / "to", shard_format="tfrecord", allow_subset=True) == 22
    assert [path.name for path in (tmp_path / "to" / "train").iterdir()] == ["train-00000-of-00001"]
    assert verify(IMAGENET, tmp_path / "to", allow_subset=True) == []
    for split in ("train", "val"):
        assert pixels(images(tmp_path / "to", split)) == pixels(images(folders, split))


def test_a_record_without_a_class_is_named(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    (tmp_path / "val").mkdir()
    write_records(tmp_path / "val" / "validation-00000-of-00128", [{"image/encoded": b"x"}])
    with pytest.raises(
        DataError, match=r"record 0 is no tf\.train\.Example with image/encoded and one image/class/label"
    ):
        images(tmp_path, "val")
    write_records(tmp_path / "val" / "validation-00000-of-00128", [{"image/encoded": b"x", "image/class/label": 7}])
    with pytest.raises(DataError, match=r"expected images of 2 classes \(0 to 1\) in its shards, found 1 \(6 to 6\)"):
        images(tmp_path, "val")


def test_shards_are_verified_by_their_members(shards: Path) -> None:
    assert verify(IMAGENET, shards, allow_subset=True) == []
    (whole, _) = map(str, verify(IMAGENET, shards))
    assert "or shards train/*.tar of them; found 16 files" in whole
    before = fingerprint(IMAGENET, shards)
    (shards / "train" / "000003.tar").unlink()
    assert fingerprint(IMAGENET, shards) != before


def write_archive(path: Path, tar_format: int, names: Sequence[str], mtime: float = 0) -> None:
    with tarfile.open(path, "w", format=tar_format) as archive:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = 300 * number, mtime
            archive.addfile(member, io.BytesIO(b"x" * member.size))


def test_archives_of_short_names_are_read_without_tarfile_which_takes_minutes_of_millions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a/0.jpg", "1.cls", f"{'b' * 90}/{'c' * 60}.jpg", "é.txt"]
    for tar_format, count, mtime in ((tarfile.USTAR_FORMAT, 4, 0), (tarfile.PAX_FORMAT, 2, 1.5)):
        path = tmp_path / f"{tar_format}.tar"
        write_archive(path, tar_format, names[:count], mtime)
        with tarfile.open(path) as archive:
            expected = [(each.name, each.offset_data, each.size) for each in archive if each.isreg()]
        with monkeypatch.context() as patch:
            patch.setattr(tarfile, "open", None)
            assert tar_members(path) == expected
        assert [name for name, _, _ in expected] == names[:count]


def test_other_archives_are_read_by_tarfile_which_names_damage(tmp_path: Path) -> None:
    long = "d" * 300
    for number, tar_format in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        write_archive(tmp_path / f"{number}.tar", tar_format, ["0.jpg", long, "é.txt"])
        assert [member.name for member in tar_members(tmp_path / f"{number}.tar")] == ["0.jpg", long, "é.txt"]
    damaged = tmp_path / "damaged.tar"
    write_archive(damaged, tarfile.USTAR_FORMAT, ["0.jpg", "1.jpg", "2.jpg"])
    damaged.write_bytes(damaged.read_bytes()[: 5 * 512 + 100])
    with pytest.raises(DataError, match=r"damaged\.tar: is not a readable tar archive: unexpected end of data"):
        tar_members(damaged)


def test_an_interrupted_call_keeps_complete_shards(folders: Path, shards: Path) -> None:
    first, last = shards / "train" / "000000.tar", shards / "train" / "000003.tar"
    kept, written = first.stat().st_ino, last.read_bytes()
    last.unlink()
    pack(IMAGENET, folders, shards, allow_subset=True)
    assert first.stat().st_ino == kept
    assert last.read_bytes() == written
    assert not list(shards.rglob("*.part"))


def test_what_cannot_be_packed_is_refused(tmp_path: Path, folders: Path) -> None:
    with pytest.raises(RequestError, match="coco: cases do not read it from shards"):
        pack(known_of("coco").spec, folders, tmp_path / "to")
    whole = "expected train/<class>/*(.jpeg, .jpg, .png) (1,000 classes, 1,281,167 files); found"
    for name, error, message in (("imagenet", DataError, whole), ("imagnet", RequestError, "no case uses a data set")):
        words = ["data", "pack", name, "--from", str(folders), "--to", str(tmp_path / "to")]
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, error)
        assert message in str(result.exception)
    assert not (tmp_path / "to").exists()


WRITTEN_BY_TENSORFLOW = base64.b64decode(
    "2wAAAAAAAAAYaTpuCtgBChoKCmlucHV0X21hc2sSDBoKCggBAQEBAQAAAAocCglpbnB1dF9pZHMSDxoNCgtl0A9nue4BZgAAAAolChFtYXNrZW"
    "RfbG1fd2VpZ2h0cxIQEg4KDAAAgD8AAIA/AAAAAAoeChNtYXNrZWRfbG1fcG9zaXRpb25zEgcaBQoDAgMAChsKC3NlZ21lbnRfaWRzEgwaCgoI"
    "AAAAAQEAAAAKGQoNbWFza2VkX2xtX2lkcxIIGgYKBIYQAQAKHQoUbmV4dF9zZW50ZW5jZV9sYWJlbHMSBRoDCgEAnJQ9S9sAAAAAAAAAGGk6bg"
    "rYAQoaCgppbnB1dF9tYXNrEgwaCgoIAQEBAQEAAAAKHAoJaW5wdXRfaWRzEg8aDQoLZdEPZ7nuAWYAAAAKJQoRbWFza2VkX2xtX3dlaWdodHMS"
    "EBIOCgwAAIA/AACAPwAAAAAKHgoTbWFza2VkX2xtX3Bvc2l0aW9ucxIHGgUKAwIDAAobCgtzZWdtZW50X2lkcxIMGgoKCAAAAAEBAAAAChkKDW"
    "1hc2tlZF9sbV9pZHMSCBoGCgSGEAEACh0KFG5leHRfc2VudGVuY2VfbGFiZWxzEgUaAwoBAaLjQwM="
)
"""Two samples of BERT by ``tf.io.TFRecordWriter`` of TensorFlow 2.20, in the layout of MLPerf's scripts."""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "part-00000-of-00500").write_bytes(WRITTEN_BY_TENSORFLOW)
    return tmp_path / "part-00000-of-00500"


def test_what_tensorflow_wrote_is_read(written: Path) -> None:
    pytest.importorskip("google_crc32c")
    with opened(written) as content:
        places = list(records(written, content, verify=True))
        samples = [features(content, place) for place in places]
        found = [{name: integers(content, sample[name]).tolist() for name in sample} for sample in samples]
    assert [sample["input_ids"] for sample in found] == [[101, 2000 + n, 103, 30521, 102, 0, 0, 0] for n in (0, 1)]
    assert found[0]["masked_lm_ids"] == [2054, 1, 0]
    assert [sample["next_sentence_labels"] for sample in found] == [[0], [1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:300], "no complete record of TFRecord at byte 235"),
        (lambda content: content[:40] + b"x" + content[41:], "record at byte 0 does not match its checksum"),
        (lambda content: b"\xff" * 9 + content, "no complete record of TFRecord at byte 0"),
        (lambda content: b"", "is empty"),
    ],
)
def test_damage_is_named(written: Path, change: Any, message: str) -> None:
    pytest.importorskip("google_crc32c")
    written.write_bytes(change(WRITTEN_BY_TENSORFLOW))
    with pytest.raises(DataError, match=message), opened(written) as content:
        list(records(written, content, verify=True))


@pytest.mark.parametrize("message", [b"\x0a\x05ab", b"\x08\x01", b"\xff" * 30, b""])
def test_another_message_is_no_example(message: bytes) -> None:
    with pytest.raises(ValueError, match=r"Example|unpack"):
        features(message, (0, len(message)))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    content = np.random.default_rng(0).bytes(300)
    write_records(tmp_path / "a", [{"pixels": content, "label": label} for label in (0, 127, 128, 2**40)])
    with opened(tmp_path / "a") as file:
        samples = [features(file, place) for place in records(tmp_path / "a", file, verify=True)]
        assert [file[slice(*sample["pixels"])] for sample in samples] == [content] * 4
        assert [integers(file, sample["label"]).tolist() for sample in samples] == [[0], [127], [128], [2**40]]


READ = """
import sys, tensorflow as tf
for record in tf.data.TFRecordDataset(sys.argv[1]):
    found = tf.train.Example.FromString(record.numpy()).features.feature
    image = tf.io.decode_jpeg(found["image/encoded"].bytes_list.value[0])
    print(*image.shape, found["image/class/label"].int64_list.value[0])
"""


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_tensorflow_reads_what_is_written(tmp_path: Path) -> None:
    with io.BytesIO() as file:
        Image.new("RGB", (40, 30)).save(file, "JPEG")
        example: dict[str, bytes | int] = {"image/encoded": file.getvalue(), "image/class/label": 1000}
    write_records(tmp_path / "a", [example, example])
    command = [str(framework_python("tensorflow")), "-c", READ, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == ["30 40 3 1000"] * 2, done.stderr
