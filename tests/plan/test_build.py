from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accelmark.frameworks.pytorch.training.zero import configuration
from accelmark.plan.plan import Plan
from accelmark.plan.request import Detected, adaptation_files, host_capabilities, requirements_file, vendor_layers
from accelmark.plan.training import mesh_problems, parallelism_problems, unused_settings
from accelmark.spec.errors import DataError, RequestError, SpecError
from accelmark.spec.job import TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Layer, Resolved, resolve
from accelmark.spec.parallelism import Mesh, mesh_of
from accelmark.spec.plugins.case import TrainCaseSpec
from accelmark.spec.plugins.catalog import load_case, load_framework, load_vendor
from accelmark.spec.settings.training import TrainSettings
from tests.plan.plans import plan_of


def plan(
    run: dict[str, Any],
    *,
    hosts: int = 1,
    options: Mapping[str, Any] | None = None,
    others: tuple[str, ...] = (),
    problem: str | None = None,
    **more: Any,
) -> Plan:
    addresses = [f"h{number}" for number in range(hosts)] if hosts > 1 else ["localhost"]
    cluster = {"launcher": "ssh" if hosts > 1 else "local", "hosts": [{"address": name} for name in addresses]}
    detected = Detected("acme", "X1", load_vendor("acme").chips[0], 2, others=others, problem=problem)
    return plan_of(run, detected, cluster=cluster | {"vendor": "acme"} | dict(options or {}), **more)


def test_remote_hosts_without_a_vendor_are_not_taken_for_this_machines_chips(plugins: Path) -> None:
    run = {"cases": ["toy:pytorch:X1:2:1"]}
    with pytest.raises(RequestError, match=r"run.yaml: cluster 'local' names no vendor.*acme is this machine's"):
        plan(run, hosts=2, options={"vendor": None})
    assert plan(run | {"vendor": "acme"}, hosts=2, options={"vendor": None}).jobs


def test_a_key_becomes_a_job_for_each_round_with_a_seed_of_its_own(plugins: Path) -> None:
    planned = plan({"cases": [{"key": "toy:pytorch:X1:2:2:3"}]}, hosts=3)
    assert [job.directory for job in planned.jobs] == [f"toy-pytorch-X1x2x2/round{n}" for n in (1, 2, 3)]
    works = [job.job.work for job in planned.jobs]
    assert [work.settings.seed for work in works if isinstance(work, TrainJob)] == [3, 4, 5]
    assert [(node.host, node.noderank, node.nproc) for node in planned.jobs[0].nodes] == [("h0", 0, 2), ("h1", 1, 2)]
    assert works[0].units_per_sample == 16


def test_the_vendors_layers_lie_between_case_and_run_file(plugins: Path) -> None:
    adaptation = plugins / "vendors" / "acme" / "cases" / "toy-pytorch"
    adaptation.mkdir(parents=True)
    (adaptation / "config.yaml").write_text("batch_size: 16\nprecision: bf16\n")
    (adaptation / "config_X1x1x1.yaml").write_text("batch_size: 32\n")
    job = plan({"cases": [{"key": "toy", "settings": {"precision": "fp32"}}]}).jobs[0].job
    assert isinstance(job.work, TrainJob)
    assert (job.work.settings.batch_size, job.work.settings.precision) == (32, "fp32")
    assert job.provenance["batch_size"].layer == "vendors/acme/cases/toy-pytorch/config_X1x1x1.yaml"
    assert job.provenance["precision"].layer == "run.yaml"


