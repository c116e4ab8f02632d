"""From the log of an inference to figures, verdict and page; the first test runs it as a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelmark.report.charts import latency_chart
from accelmark.report.run_page import render_page
from accelmark.results.figures import FigureName, figures_of
from accelmark.results.rounds.summary import round_result
from accelmark.results.store.loaded_run import load_run
from accelmark.run.record.directory import measure_run
from accelmark.spec.job import InferJob, JobSpec, NodeExit, RankExit
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import PerfLogWriter
from accelmark.spec.log.records import Ceilings, Rate
from accelmark.spec.plugins.vendor import Chip, Peaks
from accelmark.spec.settings.inference import Note


@pytest.fixture
def run_dir(tmp_path: Path, in_a_process: Any, take: Any, make_job: Any) -> Any:
    """Return a function that runs a job, by default in this process, and lays the files out as a run does."""

    def here(job: JobSpec) -> tuple[int, str]:
        log = tmp_path / "here.log"
        with log.open("wb") as file:
            writer = PerfLogWriter(0, file.fileno())
            writer.event(Event.INIT_START, {"pid": 1, "job": "job.json", "process_start_mono_ms": 0.0})
            ran = take(job)
            for name, value in ran.events:
                writer.event(name, value)
            writer.event(Event.FINISHED, ran.finished)
        return int(ran.finished.state != "completed"), log.read_text()

    def made(notes: tuple[Note, ...] = (), *, own_process: bool = False, **settings: Any) -> Path:
        chip = Chip(name="cpu", device_name="x", peaks=Peaks(fp32=0.5), source="made up for tests")
        ceilings = Ceilings(
            device_type="cpu", device_name="x", world_size=1, framework="pytorch", measured_at="",
            matmul={"fp32": Rate(value=0.25, unit="TFLOP/s")},
        )  # fmt: skip
        job: JobSpec = make_job(**settings).model_copy(update={"chip": chip, "ceilings": ceilings})
        assert isinstance(job.work, InferJob)
        job = job.model_copy(update={"work": job.work.model_copy(update={"notes": notes})})
        code, text = in_a_process(job)[::2] if own_process else here(job)
        node_dir = tmp_path / "runs" / "r" / "tiny" / "round1" / "here_noderank0"
        node_dir.mkdir(parents=True)
        (node_dir / "rank0.out.log").write_text(text)
        (node_dir.parent / "job.json").write_text(job.model_dump_json())
        state: Any = "succeeded" if code == 0 else "failed"
        ended = NodeExit(
            host="here",
            noderank=0,
            state=state,
            reason=None,
            started_at="2026-01-01T00:00:00Z",
            duration_s=1,
            ranks=(RankExit(rank=0, local_rank=0, state=state, exit_code=code),),
        )
        (node_dir / "exit.json").write_text(ended.model_dump_json())
        return tmp_path / "runs" / "r"

    return made


def test_a_run_gives_figures_a_verdict_and_a_page(run_dir: Any) -> None:
    path = run_dir(own_process=True, compiler="eager", batch_size=4, flops="2*1000")
    (log,) = path.rglob("rank0.out.log")
    assert '"FINISHED"' in log.read_text().rstrip().splitlines()[-1], "the last event"
    result = round_result(path / "tiny" / "round1")
    assert result.state == "succeeded"
    assert set(result.figures) == set(figures_of("infer"))
    values = {name: figure.value for name, figure in result.figures.items()}
    core = values[FigureName.INFERENCE_CORE]
    assert core is not None
    assert values[FigureName.MFU] == pytest.approx(core * 2000 / 0.5e12)
    assert values[FigureName.MFU_MEASURED] == pytest.approx(core * 2000 / 0.25e12), "the rate that the probe measured"
    assert values[FigureName.METRIC_DIFFERENCE] == 0
    assert values[FigureName.ENGINE_METRIC] == values[FigureName.FRAMEWORK_METRIC] is not None
    assert "inputs, the same in both" in str(result.figures[FigureName.ENGINE_METRIC].reason)
    assert result.figures[FigureName.LATENCY_P999].value is None
    assert "1000 full batches" in str(result.figures[FigureName.LATENCY_P999].reason)
    assert result.inference is not None
    assert len(result.inference.stages) == 7
    assert all(figure.value is not None or figure.reason for figure in result.figures.values())
    assert measure_run(path).cases[0].variant == "eager fp32 batch 4"
    page = render_page(load_run(path))
    assert "Inference engine" in page
    assert '<div class="chart">' in page
    assert latency_chart([("eager", result.inference.latency_curve)]) is not None
    assert latency_chart([("eager", ((0.5, 0.0), (1.0, -0.1)))]) is None


def test_a_vendors_settings_are_reported_and_only_unknown_names_warn(run_dir: Any) -> None:
    changed = Note(severity="info", where="infer.yaml", key="batch_size", what="8 instead of 100")
    unknown = Note(severity="warning", where="infer.yaml", key="ways", what="is no setting of the case")
    path = run_dir(notes=(changed, unknown), compiler=None)
    found = {
        finding.actual: (finding.severity, finding.rule) for finding in round_result(path / "tiny/round1").findings
    }
    assert found[str(changed)] == ("info", "vendor-setting")
    assert found[str(unknown)] == ("warning", "rank-warning")


def test_a_run_with_nan_is_invalid_and_says_why(run_dir: Any) -> None:
    (case,) = measure_run(run_dir(compiler="eager", parameters={"nan": True})).cases
    assert case.state == "succeeded"
    assert case.verdict == "INVALID"
    assert any("NaN or infinite outputs" in reason for reason in case.reasons)


def test_a_failed_run_keeps_what_was_measured_before(run_dir: Any) -> None:
    path = run_dir(compiler="openvinno")
    result = round_result(path / "tiny" / "round1")
    assert result.state == "failed"
    assert result.figures[FigureName.VALIDATION_CORE].value is not None
    assert "step compile failed" in str(result.figures[FigureName.INFERENCE_CORE].reason)
    assert not [name for name, figure in result.figures.items() if "training" in str(figure.reason)]


def test_figures_that_a_switch_skipped_are_null_with_the_switch_as_reason(run_dir: Any) -> None:
    result = round_result(run_dir(compiler=None) / "tiny" / "round1")
    assert result.figures[FigureName.COMPILE_TIME].reason == "compiler is null"
    assert result.figures[FigureName.INFERENCE_METRIC].reason == "compiler is null"
