"""Decoders of transformers with our attention and experts compute what transformers' own code computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from accelmark.frameworks.pytorch.model.hugging_face import balancing_loss
from accelmark.frameworks.pytorch.model.linear import LowRank, adapt
from accelmark.spec.errors import DataError
from accelmark.tasks.language.pytorch_decoder import CausalLm, Pretraining, dialogues, documents_of, packed_rows
from accelmark.tasks.text.pytorch import read_tokenizer
from tests.cases import tiny_data
from tests.cases.test_definitions import SMALL, case_of

FAMILY = ["llama2_7b", "gpt3_6_7b", "mixtral_8x7b", "gpt_oss_20b", "deepseek_v3"]
"""One case of each architecture."""


def family(name: str, over: dict[str, Any] | None = None) -> Pretraining:
    case = case_of(name, {**SMALL[name], **(over or {})})
    assert isinstance(case, Pretraining)
    return case


def gradients(model: CausalLm, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.autograd.backward(model(tokens, labels))
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(("name", "more"), [*((name, {}) for name in FAMILY), ("gpt_oss_20b", {"sliding_window": 7})])
def test_loss_and_gradients_are_those_of_transformers_own_attention_and_experts(
    name: str, more: dict[str, int]
) -> None:
    case = family(name)
    case.config_values = {**case.config_values, "router_aux_loss_coef": 0.0, **more}  # type: ignore[misc]
    ours = case.build_model()
    assert isinstance(ours, CausalLm)
    config = case.config()
    config._attn_implementation = config._experts_implementation = "eager"
    theirs = CausalLm(config)
    theirs.load_state_dict(ours.state_dict())
    batch = case.synthetic_batch(2)["tokens"]
    tokens, labels = batch[:, :-1], batch[:, 1:]
    assert ours(tokens, labels).item() == pytest.approx(theirs(tokens, labels).item(), rel=1e-5)
    found, expected = gradients(ours, tokens, labels), gradients(theirs, tokens, labels)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=2e-6, msg=key)


@pytest.mark.parametrize("name", ["llama3_1_8b", "mixtral_8x7b", "gpt_oss_20b", "deepseek_v3"])
def test_a_packed_document_is_predicted_as_if_it_were_alone(name: str) -> None:
    model = family(name, {"model.end_of_document": 7}).build_model().eval()
    random = torch.Generator().manual_seed(1)
    parts = [torch.randint(8, 100, (size,), generator=random) for size in (5, 20, 9)]
    ended = [torch.cat([part, torch.tensor([7])]) for part in parts]
    packed = model(torch.cat(ended)[None])[0]
    alone = torch.cat([model(part[None])[0] for part in ended])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_documents_are_numbered_and_their_positions_start_at_zero() -> None:
    documents, positions = documents_of(torch.tensor([[5, 5, 9, 5, 9, 9], [9, 5, 5, 5, 5, 5]]), 9)
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


def test_the_balancing_loss_is_the_switch_transformers() -> None:
    logits = tuple(torch.randn(30, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    expected = load_balancing_loss_func(logits, num_experts=5, top_k=2)  # type: ignore[arg-type]
    assert balancing_loss(logits, 2).item() == pytest.approx(float(expected), rel=1e-5)
    even = torch.eye(4).repeat(2, 1) * 1e-6
    assert balancing_loss([even], 1).item() == pytest.approx(1.0, rel=1e-4)


def test_training_adds_the_balancing_loss_and_evaluation_does_not() -> None:
    case = family("mixtral_8x7b", {"model.router_aux_loss_coef": 1.0})
    model, tokens = case.build_model(), case.synthetic_batch(2)["tokens"]
    trained = model(tokens[:, :-1], tokens[:, 1:]).item()
    evaluated = model.eval()(tokens[:, :-1], tokens[:, 1:]).item()
    assert trained - evaluated == pytest.approx(2.0, abs=0.2), "two active experts, used almost evenly"


@pytest.mark.parametrize("name", ["mixtral_8x7b", "gpt_oss_20b", "deepseek_v3"])
def test_experts_compute_in_the_type_of_autocast(name: str) -> None:
    case = family(name)
    model, tokens = case.build_model(), case.synthetic_batch(2)["tokens"]
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    torch.autograd.backward(loss)
    assert loss.item() == pytest.approx(model(tokens[:, :-1], tokens[:, 1:]).item(), rel=2e-3)
    assert all(weight.grad is None or weight.grad.dtype == torch.float32 for weight in model.parameters())


def test_a_checkpoint_of_transformers_is_loaded_and_another_refused(tmp_path: Path) -> None:
    case, other = family("mixtral_8x7b"), family("mixtral_8x7b", {"model.num_layers": 4})
    model = case.build_model()
    assert isinstance(model, CausalLm)
    model.net.save_pretrained(tmp_path)
    loaded = CausalLm.pretrained(case.config(), tmp_path)
    tokens = case.synthetic_batch(2)["tokens"]
    torch.testing.assert_close(loaded(tokens), model(tokens))
    with pytest.raises(DataError, match=r"lacks \d+ weights of MixtralForCausalLM: model\.layers\.3"):
        CausalLm.pretrained(other.config(), tmp_path)
    with pytest.raises(DataError, match="is not a checkpoint of MixtralForCausalLM"):
        CausalLm.pretrained(case.config(), tmp_path / "missing")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(6, 4), nn.Linear(6, 2), nn.Linear(4, 6)


def test_adapted_layers_start_unchanged_and_only_their_changes_are_trained() -> None:
    block = Block()
    model = nn.Sequential(block, Block())
    x = torch.randn(3, 6)
    expected = block.q(x)
    adapt(model, (("q", "k"), ("o",)), rank=2, alpha=8, dropout=0.0)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trained == [
        f"{index}.{name}.weight" for index in (0, 1) for name in ("q.down", "q.up", "k.up", "o.down", "o.up")
    ]
    layer, other = block.get_submodule("q"), block.get_submodule("k")
    assert isinstance(layer, LowRank)
    torch.testing.assert_close(layer(x), expected)
    nn.init.ones_(layer.up.weight)
    change = 8 / 2 * layer.up.weight @ layer.down.weight
    torch.testing.assert_close(layer(x), expected + x @ change.T)
    assert isinstance(other, LowRank)
    assert other.down is layer.down


def test_dialogues_are_packed_into_rows_without_padding(tmp_path: Path) -> None:
    data = tiny_data.samsum(tmp_path)
    file, path = data["samsum"] / "corpus/train.json", data["llama2_7b_weights"] / "hf/tokenizer.json"
    tokenizer = read_tokenizer(path, 400)
    rows = packed_rows(dialogues(file), tokenizer, 10, file)
    assert rows.shape[1] == 10
    assert rows.dtype == torch.int32
    flat = rows.flatten().tolist()
    ends = flat.count(tokenizer.token_to_id("</s>"))
    assert ends in {39, 40}, "each of the dialogues but perhaps the last ends with the end token"
    assert flat[:10] == packed_rows(dialogues(file), tokenizer, 4, file).flatten().tolist()[:10]