def test_a_folder_without_a_vendor_yaml_extends_an_existing_vendor(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension = tmp_path / "more/vendors/acme/cases/toy-pytorch"
    extension.mkdir(parents=True)
    (extension / "config_X1x1x1.yaml").write_text("batch_size: 64\n")
    (extension / "environment_variables.sh").write_text("export A=1\n")
    (extension / "confg.yaml").touch()
    (extension.parent / "top-pytorch").mkdir()
    (extension.parents[1] / "images").mkdir()
    monkeypatch.setenv("ACCELMARK_PLUGINS", f"{plugins}:{tmp_path / 'more'}:/missing")
    planned = plan({"cases": [{"key": "toy"}]})
    job = planned.jobs[0].job
    assert isinstance(job.work, TrainJob)
    assert job.work.settings.batch_size == 64
    assert job.provenance["batch_size"].layer.endswith(f"config_X1x1x1.yaml in {tmp_path / 'more'}")
    assert job.adaptation is not None
    assert (job.adaptation.path, job.adaptation.is_extension) == (extension, True)
    unread = ["/missing", *map(str, (extension.parent / "top-pytorch", extension / "confg.yaml"))]
    unread.append(str(extension.parents[1] / "images"))
    assert sorted(warning.partition(": ")[0] for warning in planned.warnings) == sorted(unread)


def test_all_problems_of_every_key_are_reported_at_once(plugins: Path) -> None:
    fixed = {"key": "toy:pytorch:X1:1:2", "settings": {"seed": 9}}
    keys = ["tou", "toy:pytorhc", "toy:pytorch:X1:2:1", "toy:pytorch:X1:1:9", fixed, "toy:pytorch:X1:1:1:0"]
    with pytest.raises(SpecError) as caught:
        plan({"cases": keys})
    expected = (
        "did you mean 'toy'?", "did you mean 'pytorch'?", "requests 2 hosts, the cluster 'local' has 1",
        "requests 9 devices a host, this one has 2", "seed: is not mutable", "repeat '0'",
    )  # fmt: skip
    assert all(said in str(caught.value) for said in expected)
    assert len(caught.value.problems) == len(expected)


RULES = {
    "name": "own",
    "target": {"metric": "accuracy", "direction": "at_least", "value": 0.99, "why": "own"},
    "mutable": ["model.width", "batch"],
}


def test_the_rules_of_a_run_state_target_and_mutable_settings_in_place_of_the_case(plugins: Path) -> None:
    key = {"key": "toy", "settings": {"model": {"width": 8}}}
    job = plan({"rules": RULES, "cases": [key]}).jobs[0].job
    assert isinstance(job.work, TrainJob)
    assert job.work.target is not None
    assert (job.work.target.value, job.work.settings.model["width"]) == (0.99, 8)
    assert job.rules is not None
    assert job.rules.name == "own"
    weaker = RULES | {"target": {**RULES["target"], "value": 0.1}}  # type: ignore[dict-item]
    assert plan({"rules": weaker, "cases": [key]}).jobs[0].job.work != job.work, "the case's own target is stricter"
    with pytest.raises(SpecError, match=r"precision: is not mutable.*rules own fixes it; may change: model\.width, ba"):
        plan({"rules": RULES, "cases": [{"key": "toy", "settings": {"precision": "fp16"}}]})
    with pytest.raises(SpecError, match="the rules own are of training"):
        plan({"rules": RULES, "cases": [{"key": "toy", "task": "infer"}]})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mutable": ["batch_sise"]}, "names 'batch_sise', which is no setting .did you mean 'batch_size'"),
        ({"targets": None}, "rules.targets: unknown key .did you mean 'target'"),
        ({"name": "aiperf-moe"}, "aiperf-moe is a rule set of AccelMark's, with other values"),
    ],
)
def test_a_mistake_in_the_rules_of_a_run_is_one_error(changed: dict[str, Any], message: str, plugins: Path) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        plan({"rules": RULES | changed, "cases": [{"key": "toy"}]})
    assert len(caught.value.problems) == 1


def test_another_hosts_address_is_not_measured_here(plugins: Path) -> None:
    with pytest.raises(SpecError, match=r"launcher: local .*192\.0\.2\.7 .*slurm, ssh"):
        plan({"cases": [{"key": "toy:pytorch:X1:1:1"}]}, options={"hosts": [{"address": "192.0.2.7"}]})


def test_a_plan_that_allows_missing_data_has_all_settings_and_lists_what_is_missing(plugins: Path) -> None:
    def lacking(*_: object) -> Mapping[str, Path]:
        raise DataError("ImageNet cannot be fetched: name the directory that holds it")

    planned = plan({"cases": [{"key": "toy:pytorch:X1:1:1"}]}, data_dirs=lacking, allow_missing_data=True)
    (job,) = planned.jobs
    assert job.job.data_dirs == {}
    assert "optimizer.lr" in job.job.provenance
    (problem,) = planned.missing_data
    assert (problem.key, problem.what.partition(":")[0]) == ("toy:pytorch:X1:1:1", "ImageNet cannot be fetched")
    assert Plan.model_validate_json(planned.model_dump_json()) == planned
    with pytest.raises(SpecError, match="did you mean 'toy'"):
        plan({"cases": [{"key": "toi:pytorch:X1:1:1"}]}, data_dirs=lacking, allow_missing_data=True)


@pytest.mark.parametrize(
    ("settings", "key", "hint"),
    [
        ({"parallelism": "fsdp2", "channels_last": True}, "channels_last", "parallelism=ddp"),
        ({"compile": "max-autotune", "gradient_accumulation_steps": 2}, "compile", "compile=default"),
        ({"precision": "fp8"}, "precision", "precision=bf16"),
        ({"parallelism": "deepspeed", "precision": "fp16"}, "precision", "precision=bf16"),
        ({"parallelism": "deepspeed", "compile": "default"}, "parallelism", "compile=off"),
        ({"parallelism": "deepspeed", "optimizer.name": "lamb"}, "optimizer.name", "parallelism=fsdp2"),
        ({"parallelism": "deepspeed", "channels_last": True}, "channels_last", "parallelism=ddp"),
    ],
)
def test_settings_that_pytorch_cannot_combine_are_refused(
    plugins: Path, settings: dict[str, Any], key: str, hint: str
) -> None:
    with pytest.raises(SpecError) as refused:
        plan({"open": True, "cases": [{"key": "toy", "settings": settings}]})
    assert any(hint in problem.hint for problem in refused.value.problems if problem.key == key)
    alone = {name: value for name, value in settings.items() if name != key}
    assert plan({"open": True, "cases": [{"key": "toy", "settings": alone}]}).jobs


