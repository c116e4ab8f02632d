"""A Llama on meshes of ranks, and with parts of each sequence, takes the steps of one rank; refusals are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import PipelineParts
from accelmark.frameworks.pytorch.mesh import keep_stage
from accelmark.run.equivalence import compare_steps
from accelmark.spec.equivalence import TOLERANCES
from accelmark.spec.errors import RequestError
from accelmark.spec.job import JobSpec, ReplayedPair
from accelmark.spec.log.events import Event
from tests.cases.job_of import job_of, losses_of, run, value_of
from tests.frameworks.rank_jobs import SMALL_LLAMA, write_plays
from tests.train.jobs import comparing, evaluating

STEPS: Final = 3
NUM_BATCHES: Final = 4
SMALL: Final[dict[str, Any]] = {
    "model.vocab_size": 100, "model.hidden_size": 32, "model.intermediate_size": 48, "model.num_layers": 2,
    "model.num_heads": 4, "model.num_kv_heads": 2, "model.seq_length": 16, "precision": "fp32", "batch_size": 2,
    "optimizer.lr": 1e-2, "schedule.warmup_steps": 2, "gradient_clip_norm": 0.5, "activation_checkpointing": "off",
    "threads": 1, "loader.num_workers": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokens")
    for split in ("train", "val"):
        (directory / split).mkdir()
        (np.arange(16 * 40 + 1) ** 2 % 97).astype("<u2").tofile(directory / split / "a.bin")
    return directory


def first_steps(
    tokens: Path,
    directory: Path,
    mesh: str,
    case: str = "llama2_7b",
    data: str = "llama_tokens",
    small: Mapping[str, Any] = SMALL,
    **more: Any,
) -> Path:
    """Take the first steps of ``NUM_BATCHES`` batches over all ranks, and return the directory of the results."""
    named = "dp=2" if mesh == "deepspeed" else mesh
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", named)}
    num_own = NUM_BATCHES // (sizes.get("dp", 1) * sizes.get("fsdp", 1))
    over = {**small, **more, "parallelism": mesh, "gradient_accumulation_steps": num_own}
    path = job_of(case, directory, {data: tokens}, over | {"end.max_steps": STEPS})
    job = JobSpec.model_validate_json(path.read_bytes())
    job = comparing(job, directory, directory.parent / "one", num_steps=STEPS, num_batches=NUM_BATCHES)
    path.write_text(job.model_dump_json())
    sizes.pop("ep", None)  # experts are spread over the ranks that share weights
    events = run(path, prod(sizes.values()))
    assert value_of(events, Event.FINISHED)["state"] == "completed"
    why = value_of(events, Event.INIT_END)["own_part_unknown"]
    is_unknown = any(part in mesh for part in ("tp", "pp", "cp", "ep", "deepspeed"))
    assert (why is not None) == is_unknown, "ranks that share layers wait within a step"
    return directory / "results"


def takes_the_steps_of_one_rank(tokens: Path, directory: Path, mesh: str, **more: Any) -> None:
    """Compare the first steps on a mesh with those of one rank, which are taken once for each ``directory``."""
    if not (directory / "one").exists():
        first_steps(tokens, directory / "one", "ddp", **more)
    results = first_steps(tokens, directory / mesh.replace(",", "-"), mesh, **more)
    one = directory / "one"
    errors, first = compare_steps(one / "results", results, one / "inputs", STEPS, TOLERANCES["fp32"])
    assert first is None, (errors, first)
    assert errors.weights < 1e-4, errors


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


MESHES: Final = (
    "pp=2 fsdp=2,tp=2 dp=2,tp=2 dp=2,fsdp=2 dp=2,pp=2 fsdp=2,pp=2 tp=2,pp=2 cp=4 dp=2,cp=2 fsdp=2,cp=2 cp=2,tp=2"
)


@pytest.mark.parametrize(
    "mesh", ["tp=2", "cp=2", *(pytest.param(mesh, marks=pytest.mark.heavy) for mesh in MESHES.split())]
)
def test_a_mesh_takes_the_steps_of_one_rank(shared: Path, tokens: Path, mesh: str) -> None:
    """Mean loss, and weights after clipping by the gradients' norm; two query heads share keys and values."""
    takes_the_steps_of_one_rank(tokens, shared, mesh)


