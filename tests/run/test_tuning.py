"""A search for the best settings as a run: its next jobs from results on disk, its budget, and what it reports."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from accelmark.audit.verdict import audit_case
from accelmark.cli.runs import write_settings_file
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.plan.tuning import Budget, settings_of
from accelmark.report.run_page import render_page
from accelmark.results.figures import FigureName, figures_of
from accelmark.results.rounds.summary import summarise
from accelmark.results.schema import Figure, InferenceRound, RoundResult, finding
from accelmark.results.store.loaded_run import load_run
from accelmark.results.table import rows_of
from accelmark.results.tuning import tuned_result
from accelmark.run.controller.coordinator import continued
from accelmark.run.display.displays import Board, heading
from accelmark.run.display.summary import print_summary
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.registry import record_start, register_plan
from accelmark.run.record.states import JobStatus
from accelmark.spec.job import NodeExit
from tests.made_run import change_json
from tests.plan.test_inference import planned


def measured(run_dir: Path, job: PlannedJob, rate: float, error: str | None) -> None:
    """Write the result of a job as its process would have: GENERATED."""
    settings = settings_of(job)
    figures = {name: Figure(value=None, reason="made up for tests") for name in figures_of("infer")}
    node = NodeExit(
        host="here", noderank=0, state="succeeded", reason=None, started_at="2026-01-01T00:00:00Z", duration_s=10,
        ranks=(),
    )  # fmt: skip
    result = RoundResult(
        key=job.job.key,
        task="infer",
        round=job.job.round,
        role=job.job.role,
        case_version=1,
        unit="image",
        state="succeeded",
        reason=None,
        converged=None,
        vendor="acme",
        precision=settings.precision,
        started_at="2026-01-01T00:00:00Z",
        figures=figures
        | {FigureName.INFERENCE_CORE: Figure(value=rate), FigureName.INFERENCE_METRIC: Figure(value=0.9)}
        | {FigureName.VALIDATION_METRIC: Figure(value=0.9), FigureName.METRIC_DIFFERENCE: Figure(value=0.0)},
        inference=InferenceRound(
            compiler=settings.compiler, batch_size=settings.batch_size, metric="top1", tolerance=0.01
        ),
        nodes=(node,),
        settings=dict(job.job.provenance),
        findings=(finding("error", "inference-accuracy", "", error),) if error else (),
    )
    directory = run_dir / job.directory
    directory.mkdir(parents=True)
    (directory / "job.json").write_text(job.job.model_dump_json())
    (directory / "result.json").write_text(result.model_dump_json())


def carried_out(run_dir: Path, plan: Plan) -> Plan:
    """Carry out a search on made results as the coordinator would; returns the plan at its end."""
    statuses: dict[str, JobStatus] = {}
    while True:
        statuses = {job.directory: statuses.get(job.directory, JobStatus()) for job in plan.jobs}
        plan = continued(plan, run_dir, statuses)
        due = next((job for job in plan.jobs if not statuses.get(job.directory, JobStatus()).ended), None)
        if due is None:
            return plan
        settings = settings_of(due)
        error = "the answers are wrong" if settings.precision == "int8" else None
        # Speed grows with the batch size, and is best in int8, whose answers are wrong.
        rate = settings.batch_size * {"fp32": 1.0, "int8": 100.0}[settings.precision] * (2 if settings.threads else 1)
        measured(run_dir, due, rate * (1 + due.job.round / 1000), error)
        statuses[due.directory] = JobStatus("succeeded")


def within(plan: Plan, budget: Budget) -> Plan:
    assert plan.tuning is not None
    limits = {"budget_s": budget.time_s, "max_trials": budget.num_trials, "settings_file": budget.settings_file}
    return plan.model_copy(update={"tuning": plan.tuning.model_copy(update=limits), "timeout_s": budget.time_s})


@pytest.fixture
def run(plugins: Path, tmp_path: Path) -> RunDirectory:
    plan = within(planned(plugins), Budget(None, 20, tmp_path / "best.yaml"))
    directory = RunDirectory.create(tmp_path / "run", plan)
    record_start(plan, directory.path)
    directory.replace_plan(carried_out(directory.path, plan))
    register_plan(directory.path)
    assert tuned_result(summarise(directory.path, audit_case), load_run(directory.path, curves=False).rounds)
    return directory


def test_a_search_tries_settings_until_none_is_better_and_then_measures_the_best_in_turn(run: RunDirectory) -> None:
    roles = [job.job.role for job in run.plan.jobs]
    assert roles[-5:] == ["tuned", "as shipped", "tuned", "as shipped", "tuned"]
    assert set(roles[1:-5]) == {"trial"}
    best = settings_of(run.plan.jobs[-1])
    assert (best.precision, best.batch_size, best.threads) == ("fp32", 16, 2), "the answers in int8 are wrong"
    assert any(settings_of(job).precision == "int8" for job in run.plan.jobs), "it was tried"


def test_the_results_have_both_rows_in_the_terminal_on_the_page_and_in_the_table(run: RunDirectory) -> None:
    loaded = load_run(run.path)
    rows = {str(row["role"]): row for row in rows_of([loaded])}
    assert rows["tuned"]["inference_core"] == pytest.approx(8 * float(rows["as shipped"]["inference_core"] or 0))
    assert (rows["tuned"]["rounds"], rows["as shipped"]["rounds"]) == (3, 3)
    output = io.StringIO()
    print_summary(loaded.summary, run.path, None, Console(file=output, width=140, highlight=False))
    shown = " ".join(output.getvalue().split())
    page = render_page(loaded)
    assert re.search(r"as shipped: toy:pytorch [^○]* X2 eager fp32 batch 4 ", shown)
    assert re.search(r"tuned: toy:pytorch [^○]* X2 eager fp32 batch 16 threads=2 ", shown)
    for text in (shown, re.sub(r"\s+", " ", page)):
        assert re.search(r"tuned is 8\.00 times as shipped \(95 % interval 7\.9\d to 8\.0\d\)", text)
        assert "the answers are wrong" in text
    num_cases = len({case.rounds[0].split("/")[0] for case in loaded.summary.cases})
    assert num_cases > 4
    assert len(re.findall(r'id="case-\d+"', page)) == 2
    assert loaded.summary.state == "succeeded"


def test_the_best_settings_are_written_for_a_vendor(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write_settings_file(run.path, as_json=False)
    text = (run.path.parent / "best.yaml").read_text()
    assert yaml.safe_load(text) == {"batch_size": 16, "threads": 2}
    assert "# To ship it: vendors/acme/cases/toy-pytorch/infer_X2x1x1.yaml." in text
    assert str(run.path.parent / "best.yaml") in capsys.readouterr().out


def refusal(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> str:
    summarise(run.path, audit_case)
    write_settings_file(run.path, as_json=False)
    assert not (run.path.parent / "best.yaml").exists()
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((1.0, 1.0, 1.0), "the settings as shipped are better"),
        ((4.5, 3.9, 4.4), "the interval contains 1, so no difference was shown; keep the settings as shipped"),
        ((8.0, 0.0, 0.0), "the tuned settings are not valid over all rounds"),
    ],
)
def test_settings_that_are_not_shown_to_be_better_are_not_written(
    rates: tuple[float, ...], expected: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = [job for job in run.plan.jobs if job.job.role == "tuned"]
    for job, rate in zip(tuned, rates, strict=True):
        file = run.path / job.directory / "result.json"
        values = json.loads(file.read_text())
        values["figures"]["inference_core"] = {"value": rate or None, "reason": None if rate else "made up for tests"}
        file.write_text(json.dumps(values))
    shown = refusal(run, capsys)
    assert "not written" in shown
    assert expected in shown
    assert expected in re.sub(r"\s+", " ", render_page(load_run(run.path)))


def test_tuned_settings_with_wrong_answers_in_a_round_are_not_written(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    last = run.path / run.plan.jobs[-1].directory / "result.json"
    wrong = finding("error", "inference-accuracy", "", "the answers are wrong").model_dump(mode="json")
    change_json(last, findings=[wrong])
    assert "not valid over all rounds" in refusal(run, capsys)


def test_the_plan_that_grew_is_registered(run: RunDirectory) -> None:
    found = {note.rule: note for case in load_run(run.path).summary.cases for note in case.findings}
    assert "plan-not-registered" not in found
    assert "rounds-not-planned" not in found
    jobs = json.loads((run.path / "plan.json").read_text())["jobs"]
    change_json(run.path / "plan.json", jobs=jobs[:-1])
    summary = summarise(run.path, audit_case)
    assert "plan-not-registered" in {note.rule for case in summary.cases for note in case.findings}


@pytest.mark.parametrize(("budget", "expected"), [(Budget(None, 2), 2), (Budget(100, None), 4), (Budget(20, None), 0)])
def test_a_search_ends_within_its_budget_of_trials_or_time(
    budget: Budget, expected: int, plugins: Path, tmp_path: Path
) -> None:
    plan = carried_out(tmp_path, within(planned(plugins), budget))
    assert sum(job.job.role == "trial" for job in plan.jobs) == expected
    limit = "within 1 m 40 s" if budget.time_s == 100 else "within 20 s" if budget.time_s else "of 2"
    assert heading(Board(plan, {})).plain.endswith(f", {expected} trials {limit}")
    if budget.time_s == 100:
        assert len(plan.jobs) * 10 <= 100, "every round takes ten seconds"
