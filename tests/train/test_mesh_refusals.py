"""What a model that cannot be spread over a mesh is refused with, when ranks start."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import PipelineParts
from accelmark.frameworks.pytorch.mesh.sharding import keep_stage
from accelmark.spec.errors import RequestError

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