MIXTURE: Final[dict[str, Any]] = {"model.num_experts": 4, "model.num_active_experts": 2}
LAYERS: Final[dict[str, Any]] = {"model.num_layers": 12}
DOCUMENTS: Final[dict[str, Any]] = {
    "case": "llama3_1_8b", "data": "c4_llama3", "model.end_of_document": 4, "model.eval_samples": 8,
}  # fmt: skip


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("fsdp=2,ep=2", {"case": "mixtral_8x7b", "data": "mistral_tokens", **MIXTURE}),
        ("dp=2,fsdp=2,ep=2", {"case": "mixtral_8x7b", "data": "mistral_tokens", **MIXTURE}),
        ("pp=3", LAYERS),
        ("pp=4", LAYERS),
        ("pp=2", {**LAYERS, "pipeline.schedule": "gpipe", "pipeline.microbatches": 2}),
        ("pp=2", {**LAYERS, "activation_checkpointing": "full"}),
        ("pp=2", {**LAYERS, "activation_checkpointing": "selective"}),
        ("cp=2", {"activation_checkpointing": "full"}),
        ("cp=2", {"compile": "default"}),
        ("cp=2", DOCUMENTS),
    ],
)
def test_a_mesh_takes_the_steps_of_one_rank_with_other_models_and_settings(
    tokens: Path, tmp_path: Path, mesh: str, more: dict[str, Any]
) -> None:
    takes_the_steps_of_one_rank(tokens, tmp_path, mesh, **more)


def trained(
    tokens: Path,
    directory: Path,
    parallelism: str,
    num_ranks: int,
    batch_size: int,
    case: str = "llama2_7b",
    data: str = "llama_tokens",
    own: Mapping[str, Any] = {},
    **more: Any,
) -> float:
    """Train for six steps, or go on from a checkpoint in ``directory``; return the final loss on held-out tokens."""
    over = {**SMALL, **own, "parallelism": parallelism, "batch_size": batch_size, "end.max_steps": 6}
    over |= {"checkpoint.every_steps": 3, "checkpoint.keep": 2}
    path = job_of(case, directory, {data: tokens}, over)
    path.write_text(JobSpec.model_validate_json(path.read_bytes()).model_copy(update=more).model_dump_json())
    loss: float = value_of(run(path, num_ranks), Event.FINISHED)["final_metrics"]["eval_loss"]
    return loss


def with_checkpoint_of(first: Path, directory: Path) -> Path:
    """Return ``directory``, in which a job resumes after the third step of the job in ``first``."""
    (directory / "checkpoints").mkdir(parents=True)
    saved = first / "checkpoints/step000000003"
    (directory / "checkpoints" / saved.name).symlink_to(saved)
    return directory


@pytest.mark.heavy
def test_a_checkpoint_with_spread_experts_goes_on_without_and_the_other_way_round(tokens: Path, tmp_path: Path) -> None:
    mixture: dict[str, Any] = {"case": "mixtral_8x7b", "data": "mistral_tokens", "own": MIXTURE}
    whole = trained(tokens, tmp_path / "spread", "fsdp=2,ep=2", 2, 2, **mixture)
    gathered = with_checkpoint_of(tmp_path / "spread", tmp_path / "gathered")
    assert trained(tokens, gathered, "fsdp2", 2, 2, resume=True, **mixture) == pytest.approx(whole, rel=1e-5)
    without = trained(tokens, tmp_path / "first", "fsdp2", 2, 2, **mixture)
    spread = with_checkpoint_of(tmp_path / "first", tmp_path / "again")
    assert trained(tokens, spread, "fsdp=2,ep=2", 2, 2, resume=True, **mixture) == pytest.approx(without, rel=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("saved_by", "num_saving", "batch_size", "others"),
    [
        ("fsdp=2,tp=2", 4, 2, [("tp=2", 2, 4), ("fsdp2", 2, 2), ("fsdp2", 1, 4), ("pp=2", 2, 4)]),
        ("dp=2,pp=2", 4, 2, [("pp=2", 2, 4), ("fsdp2", 1, 4)]),
        ("cp=2", 2, 4, [("cp=4", 4, 4), ("fsdp2", 2, 2)]),
        ("fsdp2", 2, 2, [("cp=2", 2, 4)]),
    ],
)
def test_a_checkpoint_goes_on_on_another_mesh(
    tokens: Path, tmp_path: Path, saved_by: str, num_saving: int, batch_size: int, others: list[tuple[str, int, int]]
) -> None:
    whole = trained(tokens, tmp_path / "first", saved_by, num_saving, batch_size)
    for number, (mesh, num_ranks, size) in enumerate(others):
        directory = with_checkpoint_of(tmp_path / "first", tmp_path / str(number))
        assert trained(tokens, directory, mesh, num_ranks, size, resume=True) == pytest.approx(whole, rel=1e-5)


