"""Logs of a run of FlagPerf's are read beside runs of AccelMark; the lines have the form of its documents' example."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.compat.flagperf.old_run import is_run, read_run
from accelmark.results.figures import FigureName
from accelmark.results.store.loaded_run import load_run

PLACE = (
    '"metadata": {"file": "/workspace/flagperf/training/benchmarks/cpm/pytorch/run_pretraining.py", "lineno": 127, '
    '"time_ms": 1669034171032, "rank": 0}}'
)
LOG = f"""some output
[PerfLog] {{"event": "STEP_END", "value": {{"loss": 2.679504871368408, "embedding_average": NaN, "epoch": 1, \
"end_training": true, "global_steps": 3397, "num_trained_samples": 869632, "seq/s": 822.455385237589}}, {PLACE}
[PerfLog] {{"event": "EVALUATE", {PLACE}
[PerfLog] {{"event": "FINISHED", "value": {{"e2e_time": 1661.6114165782928, "training_sequences_per_second": \
579.0933420700227, "converged": true, "final_loss": 3.066718101501465, "final_mlm_accuracy": 0.920166015625, \
"raw_train_time": 1501.713, "init_time": 148.937}}, {PLACE}
"""
RUN = "run20221121191924"


def old_run(directory: Path, case: str = "CPM_TORCH_DEMO_A100_1X8", *, log: str = LOG) -> Path:
    node = directory / RUN / case / "round1" / "10.1.2.2_noderank0"
    node.mkdir(parents=True)
    for rank in range(8):
        (node / f"rank{rank}.out.log").write_text(log)
    for name in ("cpu_monitor.log", "mem_monitor.log", "nvidia_monitor.log", "start_pytorch_task.log"):
        (node / name).touch()
    return directory / RUN


def test_an_old_run_has_the_figures_of_its_log_and_is_open(tmp_path: Path) -> None:
    assert is_run(old_run(tmp_path))
    for name, text in read_run(tmp_path / RUN).items():
        (tmp_path / "read" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "read" / name).write_text(text)
    run = load_run(tmp_path / "read" / RUN)
    (case,) = run.cases
    assert (str(case.result.key), run.summary.vendor) == ("cpm:pytorch:A100:1:8:1", "nvidia")
    assert (case.result.verdict, case.result.state, case.result.converged) == ("OPEN", "succeeded", True)
    values = {name: case.result.mean_of(name) for name in FigureName}
    assert {name: number for name, number in values.items() if number is not None} == {
        "throughput_whole": 579.0933420700227, "final_metric": 0.920166015625, "final_loss": 3.066718101501465,
        "e2e_time_s": 1661.6114165782928, "raw_train_time_s": 1501.713, "init_time_s": 148.937,
    }  # fmt: skip
    (result,) = case.rounds
    assert (result.unit, result.num_steps, result.num_samples, result.num_devices) == ("sequence", 3397, 869632, 8)
    assert result.curves["throughput"][0].value == 822.455385237589


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("bert:pytorch_1.8:A100:1:8:1", "bert:pytorch_1.8:A100:1:8:1"),
        ("swin_transformer:pytorch_1.8:BI-V100:1:8:1", "swin:pytorch_1.8:BI-V100:1:8:1"),
    ],
)
def test_a_directory_named_by_a_key_names_the_case(tmp_path: Path, case: str, key: str) -> None:
    assert f"{RUN}/{key.rpartition(':1:8:1')[0].replace(':', '-')}x1x8/round1/result.json" in read_run(
        old_run(tmp_path, case)
    )