def test_deepspeed_is_required_where_it_is_used(plugins: Path) -> None:
    run = {"open": True, "cases": [{"key": "toy", "settings": {"parallelism": "deepspeed"}}]}
    needs = [need for need in plan(run).jobs[0].requires if need.requirement == "accelmark[deepspeed]"]
    assert [need.needed_by.partition(" ")[0] for need in needs] == ["parallelism=deepspeed"]


def test_a_key_that_names_another_chip_than_the_detected_one_is_refused_unless_open(plugins: Path) -> None:
    with pytest.raises(SpecError, match=r"names H100, but this machine has X1 \(write X1\)"):
        plan({"cases": [{"key": "toy:pytorch:H100"}]})
    with pytest.raises(SpecError, match=r"write X1, or choose --vendor cpu"):
        plan({"cases": [{"key": "toy:pytorch:CPU"}]}, others=("cpu",))
    assert len(plan({"cases": [{"key": "toy:pytorch:X1-Pod"}]}).jobs) == 1
    opened = plan({"cases": [{"key": "toy:pytorch:H100"}], "open": True})
    assert any("this machine has X1: the result will not be VALID" in warning for warning in opened.warnings)
    elsewhere = plan({"cases": [{"key": "toy:pytorch:H100:2"}]}, hosts=2)
    assert not any("this machine" in warning for warning in elsewhere.warnings)


def test_a_key_that_names_another_version_of_the_framework_is_refused_unless_open(plugins: Path) -> None:
    installed = importlib.metadata.version("torch").partition("+")[0]
    assert len(plan({"cases": [{"key": f"toy:pytorch_{installed.rpartition('.')[0]}:X1"}]}).jobs) == 1
    with pytest.raises(SpecError, match=f"names version 1.8 of pytorch, but {installed}"):
        plan({"cases": [{"key": "toy:pytorch_1.8:X1"}]})
    opened = plan({"cases": [{"key": "toy:pytorch_1.8:X1"}], "open": True})
    assert any("names version 1.8" in warning for warning in opened.warnings)


