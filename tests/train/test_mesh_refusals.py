"""What a model that cannot be spread over a mesh is refused with, when ranks start."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import PipelineParts, Place, TrainCase
from accelmark.frameworks.pytorch.mesh import expert_parallel
from accelmark.frameworks.pytorch.mesh.sharding import shard
from accelmark.frameworks.pytorch.mesh.stages import keep_stage
from accelmark.frameworks.pytorch.mesh.tensor_parallel import split_layers
from accelmark.spec.errors import RequestError
from accelmark.spec.parallelism import Mesh

PARTS = PipelineParts("embedding", "blocks", ("head",))


class Decoder(nn.Module):
    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_blocks))
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def refused_by_stages(model: nn.Module, parts: PipelineParts | None, num_stages: int = 2) -> str:
    before = list(model.state_dict())
    with pytest.raises(RequestError) as refused:
        keep_stage(model, parts, 0, num_stages)
    assert list(model.state_dict()) == before
    return str(refused.value)


def test_a_model_whose_case_names_no_parts_is_not_divided() -> None:
    assert "pp cannot divide Decoder: its case states no pipeline_parts()" in refused_by_stages(Decoder(), None)


def test_stages_have_equally_many_blocks() -> None:
    assert "pp=3 does not divide the 4 blocks of the model" in refused_by_stages(Decoder(), PARTS, 3)
    assert "pp=2 does not divide the 0 blocks" in refused_by_stages(Decoder(), PipelineParts("embedding", "head", ()))


@pytest.mark.parametrize("module", ["blocks.3", "embedding", "head"])
def test_a_buffer_in_a_block_or_at_an_end_would_be_missing_in_other_stages(module: str) -> None:
    model = Decoder()
    model.get_submodule(module).register_buffer("count", Tensor(1))
    assert "blocks or ends have buffers" in refused_by_stages(model, PARTS)


def test_tied_embeddings_would_be_in_two_stages() -> None:
    model = Decoder()
    model.head.weight = model.embedding.weight
    message = refused_by_stages(model, PARTS)
    assert "Linear.weight is shared with another module, as tied embeddings are; use fsdp or tp" in message


def test_layers_are_split_only_where_the_case_names_them() -> None:
    model, mesh = Decoder(), Any
    for blocks, splits in (([], {"": "columns"}), (list(model.blocks), {})):
        with pytest.raises(RequestError, match="Decoder has no layers that tp could split"):
            split_layers(model, blocks, splits, mesh)  # type: ignore[arg-type]


def test_experts_are_spread_evenly_or_not_at_all() -> None:
    model = Decoder()
    data: Any = FourRanks()
    with pytest.raises(RequestError, match="Decoder has no experts that ep could spread over ranks"):
        expert_parallel.spread_experts(model, [], data)
    model.head.num_experts = 6  # type: ignore[assignment]
    with pytest.raises(RequestError, match="ep=4 does not divide the 6 experts of head"):
        expert_parallel.spread_experts(model, ["head"], data)


def test_sequences_are_split_only_where_the_case_takes_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)

    class Case:
        place = Place(0, 1, torch.device("cpu"), 1, 1, Mesh(dp=1, cp=2))

        def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
            return list(model.children())

        splits_sequences = TrainCase.splits_sequences

    case, devices = Case(), FourRanks()
    with pytest.raises(RequestError, match="cp cannot split the sequences of Decoder"):
        shard(Decoder(), case, devices, None, scatter=False)  # type: ignore[arg-type]


class FourRanks:
    """Mocked: a device mesh with the axis fsdp alone. The check of numbers exchanges nothing."""

    ndim = 1
    mesh_dim_names = ("fsdp",)

    def __getitem__(self, axis: str) -> FourRanks:
        assert axis == "fsdp"
        return self

    def size(self) -> int:
        return 4


def test_an_older_transformers_is_named_with_the_command_that_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(RequestError, match=r"ep needs .* transformers 5.23, found .*pip install 'transformers>=5.23'"):
        importlib.reload(expert_parallel)
    monkeypatch.undo()
    importlib.reload(expert_parallel)
