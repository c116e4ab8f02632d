"""Runs from wherever people point, what is wrong with them, and exports: TensorBoard, MLflow, MLLOG and FlagPerf."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.compat.flagperf.old_run import is_run, read_run
from accelmark.results.comparison import compare
from accelmark.results.export import RULESET, to_mlflow, to_tensorboard, write_flagperf_logs, write_mllog
from accelmark.results.figures import FigureName as F
from accelmark.results.sources import load_source, open_sources
from accelmark.results.store.bundle import SUFFIX, check_manifest, write_bundle, write_manifest
from accelmark.results.store.files import write_atomic
from accelmark.results.store.loaded_run import load_run
from accelmark.results.table import rows_of
from accelmark.run.record.directory import measure_run
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.log.perflog import PerfLogReader, PerfLogWriter
from accelmark.train.loop.process import StopRequest
from accelmark.train.loop.rank import run_rank
from tests.made_run import Made, change_json, loaded, make_run, measured_run
from tests.train.jobs import make_job, node_dir_of

RECORDED = Path(__file__).parent / "recorded" / "search"
"""Recorded from `accelmark automl run` on two cores of an AMD EPYC, 2026-11-21: three trials on 3,000 pictures."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    measured_run(root / "run", rounds=2)
    write_bundle(root / "run", root / f"packed{SUFFIX}")
    write_bundle(root / "run", root / "renamed.tar")
    return root


def test_copies_of_a_run_below_a_directory_are_one_run(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places, tmp_path / "runs")
    export = tmp_path / "runs" / "mlruns" / "0" / "abc" / "artifacts"
    export.mkdir(parents=True)
    for name in ("summary.json", "plan.json"):  # what an export to MLflow logs
        shutil.copy(places / "run" / name, export)
    runs, problems = open_sources([tmp_path])
    assert problems == []
    assert [Path(str(row["path"])).name for row in rows_of(runs)] == ["run"]
    shutil.rmtree(tmp_path / "runs" / "run")
    runs, problems = open_sources([tmp_path])
    assert ([run.path.suffix for run in runs], problems) == ([".tar"], [])


def test_a_run_of_the_same_name_with_other_results_is_no_copy(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "run", tmp_path / "run")
    other = shutil.copytree(places / "run", tmp_path / "other") / "summary.json"
    changed = json.loads(other.read_text())
    changed["cases"][0]["figures"]["throughput_train"]["mean"] *= 2
    other.write_text(json.dumps(changed))
    assert [run.path.name for run in open_sources([tmp_path])[0]] == ["other", "run"]
    assert len(open_sources([places / "run", places / f"packed{SUFFIX}"])[0]) == 2, "named paths are kept"


def test_a_result_with_facts_of_an_odd_type_is_named(places: Path, tmp_path: Path) -> None:
    shutil.copytree(places / "run", tmp_path / "run")
    first, _ = sorted(tmp_path.glob("run/*/round*/result.json"))
    result = json.loads(first.read_text())
    result["environment"]["started"]["hooks"] = "none"
    first.write_text(json.dumps(result))
    runs, problems = open_sources([tmp_path])
    assert [len(run.rounds) for run in runs] == [1]
    assert any(problem.startswith(f"{first}: ") for problem in problems)


