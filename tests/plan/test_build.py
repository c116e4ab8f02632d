from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from accelmark.plan.build import build_plan
from accelmark.plan.plan import Plan
from accelmark.plan.request import DataDirs, Detected
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import DataError, RequestError, SpecError
from accelmark.spec.job import TrainJob
from accelmark.spec.model import parse
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import load_vendor
from accelmark.spec.runfile import RunSpec


def no_data(case: CaseSpec, given: Path | None) -> Mapping[str, Path]:
    return {}


def plan(
    run: dict[str, Any],
    *,
    hosts: int = 1,
    devices: int | None = 2,
    with_ports: int = 0,
    data_dirs: DataDirs = no_data,
    options: Mapping[str, Any] | None = None,
    others: tuple[str, ...] = (),
    allow_missing_data: bool = False,
    **command_line: Any,
) -> Plan:
    chips = load_vendor("acme").chips
    return build_plan(
        parse(RunSpec, run, "run.yaml"),
        cluster=ClusterSpec(
            launcher="ssh" if hosts > 1 else "local",
            hosts=tuple(
                HostSpec(address=f"h{n}" if hosts > 1 else "localhost", service_ports=(2222,) if n < with_ports else ())
                for n in range(hosts)
            ),
            **({"vendor": "acme"} | dict(options or {})),
        ),
        detected=Detected(vendor="acme", hardware="X1", chip=chips[0], num_devices=devices, others=others),
        data_dirs=data_dirs,
        created_at="2026-01-01T00:00:00Z",
        where="run.yaml",
        command_line=command_line,
        allow_missing_data=allow_missing_data,
    )


def test_remote_hosts_without_a_vendor_are_not_taken_for_this_machines_chips(plugins: Path) -> None:
    with pytest.raises(
        RequestError,
        match=r"run.yaml: cluster 'local' names no vendor.*add 'vendor: NAME'.*acme is this machine's",
    ):
        plan({"cases": [{"key": "toy:pytorch:X1:2:1"}]}, hosts=2, options={"vendor": None})
    assert plan({"vendor": "acme", "cases": [{"key": "toy:pytorch:X1:2:1"}]}, hosts=2, options={"vendor": None}).jobs


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
    assert [warning.partition(": ")[0] for warning in planned.warnings] == [
        str(extension.parents[1] / "images"),
        str(extension.parent / "top-pytorch"),
        str(extension / "confg.yaml"),
        "/missing",
    ]


def test_all_problems_of_every_key_are_reported_at_once(plugins: Path) -> None:
    run = {
        "cases": [
            {"key": "tou"},
            {"key": "toy:pytorhc"},
            {"key": "toy:pytorch:X1:2:1"},
            {"key": "toy:pytorch:X1:1:9"},
            {"key": "toy:pytorch:X1:1:2", "settings": {"seed": 9}},
            {"key": "toy:pytorch:X1:1:1:0"},
        ]
    }
    with pytest.raises(SpecError) as caught:
        plan(run)
    text = str(caught.value)
    for expected in (
        "did you mean 'toy'?",
        "did you mean 'pytorch'?",
        "requests 2 hosts, the cluster 'local' has 1",
        "requests 9 devices a host, this one has 2",
        "seed: is not mutable",
        "repeat '0'",
    ):
        assert expected in text
    assert len(caught.value.problems) == 6


def test_an_open_plan_says_so_in_every_job(plugins: Path) -> None:
    planned = plan({"open": True, "cases": [{"key": "toy", "settings": {"model": {"width": 8}}}]})
    assert planned.open
    assert planned.jobs[0].job.open
    assert planned.jobs[0].job.provenance["model.width"].forced


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
    with pytest.raises(
        SpecError, match=r"precision: is not mutable.*rules own fixes it; may change: model\.width, batch_size"
    ):
        plan({"rules": RULES, "cases": [{"key": "toy", "settings": {"precision": "fp16"}}]})


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


def test_rules_of_training_are_refused_for_another_task(plugins: Path) -> None:
    with pytest.raises(SpecError, match="the rules own are of training"):
        plan({"rules": RULES, "cases": [{"key": "toy", "task": "infer"}]})


def test_another_hosts_address_is_not_measured_here(plugins: Path) -> None:
    cluster = ClusterSpec(hosts=(HostSpec(address="192.0.2.7", label="gpu-node"),))
    with pytest.raises(SpecError, match=r"launcher: local .*192\.0\.2\.7 .*slurm, ssh"):
        build_plan(
            parse(RunSpec, {"cases": [{"key": "toy:pytorch:X1:1:1"}]}, "run.yaml"),
            cluster=cluster,
            detected=Detected(vendor="acme", hardware="X1", chip=None, num_devices=2),
            data_dirs=no_data,
            created_at="2026-01-01T00:00:00Z",
            where="run.yaml",
        )


def test_a_plan_that_allows_missing_data_has_all_settings_and_lists_what_is_missing(plugins: Path) -> None:
    def lacking(case: CaseSpec, given: Path | None) -> Mapping[str, Path]:
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
        ({"compile": "reduce-overhead", "gradient_accumulation_steps": 2}, "compile", "compile=default"),
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
    run = {"open": True, "cases": [{"key": "toy", "settings": settings}]}
    with pytest.raises(SpecError) as refused:
        plan(run)
    problems = {problem.key: problem for problem in refused.value.problems}
    assert hint in (problems[key].hint or "")
    alone = {name: value for name, value in settings.items() if name != key}
    assert plan({"open": True, "cases": [{"key": "toy", "settings": alone}]}).jobs


def test_deepspeed_is_required_where_it_is_used(plugins: Path) -> None:
    def needs(**settings: Any) -> list[str]:
        planned = plan({"open": True, "cases": [{"key": "toy", "settings": settings}]}).jobs[0].requires
        return [need.requirement for need in planned if need.needed_by.startswith("parallelism=deepspeed")]

    assert needs() == []
    assert needs(parallelism="deepspeed") == ["accelmark[deepspeed]"]


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
