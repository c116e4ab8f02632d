"""GLM and CPM: their published files are read, and scores are those of their definitions."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from transformers import GPT2Config
from typer.testing import CliRunner

from accelmark.cases.cpm.pytorch import Cpm
from accelmark.cases.glm.pytorch import Choices, Glm
from accelmark.cli.main import app
from accelmark.datasets.prepare import texts
from accelmark.frameworks.pytorch.model.pretrained import load_megatron_gpt2
from accelmark.spec.errors import DataError
from accelmark.tasks.metrics import IGNORED
from tests.cases import tiny_data
from tests.cases.test_definitions import SMALL, case_of

CONFIG = GPT2Config(
    vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=13, bos_token_id=None, eos_token_id=None
)  # fmt: skip
BLOCKS = {"transformer.block_position_embeddings.weight": "blocks.weight"}


def glm(seed: int) -> Glm:
    torch.manual_seed(seed)
    return Glm(CONFIG).eval()


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
    published = texts.PREPARATIONS["cpm_dialogues"]
    archives = [archive._replace(md5=None) for archive in published.archives]
    monkeypatch.setitem(texts.PREPARATIONS, "cpm_dialogues", replace(published, archives=archives))
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