def test_an_edited_bundle_is_named_and_the_others_show(places: Path, tmp_path: Path) -> None:
    for name in ("run", f"packed{SUFFIX}"):
        source = places / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    raw = (places / "renamed.tar").read_bytes()
    at = raw.index(b'"throughput_train":{"value":') + 28
    digit = b"1" if raw[at : at + 1] != b"1" else b"2"
    (tmp_path / f"edited{SUFFIX}").write_bytes(raw[:at] + digit + raw[at + 1 :])
    (tmp_path / f"torn{SUFFIX}").write_bytes(raw[: len(raw) // 3])
    (tmp_path / f"noise{SUFFIX}").write_bytes(b"no tar at all")
    (tmp_path / "unrelated.tar").write_bytes(b"somebody else's")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "plan.json").write_text("{}")
    runs, problems = open_sources([tmp_path])
    assert [run.path.name for run in runs] == ["run"]
    for name in ("edited", "torn", "noise"):
        assert sum(f"{name}{SUFFIX}" in problem for problem in problems) == 1
    assert any("was edited" in problem for problem in problems)
    assert any("in progress, or was interrupted" in problem for problem in problems)
    with pytest.raises(RequestError, match="is no run"):
        open_sources([tmp_path / "unrelated.tar"])


def test_a_search_is_a_row_with_its_own_figures() -> None:
    run = load_source(RECORDED)
    [row] = rows_of([run])
    report = json.loads((RECORDED / "report.json").read_text())
    assert (row["task"], row["case"], row["chip"]) == ("automl", "automl-fashion-mnist:pytorch", "CPU")
    assert row["search_score"] == report["final"]["score"]
    assert row["search_held_out_error"] == report["final"]["error"]
    assert row["energy_j"] is None
    reason = run.rounds["search"].figures[F.ENERGY].reason
    assert reason is not None
    assert "powercap" in reason


def search(place: Path, *, report: dict[str, object] | None = None, config: dict[str, object] | None = None) -> Path:
    """Copy the recorded search with some entries changed."""
    shutil.copytree(RECORDED, place)
    for name, changes in (("report.json", report), ("automl.json", config)):
        change_json(place / name, **(changes or {}))
    return place


@pytest.mark.parametrize(
    ("report", "config"), [({"counting": "aiperf-v1"}, {}), ({}, {"network": "resnet50"}), ({}, {"dataset": {}})]
)
def test_searches_of_other_rules_networks_or_data_are_not_comparable(
    tmp_path: Path, report: dict[str, object], config: dict[str, object]
) -> None:
    runs, _ = open_sources([RECORDED, search(tmp_path / "other", report=report, config=config | {"seed": 7})])
    with pytest.raises(RequestError, match="not comparable"):
        compare(runs)
    [pair] = compare(runs, force=True).pairs
    assert pair.not_comparable
    assert {found.figure for found in pair.differences} >= {F.SEARCH_SCORE, F.SEARCH_REGULATED_SCORE, F.SEARCH_TIME}
    assert ("settings", "seed") in {(fact.area, fact.name) for fact in pair.differing}


def test_a_private_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    write_atomic(tmp_path / "private", "x", private=True)
    write_atomic(tmp_path / "open", "x")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "open").stat().st_mode & 0o004


old_libraries = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@old_libraries
def test_tensorboard_reads_the_curves_figures_and_settings_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = loaded(tmp_path / "run", rounds=1)
    [place] = to_tensorboard(run, tmp_path / "tb")
    read = EventAccumulator(str(place))
    read.Reload()
    [result] = run.rounds.values()
    losses = [(point.step, point.value) for point in result.curves["loss"] if point.value is not None]
    assert [event.step for event in read.Scalars("loss")] == [step for step, _ in losses]
    assert [event.value for event in read.Scalars("loss")] == pytest.approx([value for _, value in losses], rel=1e-6)
    mfu = result.figures["mfu"].value  # type: ignore[index]
    assert read.Scalars("figures/mfu")[0].value == pytest.approx(mfu, rel=1e-6)
    assert b"batch_size" in read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    with pytest.raises(RequestError, match="already exists"):
        to_tensorboard(run, tmp_path / "tb")


