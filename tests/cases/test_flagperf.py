"""Files of FlagPerf's users: MLPerf's samples of BERT, which are prepared and trained on, and those of GLM and CPM."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import BertConfig, BertForMaskedLM, GPT2Config
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.datasets.prepare.published import PREPARATIONS
from accelmark.datasets.shards import write_records
from accelmark.frameworks.pytorch.model.hugging_face import load_megatron_gpt2
from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.log.events import Event
from accelmark.tasks.language.data import MaskedSamples
from accelmark.tasks.language.pytorch_pretrained import Choices, Cpm, Glm, MaskedLm
from accelmark.tasks.metrics import IGNORED
from tests.cases import tiny_data
from tests.cases.job_of import job_of, run, value_of
from tests.cases.test_definitions import SMALL, case_of
from tests.cases.test_learning import BERT
from tests.datasets.test_pack import WRITTEN_BY_TENSORFLOW

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


GPT2 = GPT2Config(
    vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=13, bos_token_id=None, eos_token_id=None
)  # fmt: skip
BLOCKS = {"transformer.block_position_embeddings.weight": "blocks.weight"}


def glm(seed: int) -> Glm:
    torch.manual_seed(seed)
    return Glm(GPT2).eval()


def test_weights_of_the_first_megatron_become_those_of_transformers(tmp_path: Path) -> None:
    source, target = glm(0), glm(1)
    state = tiny_data.megatron_gpt2(source.net, block_positions=source.blocks)
    assert state["transformer.layers.0.attention.query_key_value.weight"].shape == (48, 16)
    torch.save({"module": state, "args": None, "csr_tensor_module_names": set()}, tmp_path / "a.pt")
    load_megatron_gpt2(target, tmp_path / "a.pt", BLOCKS)
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())
    del state["word_embeddings.weight"]
    torch.save({"module": state}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt: has other weights: "):
        load_megatron_gpt2(target, tmp_path / "a.pt", BLOCKS)
    (tmp_path / "a.pt").write_bytes(pickle.dumps(Path("x"), protocol=2))
    with pytest.raises(DataError, match=r"a\.pt: PyTorch cannot read it as weights alone"):
        load_megatron_gpt2(target, tmp_path / "a.pt", BLOCKS)


def test_glms_prefix_sees_itself_and_the_rest_what_is_before() -> None:
    model = glm(0)
    tokens = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    positions, separators = torch.arange(12).expand(1, 2, 12), torch.tensor([5])

    def score(changed: int | None, place: int) -> float:
        given = tokens.clone()
        if changed is not None:
            given[0, changed] = (given[0, changed] + 1) % 50
        with torch.no_grad():
            places, targets = torch.tensor([[place, 0]]), torch.tensor([[7, IGNORED]])
            return float(model(given, positions, separators, places, targets))

    assert score(3, 1) != score(None, 1), "a later token of the prefix"
    assert score(6, 1) == score(None, 1), "a token after the prefix"
    assert score(6, 8) != score(None, 8), "an earlier token"
    assert score(9, 8) == score(None, 8), "a later token"


def test_glms_score_is_the_sum_of_the_targets_log_probabilities() -> None:
    model = glm(0)
    tokens, positions = torch.randint(0, 50, (2, 12)), torch.arange(12).expand(2, 2, 12)
    places, targets = torch.tensor([[8, 9, 0], [7, 0, 0]]), torch.tensor([[3, 4, IGNORED], [6, IGNORED, IGNORED]])
    steps = torch.arange(12)
    sees = (steps <= steps[:, None]) | (steps < 5)
    with torch.no_grad():
        found = model(tokens, positions, torch.tensor([5, 5]), places, targets)
        embedded = model.net.wte(tokens) + model.blocks(positions[:, 1])
        hidden = model.net(inputs_embeds=embedded, attention_mask=sees[None, None]).last_hidden_state
        logs = torch.log_softmax(hidden @ model.net.wte.weight.T, -1)
    torch.testing.assert_close(found, torch.stack((logs[0, 8, 3] + logs[0, 9, 4], logs[1, 7, 6])))


def test_matrices_of_h5sparse_are_read_as_queries(tmp_path: Path) -> None:
    folder = tiny_data.record(tmp_path)["glm_record"] / "ReCoRD/glm_train_eval_hdf5_sparse"
    train = Choices(folder / "train_hdf5/train_sparse.hdf5", 24, 4, 5)
    sample = train.read(2, np.random.default_rng(0))
    assert (len(train), sample["is_choice"].tolist()) == (24, [True, True, True, False, False])
    assert sample["tokens"][:3].tolist() == [[12] * 24] * 3
    assert (sample["places"][0, :2].tolist(), sample["targets"][0].tolist()) == ([20, 21], [12, 12, IGNORED, IGNORED])
    assert sample["positions"][0].tolist() == [list(range(24)), [0] * 20 + [1] * 4]
    evaluated = Choices(folder / "eval_hdf5/eval_sparse.hdf5", 24, 4, None)
    assert evaluated.read(1, np.random.default_rng(0))["is_answer"].tolist() == [True, False, False]
    with pytest.raises(DataError, match="query 0 has 2 tokens to predict; expected 1 at most"):
        Choices(folder / "eval_hdf5/eval_sparse.hdf5", 24, 1, None).read(0, np.random.default_rng(0))
    with h5py.File(folder / "eval_hdf5/eval_sparse.hdf5", "a") as file:
        del file["answer_idx"]
    with pytest.raises(DataError, match=r"eval_sparse\.hdf5: is not complete, or lacks a matrix"):
        Choices(folder / "eval_hdf5/eval_sparse.hdf5", 24, 4, None)


def test_cpms_similarity_is_the_cosine_of_sums_of_embeddings_without_padding() -> None:
    case = case_of("cpm", SMALL["cpm"])
    torch.manual_seed(0)
    model: Any = case.build_model().eval()
    assert isinstance(model, Cpm)
    rows = torch.randint(6, 100, (3, 17))
    rows[:, 11:] = 5
    with torch.no_grad():
        sums = case.eval_sums(model, {"tokens": rows})
        table = model.net.wte.weight
        logits = model.net(input_ids=rows[:, :-1]).last_hidden_state @ table.T
        cosines = []
        for row in range(3):
            predicted, right = (table[chosen[row, :10]].sum(0) for chosen in (logits.argmax(-1), rows[:, 1:]))
            cosines.append(float(predicted @ right / predicted.norm() / right.norm()))
    metrics = case.metrics({name: float(value) for name, value in sums.items()})
    assert metrics["embedding_average"] == pytest.approx(np.mean(cosines), rel=1e-5)
    assert int(sums["count"]) == 30
    expected = torch.nn.functional.cross_entropy(logits[:, :10].flatten(0, 1), rows[:, 1:11].flatten())
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::SyntaxWarning", "ignore:pkg_resources")
def test_dialogues_become_rows_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jieba")
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [f"对话上文:今天 天气{number} 回复:很好\n" for number in range(40)] + ["很好 今天 " * 400 + "\n"]
    for name in ("train.txt", "valid.txt"):
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    (tmp_path / "corpus").write_text("".join(lines).replace(" ", "\u2582"), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus"), model_prefix=str(tmp_path / "chinese_vocab"), vocab_size=60,
        user_defined_symbols="\u2583,<sep>,<pad>,<mask>,<eod>", minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    torch.save({}, tmp_path / "cpm_model_states_medium.pt")
    words = ["data", "prepare", "cpm_dialogues", "--from", str(tmp_path), "--to", str(tmp_path / "to")]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, DataError)
    assert "train.txt: has MD5" in str(refused.exception)
    published = PREPARATIONS["cpm_dialogues"]
    archives = [archive._replace(md5=None) for archive in published.archives]
    monkeypatch.setitem(PREPARATIONS, "cpm_dialogues", replace(published, archives=archives))
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "chinese_vocab.model"))
    end, pad = tokenizer.piece_to_id("<eod>"), tokenizer.piece_to_id("<pad>")
    rows = np.load(tmp_path / "to" / "train" / "tokens.npy").reshape(-1, 201)
    assert len(rows) > 42, "the last line takes several rows"
    assert (rows[40:-1] != pad).all()
    (last,) = np.flatnonzero(rows[3] == end)
    text = tokenizer.decode(rows[3, :last].tolist()).replace(" ", "")
    assert text.replace("\u2582", " ").replace("\u2583", "\n") == lines[3]
    assert (rows[3, last + 1 :] == pad).all()
