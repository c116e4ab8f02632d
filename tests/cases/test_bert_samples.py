"""MLPerf's samples of BERT, as FlagPerf's users have them: prepared from HDF5 and TFRecord, and trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner

from accelmark.cases.bert.pytorch import MaskedLm
from accelmark.cli.main import app
from accelmark.datasets.shards import write_records
from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.log.events import Event
from accelmark.tasks.language.data import MaskedSamples
from accelmark.tasks.metrics import IGNORED
from tests.cases.job_of import job_of, run, value_of
from tests.cases.test_standard import BERT
from tests.datasets.test_pack import WRITTEN_BY_TENSORFLOW

h5py = pytest.importorskip("h5py")
LENGTH, PREDICTIONS, WORDS = 64, 12, 1100
CONFIG = BertConfig(
    vocab_size=WORDS, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=1,
    max_position_embeddings=LENGTH,
)  # fmt: skip
Columns = Mapping[str, NDArray[Any]]


def samples(count: int, seed: int = 0) -> Columns:
    """Return pairs of texts in the layout of ``create_pretraining_data.py``, padded to LENGTH."""
    random = np.random.default_rng(seed)
    ids, mask, segments = (np.zeros((count, LENGTH), np.int32) for _ in range(3))
    positions, labels = (np.zeros((count, PREDICTIONS), np.int32) for _ in range(2))
    for row in range(count):
        size, masked = random.integers(20, LENGTH + 1), random.integers(3, PREDICTIONS + 1)
        ids[row, :size], mask[row, :size] = random.integers(1000, 1004, size), 1
        segments[row, size // 2 : size] = 1
        positions[row, :masked] = np.sort(random.choice(np.arange(1, size), masked, replace=False))
        labels[row, :masked] = random.integers(1000, 1004, masked)
        ids[row, positions[row, :masked]] = 103
    return {
        "input_ids": ids, "input_mask": mask, "segment_ids": segments, "masked_lm_positions": positions,
        "masked_lm_ids": labels, "next_sentence_labels": random.integers(0, 2, (count, 1)),
    }  # fmt: skip


def write_fixed(path: Path, columns: Columns) -> None:
    """Write rows of equal lengths, as for ``2048_shards_uncompressed``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, rows in columns.items():
            file.create_dataset(name, data=rows, dtype="i4", compression="gzip")