@old_libraries
def test_mlflow_holds_parameters_metrics_and_artefacts_of_runs_bundles_and_searches(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    run = loaded(tmp_path / "run", rounds=1)
    bundle, uri = tmp_path / "run.tar", (tmp_path / "ml").as_uri()
    write_bundle(run.path, bundle)
    (run.path / "plan.json").write_bytes(b"{\xff}")
    [run_id] = to_mlflow(run, uri)
    client = tracking.MlflowClient(tracking_uri=uri)
    found = client.get_run(run_id)
    [result] = run.rounds.values()
    assert found.data.params["batch_size"] == "8"
    assert found.data.metrics["figures/mfu"] == pytest.approx(result.figures["mfu"].value)  # type: ignore[index]
    assert found.data.tags["accelmark.verdict"] == "VALID"
    assert len(client.get_metric_history(run_id, "loss")) == len(result.curves["loss"])
    assert {"result.json", "summary.json", "plan.json"} <= {entry.path for entry in client.list_artifacts(run_id)}
    [packed] = to_mlflow(load_source(bundle), uri)
    assert {"result.json", "summary.json"} <= {entry.path for entry in client.list_artifacts(packed)}
    [searched] = to_mlflow(load_source(RECORDED), uri)
    assert client.get_run(searched).data.params["network"] == "small28"
    assert "figures/search_score" in client.get_run(searched).data.metrics


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose one round the driver really trained: the tests' tiny case, two epochs and a half."""
    directory = tmp_path_factory.mktemp("trained")
    settings = {"end.max_steps": 80, "evaluate.every_epochs": 1, "optimizer.lr": 0.001}
    job = make_job(directory, settings)
    round_dir = directory / "run" / "tiny" / "round1"
    node = node_dir_of(round_dir)
    (round_dir / "job.json").write_text(job.model_dump_json())
    descriptor = os.open(node / "rank0.out.log", os.O_WRONLY | os.O_CREAT)
    try:
        assert run_rank(job, PerfLogWriter(0, descriptor), time.monotonic(), StopRequest(wanted=False)) == 0
    finally:
        os.close(descriptor)
    (directory / "run" / "plan.json").write_text("{}")
    write_manifest(directory / "run")
    return directory / "run"


def test_the_figures_of_a_real_run_flow_into_its_lines_and_the_checker_passes(trained: Path, tmp_path: Path) -> None:
    (path,) = write_mllog(trained)
    values = {line["key"]: line["value"] for line in lines_of(path)}
    assert (values["train_samples"], values["eval_samples"]) == (512, 101)
    assert values["global_batch_size"] == 16
    blocks = [line["metadata"] for line in lines_of(path) if line["key"] == "block_start"]
    assert [(one["first_epoch_num"], one["epoch_count"], one["samples_count"]) for one in blocks] == [
        (1, 1, 512), (2, 1, 512), (3, 0.5, 256),
    ]  # fmt: skip
    accuracies = [line["metadata"]["epoch_num"] for line in lines_of(path) if line["key"] == "eval_accuracy"]
    assert accuracies == [1, 2, 2.5]
    times = [line["time_ms"] for line in lines_of(path)]
    assert times == sorted(times)
    (path,) = write_mllog(trained, benchmark="resnet")
    done = check(path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("model", ["resnet50", "bert"])
def test_the_compliance_checker_passes_on_a_finished_run(tmp_path: Path, model: str) -> None:
    run = make_run(tmp_path / "run", Made(model=model))
    measure_run(run)
    shown = CliRunner().invoke(app, ["report", str(run), "--mllog"], catch_exceptions=False).output.split()
    path = Path(shown[0])
    assert shown == [str(path), str(run / "report.html")]
    assert check_manifest(run) == []
    done = check(path, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_that_did_not_finish_has_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for log in run.rglob("rank0.out.log"):
        log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(RunError, match="nothing to export as MLLOG"):
        write_mllog(run)


@pytest.mark.parametrize("is_continued", [True, False])
def test_a_resumed_round_begins_with_its_first_attempt(tmp_path: Path, is_continued: bool) -> None:
    run = make_run(tmp_path / "run", Made())
    log = next(run.rglob("rank0.out.log"))
    first = log.read_text()
    earlier = log.parents[1] / "attempt1" / log.parent.name / log.name
    earlier.parent.mkdir(parents=True)
    earlier.write_text(first.replace('"completed"', '"cancelled"'))
    later = [json.loads(line.partition("] ")[2]) for line in first.splitlines()]
    for record in later:
        record["metadata"]["time_ms"] += 60_000
        if record["event"] == "TRAIN_START":
            record["value"] = {"resumed": is_continued}
    log.write_text("".join(f"[PerfLog] {json.dumps(record)}\n" for record in later))
    lines = {line["key"]: line["time_ms"] for line in lines_of(write_mllog(run)[0])}
    names = ("TRAIN_START", "TRAIN_END")
    start, end = (next(each["metadata"]["time_ms"] for each in later if each["event"] == name) for name in names)
    assert lines["run_start"] == int(start) - (60_000 if is_continued else 0)
    stops = [line for line in lines_of(write_mllog(run)[0]) if line["key"] == "run_stop"]
    assert [line["time_ms"] for line in stops] == [int(end)]


def check(path: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", RULESET]
    command += ["--log_output", str(directory / "checker.log"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_flagperfs_names_are_written_beside_the_log_on_request(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(windows=3))
    measure_run(run)
    assert CliRunner().invoke(app, ["report", str(run), "--flagperf-names"]).exit_code == 0
    assert check_manifest(run) == []
    for path in write_flagperf_logs(run):
        events = list(PerfLogReader(path))
        steps = [event.value for event in events if event.event == "STEP_END"]
        assert [step["end_training"] for step in steps] == [False, False, True]
        assert all(step["seq/s"] > 0 for step in steps)
        finished = events[-1].value
        assert finished["training_tokens_per_second"] == finished["throughput_raw"]
        assert {f"final_{name}" for name in finished["final_metrics"]} <= finished.keys()


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
    values = {name: case.result.mean_of(name) for name in F}
    assert {name: number for name, number in values.items() if number is not None} == {
        "throughput_whole": 579.0933420700227, "final_metric": 0.920166015625, "final_loss": 3.066718101501465,
        "e2e_time_s": 1661.6114165782928, "raw_train_time_s": 1501.713, "init_time_s": 148.937,
    }  # fmt: skip
    (result,) = case.rounds
    assert (result.unit, result.num_steps, result.num_samples, result.num_devices) == ("sequence", 3397, 869632, 8)
    assert result.curves["throughput"][0].value == 822.455385237589

    key = old_run(tmp_path / "by_key", "swin_transformer:pytorch_1.8:BI-V100:1:8:1")
    assert f"{RUN}/swin-pytorch_1.8-BI-V100x1x8/round1/result.json" in read_run(key)
