"""Verdicts on what a fresh process found of a round's weights and steps, with edited records of one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelmark.audit.evidence import RoundEvidence, Standard
from accelmark.audit.rounds import plausible_convergence
from accelmark.audit.verify import verify_run
from accelmark.results.figures import FigureName
from accelmark.results.read.round_dir import reevaluation_dir
from accelmark.results.schema import CaseResult, Figure, Finding, Point, RoundResult
from accelmark.results.store.bundle import unpack, write_bundle
from accelmark.results.store.loaded_run import RESULT_FILE, load_round
from accelmark.run.record.directory import measure_run
from accelmark.spec.job import NodeExit
from accelmark.spec.log.events import CheckpointHashes, Evaluated, Replayed, UpdateSquares
from accelmark.spec.log.perflog import encode_line
from accelmark.spec.model import Spec
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import load_case
from tests.audit.adversary.attack import edit_events
from tests.audit.test_rules import LOG, SLUG, change_job, judged
from tests.made_run import Made, make_run

HONEST = UpdateSquares(replayed=4.0, saved=4.0, difference=0.0)


def checked(job: dict[str, Any]) -> None:
    job["work"]["is_checked"] = True


def values_of(run: Path, event: str) -> list[dict[str, Any]]:
    lines = (run / LOG).read_text().splitlines()
    return [json.loads(line.partition("] ")[2])["value"] for line in lines if f'"{event}"' in line]


def losses_of(run: Path) -> list[float]:
    return [loss for value in values_of(run, "STEP_END") for loss in value["losses"]]


def metric_of(run: Path) -> float:
    return float(values_of(run, "EVALUATE")[-1]["metrics"]["accuracy"])


def write_evaluation(run: Path, *values: Spec, problem: str | None = None, changed: tuple[str, ...] = ()) -> None:
    node = reevaluation_dir(run / SLUG / "round1") / "node00_noderank0"
    node.mkdir(parents=True)
    names = {Evaluated: "EVALUATED", Replayed: "REPLAYED"}
    meta = {"file": "x", "lineno": 1, "time_ms": 0, "mono_ms": 0.0, "rank": 0}
    lines = [encode_line(names[type(value)], value.model_dump(mode="json"), meta) for value in values]
    (node / "rank0.out.log").write_text("".join(f"{line}\n" for line in lines))
    end = NodeExit(
        host="node00", noderank=0, state="failed" if problem else "succeeded", reason=problem,
        started_at="2026-01-01T00:00:00.000Z", duration_s=3.5, ranks=(), changed_data=changed,
    )  # fmt: skip
    (node / "exit.json").write_text(end.model_dump_json())


def evaluated(metric: float, weights: str = "step9") -> Evaluated:
    return Evaluated(weights=weights, metrics={"accuracy": metric}, duration_s=1.0)


def replayed(losses: list[float], update: UpdateSquares | None = HONEST, *, steps: int = 4) -> Replayed:
    return Replayed(checkpoint=None, end="step4", first_step=1, losses=tuple(losses[:steps]), update=update)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "run", Made())
    change_job(run, 1, checked)
    return run


def rules(case: CaseResult) -> set[str]:
    return {finding.rule for finding in case.findings if finding.severity in ("error", "open")}


def test_a_round_that_is_reproduced_is_valid_and_shows_the_time_of_it(run: Path) -> None:
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run)))
    case = judged(run)
    assert (case.verdict, case.reasons) == ("VALID", ())
    assert case.figures[FigureName("reevaluation_time_s")].mean == 3.5
    assert case.figures[FigureName("final_metric")].mean == metric_of(run)


def test_the_metric_of_the_fresh_process_counts(run: Path) -> None:
    write_evaluation(run, evaluated(0.3), replayed(losses_of(run)))
    case = judged(run)
    assert (case.verdict, case.converged) == ("INVALID", False)
    assert case.figures[FigureName("final_metric")].mean == 0.3
    assert case.figures[FigureName("time_to_target_s")].mean is None
    assert {"reevaluated-metric", "target-missed"} <= rules(case)


def test_weights_that_did_not_have_the_claimed_metric_are_found(run: Path) -> None:
    write_evaluation(run, evaluated(metric_of(run)), evaluated(0.2, "step1"), replayed(losses_of(run)))
    case = judged(run)
    assert case.verdict == "INVALID"
    assert {"reevaluated-target", "target-missed"} <= rules(case)


@pytest.mark.parametrize("is_reported", [True, False])
def test_whether_the_target_was_reached_is_not_known_where_the_evaluation_was_cancelled(
    tmp_path: Path, is_reported: bool
) -> None:
    run = make_run(tmp_path / "run", Made() if is_reported else Made(metrics=(0.5, 0.6)))
    change_job(run, 1, checked)
    write_evaluation(run, problem="was cancelled")
    case = judged(run)
    said = "not known: the weights were not evaluated after training" if is_reported else "was not reached"
    assert (case.verdict, case.converged) == ("INVALID", None if is_reported else False)
    assert [said in each.actual for each in case.findings if each.rule == "target-missed"] == [True]
    assert case.figures[FigureName("final_metric")].mean is None


@pytest.mark.parametrize(
    ("change", "update", "rule"),
    [
        (1.0, UpdateSquares(replayed=4.0, saved=4.0, difference=4.0), "replayed-update"),
        (1.0, UpdateSquares(replayed=4.0, saved=0.0, difference=4.0), "replayed-update"),
        (1.0, UpdateSquares(replayed=0.0, saved=4.0, difference=4.0), "replayed-update"),
        (1.2, HONEST, "replayed-losses"),
        (math.nan, HONEST, "replayed-losses"),
        (1.0, HONEST, None),
        (1.0005, UpdateSquares(replayed=4.0, saved=4.0, difference=0.0001), None),
    ],
)
def test_replayed_steps_have_the_losses_and_the_effect_of_training(
    run: Path, change: float, update: UpdateSquares, rule: str | None
) -> None:
    write_evaluation(run, evaluated(metric_of(run)), replayed([loss * change for loss in losses_of(run)], update))
    case = judged(run)
    assert rules(case) == ({rule} if rule else set())
    assert case.verdict == ("INVALID" if rule else "VALID")


@pytest.mark.parametrize(
    ("update", "steps", "is_valid"),
    [
        (UpdateSquares(replayed=4.0, saved=4.1, difference=1.5), 20, True),
        (UpdateSquares(replayed=4.0, saved=4.1, difference=2.4), 20, False),
        (UpdateSquares(replayed=4.0, saved=4.1, difference=2.4), 60, True),
        (UpdateSquares(replayed=4.0, saved=4.5, difference=0.1), 60, False),
        (UpdateSquares(replayed=4.0, saved=4.5, difference=0.1), 100, True),
        (UpdateSquares(replayed=4.0, saved=2.0, difference=1.5), 100, False),
        (UpdateSquares(replayed=4.0, saved=4.0, difference=4.4), 100, False),
    ],
    ids=[
        "small differences that grew", "too far after 20 steps", "as far after 60", "too long after 60 steps",
        "as long after 100", "half of the work", "another direction",
    ],
)  # fmt: skip
def test_sizes_and_directions_may_differ_by_more_over_more_steps(
    run: Path, update: UpdateSquares, steps: int, is_valid: bool
) -> None:
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run), update, steps=steps))
    assert rules(judged(run)) == (set() if is_valid else {"replayed-update"})


def test_losses_of_other_batches_after_the_first_steps_are_found(run: Path) -> None:
    losses = losses_of(run)[:20]
    others = losses[:8] + [loss * (1 + 0.2 * (step % 2)) for step, loss in enumerate(losses[8:])]
    update = UpdateSquares(replayed=4.0, saved=4.1, difference=1.5)
    write_evaluation(run, evaluated(metric_of(run)), replayed(others, update, steps=20))
    assert rules(judged(run)) == {"replayed-losses"}


@pytest.mark.parametrize(
    ("kind", "start", "difference", "parameters_differ", "is_valid"),
    [
        ("buffers", "step0", 0.01, 0.0, False),
        ("buffers", "step0", 0.01, 0.01, True),
        ("buffers", None, 0.01, 0.0, True),
        ("momentum_buffer", None, 0.1, 0.0, False),
        ("momentum_buffer", None, 0.1, 0.01, True),
        ("buffers", "step0", 0.4, 1.0, False),
    ],
)
def test_states_differ_as_far_as_the_parameters_explain(
    run: Path, kind: str, start: str | None, difference: float, parameters_differ: float, is_valid: bool
) -> None:
    update = UpdateSquares(replayed=4.0, saved=4.0, difference=4 * parameters_differ**2)
    state = {kind: UpdateSquares(replayed=1.0, saved=1.0, difference=difference**2)}
    steps = replayed(losses_of(run), update, steps=20).model_copy(update={"state": state, "checkpoint": start})
    write_evaluation(run, evaluated(metric_of(run)), steps)
    assert ("replayed-update" in rules(judged(run))) is not is_valid


EXTERN = {"name": "toy-pytorch", "path": "/vendors/acme/cases/toy-pytorch", "sha256": "0" * 64}


def test_longer_evaluations_than_without_the_vendors_code_are_open(run: Path) -> None:
    change_job(run, 1, lambda job: job.update(extern=EXTERN, seed=1))
    edit_events(run / LOG, "EVALUATE", lambda value: value.update(duration_s=100.0))
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run)))
    assert "untimed-work" in rules(judged(run))


@pytest.mark.parametrize(
    ("problem", "verdict", "rule"),
    [(None, "INVALID", "reevaluation"), ("out of memory", "INVALID", "reevaluation"), ("", "OPEN", "replay")],
    ids=["not evaluated", "failed", "switched off"],
)
def test_rounds_that_were_not_checked_completely_say_so(
    run: Path, problem: str | None, verdict: str, rule: str
) -> None:
    if problem == "":
        change_job(run, 1, lambda job: job["work"]["settings"]["checkpoint"].update(replay_mib=0))
        write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run), None))
    elif problem:
        write_evaluation(run, problem=problem)
    case = judged(run)
    assert case.verdict == verdict
    assert rule in rules(case)


def test_a_bundle_has_the_evaluation_that_its_figures_come_from(run: Path, tmp_path: Path) -> None:
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run)))
    assert judged(run).verdict == "VALID"
    write_bundle(run, tmp_path / "run.tar")
    unpacked, problems = unpack(tmp_path / "run.tar", tmp_path / "unpacked")
    assert problems == []
    verification = verify_run(unpacked)
    assert (verification.is_intact, verification.summary.cases[0].verdict) == (True, "VALID")
    log = next(unpacked.glob("*/evaluation-round1/*/rank0.out.log"))
    log.write_text(log.read_text().replace("step9", "step8"))
    assert any("was changed" in change for change in verify_run(unpacked).changed)


def test_an_evaluation_after_the_run_is_no_change_of_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made())
    assert judged(run).verdict == "VALID"
    write_evaluation(run, evaluated(0.2), replayed(losses_of(run)))
    verification = verify_run(run)
    assert verification.changed == ()
    assert "reevaluated-metric" in {finding.rule for finding in verification.summary.cases[0].findings}


def test_data_that_was_changed_while_it_was_evaluated_on_is_an_error(run: Path) -> None:
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run)), changed=("/data/labels",))
    case = judged(run)
    assert case.verdict == "INVALID"
    assert any("data was changed" in str(finding.actual) for finding in case.findings), case.findings


@pytest.mark.parametrize(("metric", "is_plausible"), [(0.92, True), (0.923, False)])
def test_a_metric_beyond_the_reference_is_open(run: Path, metric: float, is_plausible: bool) -> None:
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run)))
    result = measure_run(run, recompute=True)
    entry = load_round(run / SLUG / "round1" / RESULT_FILE)
    figures = entry.figures | {FigureName.FINAL_METRIC: Figure(value=metric)}
    found = implausible(entry.model_copy(update={"figures": figures, "curves": {}}), load_case("resnet_mini"))
    assert result.cases[0].verdict == "VALID"
    assert [finding.severity for finding in found] == ([] if is_plausible else ["open"])


@pytest.mark.parametrize(
    ("epoch", "reference", "is_plausible"),
    [
        (3, (400, 400, 400), True),  # the reference may have passed the target right after its third epoch
        (2, (400, 400, 400), False),
        (1, (200, 300, 400, 200, 300, 400), True),
        (1, (390, 400, 410, 390, 400, 410), False),
        (1, (400,), True),
        (None, (400, 400, 400), True),
    ],
)
def test_a_target_reached_earlier_than_the_reference_allows_is_open(
    run: Path, epoch: int | None, reference: tuple[int, ...], is_plausible: bool
) -> None:
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run)))
    measure_run(run, recompute=True)
    entry, case = load_round(run / SLUG / "round1" / RESULT_FILE), load_case("resnet_mini")
    assert entry.target is not None
    assert case.train is not None
    metrics = [0.95 if epoch is not None and each >= epoch else 0.5 for each in range(1, 5)]
    points = tuple(Point(step=25 * each, time_s=each, value=value) for each, value in enumerate(metrics, start=1))
    changed: dict[str, object] = {"curves": {entry.target.metric: points}, "num_steps": 100, "num_samples": 400}
    train = case.train.model_copy(update={"calibration": (), "samples_to_target": reference})
    found = implausible(entry.model_copy(update=changed), case.model_copy(update={"train": train}))
    expected = [] if is_plausible else [("open", "implausible-convergence")]
    assert [(finding.severity, finding.rule) for finding in found] == expected
    assert all("faster than the reference" in str(finding.actual) for finding in found)


def implausible(entry: RoundResult, case: CaseSpec) -> list[Finding]:
    return list(plausible_convergence(RoundEvidence(entry, None, Standard(case, "", is_shipped=True))))


def resume_after(run: Path, num_windows: int, pairs: tuple[tuple[str | None, str], ...] | None = None) -> None:
    """Divide the log of a made round into two attempts; the second logs ``pairs`` of checkpoints, named by step."""
    log = run / LOG
    earlier = run / SLUG / "round1" / "attempt1" / log.parent.name / log.name
    earlier.parent.mkdir(parents=True)
    lines = log.read_text().splitlines(keepends=True)
    begin = next(at for at, line in enumerate(lines) if '"STEP_END"' in line)
    earlier.write_text("".join(lines[: begin + num_windows]))
    start = re.sub(r'("TRAIN_START", ?"value": ?){}', r'\1{"resumed": true}', "".join(lines[:begin]))
    log.write_text(start + "".join(lines[begin + num_windows :]))
    if pairs is not None:
        steps = {name: int(name) for pair in pairs for name in pair if name is not None}
        hashes = CheckpointHashes(
            sha256=dict.fromkeys(steps, "0" * 64), steps=steps, pairs=pairs, num_bytes=1, duration_s=1
        )
        meta = {"file": "x", "lineno": 1, "time_ms": 0, "mono_ms": 9e9, "rank": 0}
        with log.open("a") as file:
            file.write(encode_line("CHECKPOINTS_HASHED", hashes.model_dump(mode="json"), meta) + "\n")


@pytest.mark.parametrize(
    ("change", "severity", "reason"),
    [
        (lambda run: None, "warning", "within checkpoint.replay_mib (512)"),
        (lambda run: change_job(run, 1, lambda job: job.update(extern=EXTERN)), "open", "within checkpoint.replay_mib"),
        (lambda run: resume_after(run, 3), "warning", "after the round was resumed"),
    ],
)
def test_a_long_training_without_a_pair_of_checkpoints_is_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], severity: str, reason: str
) -> None:
    monkeypatch.setattr("accelmark.audit.reevaluation.MIN_STEPS_WITH_PAIR", 4)
    change(run)
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run)))
    (found,) = (finding for finding in judged(run).findings if finding.rule == "replay")
    assert found.severity == severity
    assert f"no pair of checkpoints was kept {reason}" in found.actual


@pytest.mark.parametrize(
    ("pairs", "missing"),
    [
        (((None, "8"), ("8", "30"), ("30", "38")), []),
        (((None, "8"), ("30", "38")), ["1 to 30"]),
        ((("30", "38"),), ["1 to 30"]),
        (((None, "8"), ("8", "30")), ["31 to 100"]),
        (((None, "8"), ("24", "38")), ["1 to 30", "31 to 100"]),
    ],
)
def test_each_attempt_at_a_resumed_round_needs_a_pair(
    run: Path, monkeypatch: pytest.MonkeyPatch, pairs: tuple[tuple[str | None, str], ...], missing: list[str]
) -> None:
    """Else one could train to the target by other means, and resume from there."""
    monkeypatch.setattr("accelmark.audit.reevaluation.MIN_STEPS_WITH_PAIR", 20)
    resume_after(run, 3, pairs)
    first = Replayed(checkpoint="30", end="38", first_step=31, losses=tuple(losses_of(run)[:8]), update=HONEST)
    write_evaluation(run, evaluated(metric_of(run)), first)
    case = judged(run)
    found = [each for each in case.findings if each.rule == "replay"]
    what = "no pair of checkpoints was kept of the attempt with steps"
    assert [each.actual for each in found] == [f"{what} {steps}" for steps in missing]
    assert case.verdict == ("OPEN" if missing else "VALID"), case.reasons


def test_samples_that_the_steps_do_not_have_are_found(run: Path) -> None:
    write_evaluation(run, evaluated(metric_of(run)), replayed(losses_of(run)))
    log = run / LOG
    text = re.sub(r'("num_trained_samples": ?)(\d+)', lambda found: f"{found[1]}{2 * int(found[2])}", log.read_text())
    log.write_text(text)
    case = judged(run)
    assert case.verdict == "INVALID"
    assert any("samples for" in reason for reason in case.reasons), case.reasons