def write_variable(path: Path, columns: Columns) -> None:
    """Write rows without their padding, as for ``hdf5_4320_shards_varlength``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes, masked = columns["input_mask"].sum(1), (columns["masked_lm_positions"] > 0).sum(1)
    with h5py.File(path, "w") as file:
        for name, lengths in (
            ("input_ids", sizes), ("segment_ids", sizes), ("masked_lm_positions", masked), ("masked_lm_ids", masked),
        ):  # fmt: skip
            rows = file.create_dataset(name, (len(sizes),), dtype=h5py.vlen_dtype(np.dtype("i2")))
            for row, length in enumerate(lengths):
                rows[row] = columns[name][row, :length]


def mlperf_checkpoint(path: Path) -> BertForMaskedLM:
    """Write a checkpoint as ``convert_tf_checkpoint.py`` does, with a padded vocabulary, and return its model."""
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**{**CONFIG.to_dict(), "vocab_size": 30522, "max_position_embeddings": 512}))
    state = {}
    for name, value in model.state_dict().items():
        padded = name.endswith("word_embeddings.weight") or name == "cls.predictions.bias"
        state[name.replace("intermediate.dense.", "intermediate.dense_act.")] = (
            torch.cat((value, torch.zeros(6, *value.shape[1:]))) if padded else value
        )
    del state["cls.predictions.decoder.bias"]
    state["bert.pooler.dense_act.weight"] = state["cls.seq_relationship.weight"] = torch.zeros(2, 64)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": state}, path)
    return model


def prepare(source: Path, to: Path) -> str:
    words = ["data", "prepare", "bert_tokens", "--from", str(source), "--to", str(to)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("write", [write_fixed, write_variable])
def test_rows_of_equal_and_of_variable_length_are_the_same_samples(
    tmp_path: Path, write: Callable[[Path, Columns], None]
) -> None:
    columns = samples(12)
    for number in (0, 1, 2):
        rows = slice(4 * number, 4 * number + 4)
        write(tmp_path / f"part_0000{number}_of_00003.hdf5", {name: array[rows] for name, array in columns.items()})
    found = MaskedSamples(tmp_path, LENGTH, PREDICTIONS, WORDS)
    assert len(found) == 12
    for row in range(12):
        sample = found.read(row, np.random.default_rng(0))
        for name, column in (
            ("tokens", "input_ids"),
            ("segments", "segment_ids"),
            ("positions", "masked_lm_positions"),
        ):
            assert sample[name].tolist() == columns[column][row].tolist()
        assert sample["num_tokens"] == columns["input_mask"][row].sum()
        labels = columns["masked_lm_ids"][row]
        assert sample["labels"].tolist() == np.where(labels == 0, IGNORED, labels).tolist()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((32, PREDICTIONS, WORDS), "sample 0 has 64 tokens up to .*; expected at most 32 below 1100, 12 masked"),
        ((LENGTH, 2, WORDS), "expected at most 64 below 1100, 2 masked"),
        ((LENGTH, PREDICTIONS, 1000), "expected at most 64 below 1000, 12 masked"),
    ],
)
def test_samples_of_other_sizes_are_refused(tmp_path: Path, sizes: tuple[int, int, int], message: str) -> None:
    write_fixed(tmp_path / "part.hdf5", samples(2))
    with pytest.raises(DataError, match=message):
        MaskedSamples(tmp_path, *sizes).read(0, np.random.default_rng(0))


def test_a_file_with_other_or_without_data_sets_is_named(tmp_path: Path) -> None:
    write_fixed(tmp_path / "part.hdf5", {"input_ids": np.zeros((2, 4), np.int32)})
    with pytest.raises(DataError, match=r"part.hdf5: expected equally many rows of input_ids, .*; found"):
        MaskedSamples(tmp_path, LENGTH, PREDICTIONS, WORDS)
    (tmp_path / "part.hdf5").write_bytes(b"\x89HDF\r\n\x1a\n")
    with pytest.raises(DataError, match=r"part.hdf5: is not a complete HDF5 file"):
        MaskedSamples(tmp_path, LENGTH, PREDICTIONS, WORDS)


def test_flagperfs_directory_is_prepared_and_trained_on(tmp_path: Path) -> None:
    source, to = tmp_path / "flagperf", tmp_path / "to"
    write_fixed(source / "2048_shards_uncompressed" / "part_00000_of_02048.hdf5", samples(16))
    write_fixed(source / "2048_shards_uncompressed" / "part_00001_of_02048.hdf5", samples(16, 1))
    write_fixed(source / "eval_set_uncompressed" / "part_eval_10k.hdf5", samples(7, 2))
    model = mlperf_checkpoint(source / "model.ckpt-28252.pt")
    output = prepare(source, to)
    assert "32 samples in train, 7 samples in val; SHA-256 " in output
    linked = to / "train" / "part_00000_of_02048.hdf5"
    assert linked.stat().st_ino == (source / "2048_shards_uncompressed" / linked.name).stat().st_ino
    loaded = BertForMaskedLM.from_pretrained(to / "initial", config=model.config).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())

    sizes = {"vocab_size": 30522, "hidden_size": 64, "num_heads": 1, "max_positions": 512}
    over = {**BERT, **{f"model.{name}": value for name, value in sizes.items()}, "loader.num_workers": 2}
    events = run(job_of("bert", tmp_path / "run", {"bert_tokens": to}, over))
    finished = value_of(events, Event.FINISHED)
    assert (finished["state"], finished["global_steps"]) == ("completed", 6)
    assert 0 <= finished["final_metrics"]["mlm_accuracy"] <= 1


def test_tfrecord_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    (tmp_path / "tfrecord").mkdir()
    for name in ("part-00000-of-00500", "part-00001-of-00500", "eval_10k"):
        (tmp_path / "tfrecord" / name).write_bytes(WRITTEN_BY_TENSORFLOW)
    mlperf_checkpoint(tmp_path / "phase1" / "model.ckpt-28252.pt")
    assert "4 samples in train, 2 samples in val" in prepare(tmp_path, tmp_path / "to")
    sample = MaskedSamples(tmp_path / "to" / "train", 8, 3, 30522).read(3, np.random.default_rng(0))
    assert sample["tokens"].tolist() == [101, 2001, 103, 30521, 102, 0, 0, 0]
    assert (int(sample["num_tokens"]), sample["labels"].tolist()) == (5, [2054, 1, IGNORED])

    write_records(tmp_path / "tfrecord" / "eval_10k", [{"input_ids": 3}])
    with pytest.raises(DataError, match=r"eval_10k: record 0: expected integers input_ids, input_mask"):
        prepare(tmp_path, tmp_path / "again")


def test_a_directory_without_a_part_is_refused(tmp_path: Path) -> None:
    write_fixed(tmp_path / "2048_shards_uncompressed" / "part_00000_of_02048.hdf5", samples(2))
    with pytest.raises(RequestError, match=r"val: none of eval_set_uncompressed, hdf5/eval_varlength, .* is in the"):
        prepare(tmp_path, tmp_path / "to")


def test_padding_changes_no_prediction() -> None:
    torch.manual_seed(0)
    model: Any = MaskedLm(BertForMaskedLM(CONFIG)).eval()
    tokens, positions = torch.randint(1, WORDS, (2, LENGTH)), torch.tensor([[3, 7], [2, 5]])
    segments, num_tokens = torch.zeros_like(tokens), torch.tensor([20, 30])
    with torch.no_grad():
        expected = [
            model(tokens[row : row + 1, :size], positions[row : row + 1])
            for row, size in enumerate(num_tokens.tolist())
        ]
        torch.testing.assert_close(model(tokens, positions, segments, num_tokens), torch.cat(expected))
