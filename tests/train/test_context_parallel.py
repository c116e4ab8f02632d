"""A decoder whose ranks have parts of each sequence takes the steps of one rank, and checkpoints go on elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig

from accelmark.frameworks.pytorch.context_parallel import SequencePart
from accelmark.frameworks.pytorch.model.attention import CAUSAL
from accelmark.spec.job import EvaluateJob, JobSpec, ReplayedPair, TrainJob
from accelmark.spec.log.events import Event
from accelmark.spec.parallelism import Mesh
from accelmark.tasks.language.pytorch import CausalLm
from tests.cases.job_of import job_of, losses_of, run, value_of
from tests.frameworks.rank_jobs import SMALL_LLAMA, write_plays
from tests.train.test_mesh import NUM_BATCHES, SMALL, takes_the_steps_of_one_rank, tokens

__all__ = ["tokens"]

heavy = pytest.mark.heavy


@heavy
@pytest.mark.parametrize(("mesh", "num_ranks"), [("cp=2", 2), ("cp=4", 4)])
def test_parts_of_plays_take_the_steps_of_whole_ones(tmp_path: Path, mesh: str, num_ranks: int) -> None:
    (tmp_path / "plays").mkdir()
    small = {name: value for name, value in SMALL_LLAMA.items() if not name.startswith("checkpoint.")}
    more = {"case": "llama_mini", "data": "shakespeare", "small": small}
    takes_the_steps_of_one_rank(write_plays(tmp_path / "plays"), tmp_path, mesh, num_ranks, NUM_BATCHES, **more)


@heavy
def test_weights_are_evaluated_and_steps_replayed(tokens: Path, tmp_path: Path) -> None:
    over = {**SMALL, "parallelism": "cp=2", "end.max_steps": 6, "checkpoint.every_steps": 3, "checkpoint.keep": 2}
    path = job_of("llama2_7b", tmp_path, {"llama_tokens": tokens}, over)
    before = run(path, 2)
    job = JobSpec.model_validate_json(path.read_bytes())
    assert isinstance(job.work, TrainJob)
    pair = ReplayedPair(start="step000000003", end="step000000006", first_step=4, num_steps=3)
    work = EvaluateJob(train=job.work, weights=("step000000006",), replays=(pair,))
    (tmp_path / "rank0.out.log").unlink()
    path.write_text(job.model_copy(update={"work": work}).model_dump_json())
    events = run(path, 2)
    assert value_of(events, Event.EVALUATED)["metrics"] == value_of(before, Event.FINISHED)["final_metrics"]
    replayed = value_of(events, Event.REPLAYED)
    assert replayed["losses"] == losses_of(before)[3:]
    assert replayed["update"]["difference"] == 0
    assert replayed["update"]["replayed"] == replayed["update"]["saved"] > 0


@pytest.fixture
def half() -> Iterator[SequencePart]:
    """The part of one of two ranks; nothing is exchanged."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield SequencePart.open(torch.device("cpu"), Mesh(dp=1, cp=2))
    dist.destroy_process_group()


def test_a_rank_keeps_little_more_than_its_share_of_the_activations(half: SequencePart) -> None:
    """Keys and values of whole sequences, and on CPUs masks, are kept in addition."""
    length = 1024
    arguments: dict[str, Any] = {
        "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 896, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": length,
        "attn_implementation": CAUSAL,
    }  # fmt: skip
    config = LlamaConfig(**arguments)
    model, tokens = CausalLm(config), torch.zeros(1, length, dtype=torch.int64)
    kept = [kept_bytes(model, tokens, sequence) for sequence in (None, half)]
    assert 0.5 < kept[1] / kept[0] < 0.6


def kept_bytes(model: CausalLm, tokens: Tensor, sequence: SequencePart | None) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without parameters."""
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens, sequence=sequence)
    return sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in weights)