KEY = CaseKey(model="toy", framework="pytorch", hardware="X1", nnodes=2, nproc=8)
HERE = {"fp8": "vendor.yaml, chip X1", "amx_bf16": "/proc/cpuinfo"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, suffix in enumerate(("", "_amx_bf16", "_fp8", "_int4", "_X1x2x8", "_X1x1x8"), start=1):
        (tmp_path / f"config{suffix}.yaml").write_text(f"batch_size: {number}\n")
    (tmp_path / "infer_fp8.yaml").write_text("batch_size: 7\n")
    return tmp_path


def test_files_of_capabilities_lie_between_the_vendors_file_and_that_of_the_scale(folder: Path) -> None:
    layers, files = vendor_layers([folder], "acme", KEY, HERE, "config")
    names = [layer.name.rpartition("/")[2] for layer in layers]
    assert names == ["config.yaml", "config_amx_bf16.yaml", "config_fp8.yaml", "config_X1x2x8.yaml"]
    assert layers[2].name == f"vendors/acme/cases/{folder.name}/config_fp8.yaml"
    reasons = {file.file.rpartition("/")[2]: file.reason for file in files if not file.applied}
    assert reasons == {
        "config_int4.yaml": "the device is not known to have int4 (known: amx_bf16, fp8); vendor.yaml can list it",
        "config_X1x1x8.yaml": "the scale is X1x2x8",
    }


def test_files_may_lie_in_the_folder_config_as_in_flagperf(folder: Path) -> None:
    (folder / "config").mkdir()
    for name in ("config.yaml", "config_X1x2x8.yaml"):
        (folder / name).rename(folder / "config" / name)
    (folder / "config" / "environment_variables.sh").touch()
    (folder / "config" / "requirements.txt").write_text("acme==1.0\n")
    layers, _ = vendor_layers([folder], "acme", KEY, HERE, "config")
    names = [layer.name.rpartition(f"{folder.name}/")[2] for layer in layers]
    assert names == ["config/config.yaml", "config_amx_bf16.yaml", "config_fp8.yaml", "config/config_X1x2x8.yaml"]
    contents = adaptation_files(folder)
    assert contents is not None
    assert (contents.has_environment, contents.requirements) == (True, ("acme==1.0",))
    assert requirements_file(folder) == folder / "config" / "requirements.txt"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx2 f16c", {"avx2", "emulated_bf16"}),
        ("flags\t\t: fpu avx2 avx512_bf16", {"avx2", "avx512_bf16"}),
        ("Features\t: asimd bf16", set()),
    ],
)
def test_a_cpu_without_instructions_for_bf16_emulates_it(flags: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbogomips\t: 1\n")
    own = load_vendor("cpu")
    tests = {name: one.model_copy(update={"file": tmp_path / "cpuinfo"}) for name, one in own.capabilities.items()}
    assert set(host_capabilities(own.model_copy(update={"capabilities": tests}))) == expected


SPLITS = {"tp": ("num_heads", "num_kv_heads", "intermediate_size"), "pp": ("num_layers",), "cp": ("seq_length",)}


def settings(parallelism: Any) -> TrainSettings:
    sizes = {"num_heads": 32, "num_kv_heads": 8, "intermediate_size": 14336, "num_layers": 32, "seq_length": 8}
    values = {"batch_size": 2, "end": {"max_steps": 1}, "parallelism": parallelism, "model": sizes}
    return TrainSettings.model_validate(values)


def problems(parallelism: Any) -> list[str]:
    key = CaseKey(model="llama", framework="pytorch", hardware="X1", nnodes=1, nproc=8)
    supported = load_framework("pytorch").parallelism
    return [str(each) for each in parallelism_problems(settings(parallelism), key, supported, SPLITS, "run.yaml")]


FIT = ("ddp", "fsdp2", "hsdp", "tp=8", {"fsdp": 4, "tp": 2}, {"dp": 2, "fsdp": 2, "tp": 2}, "pp=8", "cp=4")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *((given, "") for given in FIT),
        ({"tp": 3}, "tp=3 does not divide model.num_heads 32, model.num_kv_heads 8, model.intermediate_size 14336"),
        ({"tp": 16}, "tp=16 does not divide model.num_kv_heads 8 (tp that fits: 1, 2, 4, 8)"),
        ({"fsdp": 3}, "fsdp=3 needs a multiple of 3 ranks, the job has 8 (degrees that divide 8 ranks: 1, 2, 4, 8)"),
        ({"dp": 2, "tp": 2}, "dp=2,tp=2 needs 4 ranks, the job has 8"),
        ({"cp": 8}, "cp=8 (2 pieces a rank) does not divide model.seq_length 8 (cp that fits: 1, 2, 4)"),
        ({"fsdp": 8, "ep": 8}, "the case 'llama' cannot be split by ep (its axes: dp, fsdp, tp, pp, cp)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers_that_do(given: Any, expected: str) -> None:
    found = problems(given)
    assert (expected in " ".join(found), bool(found)) == (True, bool(expected))


def test_a_mesh_is_written_and_read_as_text() -> None:
    given = settings({"fsdp": 4, "tp": 2})
    dumped = given.model_dump(mode="json")
    assert dumped["parallelism"] == "fsdp=4,tp=2"
    assert TrainSettings.model_validate(dumped) == given


def resolved_in(case: str, **given: Any) -> tuple[Resolved[TrainSettings], TrainCaseSpec]:
    """Return the settings of a case with those of a run file."""
    train = load_case(case).train
    assert train is not None
    base, layer = Layer.of("case.yaml", train.settings), Layer.of("run.yaml", given)
    return resolve(TrainSettings, base, [layer], mutable=train.mutable, is_open=False), train


def mixture(parallelism: str, num_ranks: int) -> list[str]:
    """Problems of a mesh for the eight experts of ``moe_mini``."""
    resolved, train = resolved_in("moe_mini", parallelism=parallelism)
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


def test_settings_of_a_pipeline_go_with_pp_only() -> None:
    resolved, _ = resolved_in("llama_mini", parallelism="tp=2", pipeline={"schedule": "gpipe"})
    (problem,) = unused_settings(resolved.provenance, ("run.yaml",))
    expected = "pipeline.schedule: applies to parallelism pp, found tp=2 (set parallelism=pp=2, for example)"
    assert expected in str(problem)


def test_ranks_of_a_pipeline_and_of_split_layers_have_the_same_samples() -> None:
    mesh = Mesh(dp=2, pp=2, fsdp=2, tp=2)
    assert [mesh.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert settings("fsdp=2,tp=4").samples_per_step(8) == 2 * 2
    assert settings("fsdp2").samples_per_step(8) == 2 * 8
    assert mesh_of("hsdp", 8, 4) == Mesh(dp=2, fsdp=4)


def zero(**given: Any) -> Mapping[str, Any]:
    """Settings of ZeRO over those of a case that lets ``parallelism`` change, as a run file gives them."""
    resolved, _ = resolved_in("llama_mini", parallelism="deepspeed", zero=given)
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