@pytest.mark.heavy
def test_a_pipeline_trains_with_gpipe_and_goes_on_from_a_checkpoint_of_a_thread(tokens: Path, tmp_path: Path) -> None:
    own = {"pipeline.schedule": "gpipe", "pipeline.microbatches": 2, "checkpoint.asynchronous": True}
    whole = trained(tokens, tmp_path / "first", "pp=2", 2, 4, own=own)
    assert whole == pytest.approx(trained(tokens, tmp_path / "one", "ddp", 1, 4), rel=1e-5)
    for number, mesh in enumerate(("pp=2", "tp=2")):
        directory = with_checkpoint_of(tmp_path / "first", tmp_path / str(number))
        assert trained(tokens, directory, mesh, 2, 4, own=own, resume=True) == pytest.approx(whole, rel=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize(("mesh", "precision"), [("pp=2", "fp8"), ("cp=2", "bf16")])
def test_a_mesh_trains_in_less_precision_close_to_one_rank(
    tokens: Path, tmp_path: Path, mesh: str, precision: str
) -> None:
    own = {"precision": precision}
    whole = trained(tokens, tmp_path / "one", "ddp", 1, 4, own=own)
    assert trained(tokens, tmp_path / "mesh", mesh, 2, 4, own=own) == pytest.approx(whole, rel=0.01)


PARTS = PipelineParts("embedding", "blocks", ("head",))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 8, bias=False)


WITH_BUFFER, TIED = Decoder(), Decoder()
WITH_BUFFER.blocks[3].register_buffer("count", Tensor(1))
TIED.head.weight = TIED.embedding.weight


@pytest.mark.parametrize(
    ("model", "parts", "num_stages", "message"),
    [
        (Decoder(), None, 2, "pipeline_parts"),
        (Decoder(), PARTS, 3, "pp=3 does not divide the 4 blocks"),
        (WITH_BUFFER, PARTS, 2, "have buffers"),
        (TIED, PARTS, 2, r"Linear\.weight is shared"),
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


@pytest.mark.heavy
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4"])
def test_parts_of_plays_take_the_steps_of_whole_ones(tmp_path: Path, mesh: str) -> None:
    (tmp_path / "plays").mkdir()
    small = {name: value for name, value in SMALL_LLAMA.items() if not name.startswith("checkpoint.")}
    more = {"case": "llama_mini", "data": "shakespeare", "small": small}
    takes_the_steps_of_one_rank(write_plays(tmp_path / "plays"), tmp_path, mesh, **more)


@pytest.mark.heavy
def test_weights_are_evaluated_and_steps_replayed(tokens: Path, tmp_path: Path) -> None:
    over = {**SMALL, "parallelism": "cp=2", "end.max_steps": 6, "checkpoint.every_steps": 3, "checkpoint.keep": 2}
    path = job_of("llama2_7b", tmp_path, {"llama_tokens": tokens}, over)
    before = run(path, 2)
    pair = ReplayedPair(start="step000000003", end="step000000006", first_step=4, num_steps=3)
    job = JobSpec.model_validate_json(path.read_bytes())
    (tmp_path / "rank0.out.log").unlink()
    path.write_text(evaluating(job, weights=("step000000006",), replays=(pair,)).model_dump_json())
    events = run(path, 2)
    assert value_of(events, Event.EVALUATED)["metrics"] == value_of(before, Event.FINISHED)["final_metrics"]
    replayed = value_of(events, Event.REPLAYED)
    assert replayed["losses"] == losses_of(before)[3:]
    assert replayed["update"]["difference"] == 0
    assert replayed["update"]["replayed"] == replayed["update"]["saved"] > 0
