"""TFRecord: what TensorFlow wrote is read, what is written is read again, and damage is named."""

from __future__ import annotations

import base64
import io
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from accelmark.datasets.shards import features, integers, opened, records, write_records
from accelmark.spec.errors import DataError
from tests.frameworks.environments import framework_python

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
