"""A Llama on meshes of ranks takes the steps that it takes on one rank, and its checkpoints go on on another mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pytest

from accelmark.results.equivalence import compare_steps
from accelmark.spec.equivalence import TOLERANCES
from accelmark.spec.job import CompareJob, JobSpec, TrainJob
from accelmark.spec.log.events import Event
from tests.cases.job_of import job_of, run, value_of

STEPS: Final = 3
NUM_BATCHES: Final = 4
SMALL: Final[dict[str, Any]] = {
    "model.vocab_size": 100,
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.seq_length": 16,
    "precision": "fp32",
    "batch_size": 2,
    "optimizer.lr": 1e-2,
    "schedule.warmup_steps": 2,
    "gradient_clip_norm": 0.5,
    "activation_checkpointing": "off",
    "threads": 1,
    "loader.num_workers": 0,
}


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
    parallelism: str,
    num_ranks: int,
    num_own: int,
    case: str = "llama2_7b",
    data: str = "llama_tokens",
    small: Mapping[str, Any] = SMALL,
    **more: Any,
) -> Path:
    """Take the first steps of ``num_own`` batches a rank or group of ranks, and return the directory of the results."""
    over = {**small, **more, "parallelism": parallelism, "gradient_accumulation_steps": num_own}
    path = job_of(case, directory, {data: tokens}, over | {"end.max_steps": STEPS})
    job = JobSpec.model_validate_json(path.read_bytes())
    assert isinstance(job.work, TrainJob)
    reference = directory.parent / "one"
    work = CompareJob(
        train=job.work,
        inputs=reference / "inputs",
        results=directory / "results",
        reference=None if directory == reference else reference / "results",
        num_steps=STEPS,
        num_batches=NUM_BATCHES,
    )
    path.write_text(job.model_copy(update={"work": work}).model_dump_json())
    events = run(path, num_ranks)
    assert value_of(events, Event.FINISHED)["state"] == "completed"
    why = value_of(events, Event.INIT_END)["own_part_unknown"]
    shares_layers = any(axis in parallelism for axis in ("tp", "pp", "cp", "ep"))
    assert (why is not None) == shares_layers, "ranks that share layers wait within a step"
    return directory / "results"


@pytest.fixture(scope="module")
def one(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("steps")
    first_steps(tokens, directory / "one", "ddp", 1, NUM_BATCHES)
    return directory


@pytest.mark.parametrize(
    ("mesh", "num_ranks", "num_own"),
    [
        ("tp=2", 2, 4),
        pytest.param("pp=2", 2, 4, marks=pytest.mark.heavy),
        pytest.param("fsdp=2,tp=2", 4, 2, marks=pytest.mark.heavy),
        pytest.param("dp=2,tp=2", 4, 2, marks=pytest.mark.heavy),
        pytest.param("dp=2,fsdp=2", 4, 1, marks=pytest.mark.heavy),
        pytest.param("dp=2,pp=2", 4, 2, marks=pytest.mark.heavy),
        pytest.param("fsdp=2,pp=2", 4, 2, marks=pytest.mark.heavy),
        pytest.param("tp=2,pp=2", 4, 4, marks=pytest.mark.heavy),
    ],
)
def test_a_mesh_takes_the_steps_of_one_rank(one: Path, tokens: Path, mesh: str, num_ranks: int, num_own: int) -> None:
    results = first_steps(tokens, one / mesh.replace(",", "-"), mesh, num_ranks, num_own)
    errors, first = compare_steps(one / "one/results", results, one / "one/inputs", STEPS, TOLERANCES["fp32"])
    assert first is None, (errors, first)
    assert errors.weights < 1e-4, errors


MIXTURE: Final[dict[str, Any]] = {"model.num_experts": 4, "model.num_active_experts": 2}


@pytest.mark.parametrize(
    ("mesh", "num_ranks", "num_own"),
    [
        pytest.param("fsdp=2,ep=2", 2, 2, marks=pytest.mark.heavy),
        pytest.param("dp=2,fsdp=2,ep=2", 4, 1, marks=pytest.mark.heavy),
    ],
)
def test_spread_experts_take_the_steps_of_one_rank(
    tokens: Path, tmp_path: Path, mesh: str, num_ranks: int, num_own: int
) -> None:
    case = {"case": "mixtral_8x7b", "data": "mistral_tokens", **MIXTURE}
    first_steps(tokens, tmp_path / "one", "ddp", 1, NUM_BATCHES, **case)
    results = first_steps(tokens, tmp_path / "mesh", mesh, num_ranks, num_own, **case)
    errors, first = compare_steps(tmp_path / "one/results", results, tmp_path / "one/inputs", STEPS, TOLERANCES["fp32"])
    assert first is None, (errors, first)
    assert errors.weights < 1e-4, errors


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("num_stages", "more"),
    [
        (3, {}),
        (4, {}),
        (2, {"pipeline.schedule": "gpipe", "pipeline.microbatches": 2}),
        (2, {"activation_checkpointing": "full"}),
        (2, {"activation_checkpointing": "selective"}),
    ],
    ids=["three stages", "four stages", "gpipe", "recomputed", "partly recomputed"],
)
def test_a_pipeline_takes_the_steps_of_one_rank(
    tokens: Path, tmp_path: Path, num_stages: int, more: dict[str, Any]
) -> None:
    more = {"model.num_layers": 12, **more}
    first_steps(tokens, tmp_path / "one", "ddp", 1, NUM_BATCHES, **more)
    results = first_steps(tokens, tmp_path / "mesh", f"pp={num_stages}", num_stages, NUM_BATCHES, **more)
    errors, first = compare_steps(tmp_path / "one/results", results, tmp_path / "one/inputs", STEPS, TOLERANCES["fp32"])
    assert first is None, (errors, first)
    assert errors.weights < 1e-4, errors


def trained(
    tokens: Path,
    directory: Path,
    parallelism: str,
    num_ranks: int,
    batch_size: int,
    case: str = "llama2_7b",
    data: str = "llama_tokens",
    own: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> float:
    """Train for six steps, or go on from a checkpoint in ``directory``; return the final loss on held-out tokens."""
    over = {**SMALL, **own, "parallelism": parallelism, "batch_size": batch_size, "end.max_steps": 6}
    over |= {"checkpoint.every_steps": 3, "checkpoint.keep": 2}
    path = job_of(case, directory, {data: tokens}, over)
    job = JobSpec.model_validate_json(path.read_bytes())
    path.write_text(job.model_copy(update=more).model_dump_json())
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
    ("saved_by", "num_saving", "others"),
    [
        ("fsdp=2,tp=2", 4, [("tp=2", 2, 4), ("fsdp2", 2, 2), ("fsdp2", 1, 4), ("pp=2", 2, 4)]),
        ("dp=2,pp=2", 4, [("pp=2", 2, 4), ("fsdp2", 1, 4)]),
    ],
)
def test_a_checkpoint_goes_on_on_another_mesh(
    tokens: Path, tmp_path: Path, saved_by: str, num_saving: int, others: list[tuple[str, int, int]]
) -> None:
    whole = trained(tokens, tmp_path / "first", saved_by, num_saving, 2)
    for number, (mesh, num_ranks, batch_size) in enumerate(others):
        directory = with_checkpoint_of(tmp_path / "first", tmp_path / str(number))
        assert trained(tokens, directory, mesh, num_ranks, batch_size, resume=True) == pytest.approx(whole, rel=1e-5)


@pytest.mark.heavy
def test_a_pipeline_trains_with_gpipe_and_goes_on_from_a_checkpoint_of_a_thread(tokens: Path, tmp_path: Path) -> None:
    own = {"pipeline.schedule": "gpipe", "pipeline.microbatches": 2, "checkpoint.asynchronous": True}
    whole = trained(tokens, tmp_path / "first", "pp=2", 2, 4, own=own)
    assert whole == pytest.approx(trained(tokens, tmp_path / "one", "ddp", 1, 4), rel=1e-5)
    for number, mesh in enumerate(("pp=2", "tp=2")):
        directory = with_checkpoint_of(tmp_path / "first", tmp_path / str(number))
        assert trained(tokens, directory, mesh, 2, 4, own=own, resume=True) == pytest.approx(whole, rel=1e-5)


@pytest.mark.heavy
def test_a_pipeline_trains_in_fp8_close_to_one_rank(tokens: Path, tmp_path: Path) -> None:
    own = {"precision": "fp8"}
    whole = trained(tokens, tmp_path / "one", "ddp", 1, 4, own=own)
    assert trained(tokens, tmp_path / "mesh", "pp=2", 2, 4, own=own) == pytest.approx(whole, rel=0.01)
