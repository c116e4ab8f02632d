"""How a model may be spread over ranks is checked before a start, with the numbers that fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from accelmark.frameworks.pytorch.training.zero import configuration
from accelmark.plan.training import mesh_problems, parallelism_problems, unused_settings
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, resolve
from accelmark.spec.parallelism import Mesh, mesh_of
from accelmark.spec.plugins.catalog import load_case, load_framework
from accelmark.spec.settings.training import TrainSettings

SPLITS = {"tp": ("num_heads", "num_kv_heads", "intermediate_size"), "pp": ("num_layers",), "cp": ("seq_length",)}


def settings(parallelism: Any, **model: Any) -> TrainSettings:
    sizes = {"num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336, "num_layers": 32, "seq_length": 8, **model}
    return TrainSettings.model_validate(
        {"batch_size": 2, "end": {"max_steps": 1}, "parallelism": parallelism, "model": sizes}
    )


def problems(parallelism: Any, nnodes: int = 1, nproc: int = 8, framework: str = "pytorch", **model: Any) -> list[str]:
    key = CaseKey(model="llama", framework=framework, hardware="X1", nnodes=nnodes, nproc=nproc)
    supported = load_framework(framework).parallelism
    return [
        str(each) for each in parallelism_problems(settings(parallelism, **model), key, supported, SPLITS, "run.yaml")
    ]


@pytest.mark.parametrize(
    "given", ["ddp", "fsdp2", "hsdp", "tp=8", {"fsdp": 4, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}, "pp=8", "cp=4"]
)
def test_what_fits_is_planned(given: Any) -> None:
    assert problems(given) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tp": 3}, "tp=3 does not divide model.num_heads 32, model.num_kv_heads 8, model.intermediate_size 14336"),
        ({"tp": 16}, "tp=16 does not divide model.num_kv_heads 8 (tp that fits: 1, 2, 4, 8)"),
        ({"fsdp": 3}, "fsdp=3 needs a multiple of 3 ranks, the job has 8 (degrees that divide 8 ranks: 1, 2, 4, 8)"),
        ({"dp": 2, "tp": 2}, "dp=2,tp=2 needs 4 ranks, the job has 8"),
        ({"pp": 3}, "pp=3 does not divide model.num_layers 32 (pp that fits: 1, 2, 4, 8)"),
        ({"cp": 8}, "cp=8 (2 pieces a rank) does not divide model.seq_length 8 (cp that fits: 1, 2, 4)"),
        ({"fsdp": 8, "ep": 8}, "the case 'llama' cannot be split by ep (its axes: dp, fsdp, tp, pp, cp)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers_that_do(given: Any, expected: str) -> None:
    assert expected in " ".join(problems(given))


def test_a_mesh_is_written_and_read_as_text() -> None:
    given = settings({"fsdp": 4, "tp": 2})
    dumped = given.model_dump(mode="json")
    assert dumped["parallelism"] == "fsdp=4,tp=2"
    assert TrainSettings.model_validate(dumped) == given


def mixture(parallelism: str, num_ranks: int) -> list[str]:
    """Problems of a mesh for the eight experts of ``moe_mini``."""
    train = load_case("moe_mini").train
    assert train is not None
    layer = Layer.of("run.yaml", {"parallelism": parallelism})
    resolved = resolve(Layer.of("case.yaml", train.settings), [layer], mutable=train.mutable, is_open=False)
    key = CaseKey(model="moe_mini", framework="pytorch", hardware="X1", nnodes=1, nproc=num_ranks)
    supported = load_framework("pytorch").parallelism
    found = [*parallelism_problems(resolved.settings, key, supported, train.mesh, "run.yaml")]
    return [str(each) for each in (*found, *mesh_problems(resolved.settings, resolved.provenance))]


def test_experts_are_spread_over_the_ranks_of_fsdp() -> None:
    assert mixture("fsdp=8,ep=8", 8) == mixture("dp=2,fsdp=4,ep=4", 8) == []
    (problem,) = mixture("ep=2", 2)
    assert "ep=2 spreads experts over the ranks of fsdp, found fsdp=1 (ep that fits: the degree of fsdp)" in problem
    (problem,) = mixture("fsdp=3,ep=3", 3)
    assert "ep=3 does not divide model.num_experts 8" in problem


def test_a_batch_has_the_fewest_microbatches_with_which_each_stage_has_one() -> None:
    given = settings("pp=8").model_copy(update={"batch_size": 12, "gradient_accumulation_steps": 2})
    assert given.microbatches(8) == 4
    assert given.microbatches(1) == given.microbatches(2) == 1


def test_settings_of_a_pipeline_go_with_pp_only() -> None:
    train = load_case("llama_mini").train
    assert train is not None
    layer = Layer.of("run.yaml", {"parallelism": "tp=2", "pipeline.schedule": "gpipe"})
    resolved = resolve(Layer.of("case.yaml", train.settings), [layer], mutable=train.mutable, is_open=False)
    (problem,) = unused_settings(resolved.provenance, ("run.yaml",))
    assert "pipeline.schedule: applies to parallelism pp, found tp=2 (set parallelism=pp=2, for example)" in str(
        problem
    )


def test_ranks_of_a_pipeline_and_of_split_layers_have_the_same_samples() -> None:
    mesh = Mesh(dp=2, pp=2, fsdp=2, tp=2)
    assert [mesh.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]


def test_ranks_that_share_samples_count_once_in_the_global_batch() -> None:
    assert settings("fsdp=2,tp=4").samples_per_step(8) == 2 * 2
    assert settings("fsdp2").samples_per_step(8) == 2 * 8


def test_names_are_meshes_over_all_ranks_or_those_of_a_host() -> None:
    assert mesh_of("ddp", 8, 4) == Mesh(dp=8)
    assert mesh_of("fsdp2", 8, 4) == Mesh(dp=1, fsdp=8)
    assert mesh_of("hsdp", 8, 4) == Mesh(dp=2, fsdp=4)
    assert mesh_of(Mesh(tp=2), 8, 4) == Mesh(dp=4, tp=2)


def zero(**given: Any) -> Mapping[str, Any]:
    """Settings of ZeRO over those of a case that lets ``parallelism`` change, as a run file gives them."""
    train = load_case("llama_mini").train
    assert train is not None
    layer = Layer.of("run.yaml", {"parallelism": "deepspeed", "zero": given})
    resolved = resolve(Layer.of("case.yaml", train.settings), [layer], mutable=train.mutable, is_open=False)
    found: Mapping[str, Any] = configuration(resolved.settings, 2, is_pinned=False)["zero_optimization"]
    return found


def test_zero_settings_become_deepspeed_s_configuration() -> None:
    assert zero() == {"stage": 3}
    assert zero(stage=2, overlap_comm=False, reduce_bucket_size=1000, offload="optimizer") == {
        "stage": 2,
        "overlap_comm": False,
        "reduce_bucket_size": 1000,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    }
    assert zero(offload="all")["offload_param"] == {"device": "cpu", "pin_memory": False}
