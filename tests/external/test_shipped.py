"""The trainers of this tree: what they read in published logs, and the commands that they are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelmark.plan.build import build_plan
from accelmark.plan.plan import Plan
from accelmark.plan.request import Detected
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import RequestError, SpecError
from accelmark.spec.job import ExternalJob
from accelmark.spec.log.perflog import PERFLOG_PREFIX, PerfLogWriter
from accelmark.spec.model import parse
from accelmark.spec.plugins.framework import RankPlace
from accelmark.spec.runfile import RunSpec
from accelmark.train.external.rank import LogTranslator, trainer_command
from accelmark.train.loop.ends import End
from accelmark.train.loop.window import RunTotals

LOGS = yaml.safe_load(Path(__file__).with_name("logs.yaml").read_text())


def plan(key: str, **settings: Any) -> Plan:
    return build_plan(
        parse(RunSpec, {"open": True, "cases": [{"key": key, "settings": settings}]}, "run.yaml"),
        cluster=ClusterSpec(vendor="nvidia"),
        detected=Detected(vendor="nvidia", hardware="H100", chip=None, num_devices=8),
        data_dirs=lambda case, given: dict.fromkeys(case.data_names, Path("/data")),
        created_at="2026-01-01T00:00:00Z",
        where="run.yaml",
    )


def events_of(trainer: str, lines: list[str], directory: Path) -> tuple[list[dict[str, Any]], End]:
    """Return the events that a trainer's log lines become, read a second apart, and the end of training."""
    work = plan(f"llama3_1_8b:{trainer}:H100:1:8", parallelism="ddp").jobs[0].job.work
    assert isinstance(work, ExternalJob)
    with (directory / "log").open("wb") as log:
        translator = LogTranslator(
            work, 8, PerfLogWriter(0, log.fileno()), RunTotals(process_start=0.0, job=work), resumed=False
        )
        for second, line in enumerate(lines, start=100):
            translator.line(line, int(second * 1e9))
        translator.close()
    found = (directory / "log").read_text().splitlines()
    return [json.loads(line.removeprefix(PERFLOG_PREFIX)) for line in found], translator.end()


@pytest.mark.parametrize(
    ("log", "trainer", "steps", "losses"),
    [
        ("torchtitan", "torchtitan", [4, 5], [7.62585, 7.07623]),
        ("torchtitan_h100", "torchtitan", [200, 210], [6.1384, 6.0388]),
        ("megatron-lm", "megatron-lm", [85, 86], [1.831795, 1.831625]),
        ("megatron-llm", "megatron-lm", [122], [2.50422]),
    ],
)
def test_steps_of_published_logs_are_read(
    tmp_path: Path, log: str, trainer: str, steps: list[int], losses: list[float]
) -> None:
    events, _ = events_of(trainer, LOGS[log]["lines"], tmp_path)
    windows = [event["value"] for event in events if event["event"] == "STEP_END"]
    assert [window["global_steps"] for window in windows] == steps
    assert [window["loss"] for window in windows] == losses


def test_samples_times_and_rates_of_megatron_are_read(tmp_path: Path) -> None:
    events, _ = events_of("megatron-lm", LOGS["megatron-lm"]["lines"], tmp_path)
    last = [event["value"] for event in events if event["event"] == "STEP_END"][-1]
    assert (last["num_trained_samples"], last["step_ms"], last["learning_rate"]) == (11008, [5695.8], 1.72e-05)


def test_a_validation_is_no_step(tmp_path: Path) -> None:
    """By the formats in the sources of both (torchtitan 0.3.0); no published log with such a line was found."""
    lines = {
        "torchtitan": "- INFO - validate step: 10  loss:  5.1234  memory: 49.66GiB(52.28%)  tps: 5,593",
        "megatron-lm": " validation loss at iteration 10 | lm loss value: 5.123400E+00 | lm loss PPL: 1.679051E+02 | ",
    }
    for trainer, line in lines.items():
        events, _ = events_of(trainer, [line], tmp_path)
        (evaluation,) = [event["value"] for event in events if event["event"] == "EVALUATE"]
        assert evaluation["metrics"] == {"eval_loss": 5.1234}
        assert not [event for event in events if event["event"] == "STEP_END"]


def command_of(planned: Plan) -> str:
    job = planned.jobs[0].job
    assert isinstance(job.work, ExternalJob)
    return " ".join(trainer_command(job, job.work, RankPlace(0, 0, 8, 8)))


def test_a_mesh_and_the_global_batch_become_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_PATH", "/opt/megatron")
    titan = command_of(plan("llama3_1_8b:torchtitan:H100:1:8", parallelism={"fsdp": 4, "tp": 2}, batch_size=3))
    assert "--parallelism.data_parallel_shard_degree 4 --parallelism.tensor_parallel_degree 2" in titan
    assert "--training.global_batch_size 24" in titan  # 3 samples x 4 groups of ranks x accumulation of 2
    assert "--training.local_batch_size 3" in titan
    megatron = command_of(plan("llama3_1_8b:megatron-lm:H100:1:8", parallelism="tp=2,pp=2"))
    assert "/opt/megatron/pretrain_gpt.py" in megatron
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 1" in megatron
    assert "--global-batch-size 8 " in megatron
    assert "--num-query-groups 8" in megatron
    assert "--bf16" in megatron


def test_what_a_trainer_lacks_is_refused_at_planning_or_named_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="fsdp2 is refused by megatron-lm"):
        plan("llama3_1_8b:megatron-lm:H100:1:8", parallelism="fsdp2")
    with pytest.raises(SpecError, match=r"tp=16 does not divide model.num_kv_heads 8 \(tp that fits: 1, 2, 4, 8\)"):
        plan("llama3_1_8b:megatron-lm:H100:1:8", parallelism="tp=16")
    with pytest.raises(SpecError, match="the trainer torchtitan has no argument for it"):
        plan("llama3_1_8b:torchtitan:H100:1:8", **{"optimizer.lr": 1e-3})
    monkeypatch.delenv("MEGATRON_PATH", raising=False)
    with pytest.raises(RequestError, match=r"\{env:MEGATRON_PATH\} has no value; set it in the environment of"):
        command_of(plan("llama3_1_8b:megatron-lm:H100:1:8", parallelism="ddp"))
