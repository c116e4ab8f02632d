"""What a model that cannot be spread over a mesh is refused with, when ranks start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import PipelineParts, Place, TrainCase
from accelmark.frameworks.pytorch.mesh import expert_parallel
from accelmark.frameworks.pytorch.mesh.sharding import keep_stage, shard
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


def with_buffer() -> Decoder:
    model = Decoder()
    model.blocks[3].register_buffer("count", Tensor(1))
    return model


def with_tied_embeddings() -> Decoder:
    model = Decoder()
    model.head.weight = model.embedding.weight
    return model


@pytest.mark.parametrize(
    ("model", "parts", "num_stages", "message"),
    [
        (Decoder(), None, 2, "pipeline_parts"),
        (Decoder(), PARTS, 3, "pp=3 does not divide the 4 blocks"),
        (with_buffer(), PARTS, 2, "have buffers"),
        (with_tied_embeddings(), PARTS, 2, r"Linear\.weight is shared"),
    ],
    ids=["no parts", "uneven", "buffers", "tied"],
)
def test_a_model_that_stages_cannot_divide_is_refused_unchanged(
    model: nn.Module, parts: PipelineParts | None, num_stages: int, message: str
) -> None:
    before = list(model.state_dict())
    with pytest.raises(RequestError, match=message):
        keep_stage(model, parts, 0, num_stages)
    assert list(model.state_dict()) == before


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
