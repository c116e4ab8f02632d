"""Each rule about serving, on records of a simulated queue in which one thing was changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelmark.results.figures import FigureName
from accelmark.results.schema import CaseResult
from accelmark.run.record.directory import measure_run
from accelmark.spec.log.inference import BenchmarkScore, RequestRecord, StartTimes
from accelmark.spec.settings.inference import Reference
from tests.audit.adversary.attack import add_event
from tests.served_run import COMPLETED, Queue, Served, Stage, make_served_run

QUEUE = Queue(slots=4, service_s=lambda noise: 0.2 + 0.02 * noise.random(), prefill_share=0.25, tokens=16)
SERVED = Served((Stage(QUEUE, 150, concurrency=4),), settings={"load": {"concurrency": [4]}})

Records = Sequence[RequestRecord]
Change = Callable[[list[RequestRecord]], Records]


def judged(tmp_path: Path, served: Served = SERVED, change: Change = list) -> CaseResult:
    return measure_run(make_served_run(tmp_path / "run", served, change)).cases[0]


def found(case: CaseResult, rule: str) -> list[tuple[str, str]]:
    return [(finding.severity, finding.actual) for finding in case.findings if finding.rule == rule]


def settings(**changed: Any) -> dict[str, Any]:
    return {"load": {"concurrency": [4]}} | changed


def each(change: Callable[[RequestRecord], dict[str, Any]], every: int = 1) -> Change:
    """Change the last of every n measured records."""

    def changed(records: list[RequestRecord]) -> Records:
        return [
            record.model_copy(update=change(record))
            if record.stage >= 0 and record.number % every == every - 1
            else record
            for record in records
        ]

    return changed


def told(values: dict[str, Any], every: int = 1) -> Change:
    return each(lambda record: values, every)


def test_a_run_by_the_rules_is_valid(tmp_path: Path) -> None:
    case = judged(tmp_path)
    assert case.verdict == "VALID", case.reasons
    assert case.variant == "toy fp32"
    ours = ("request-errors", "answer-length", "token-count", "slow-client", "served-answers", "result-cache",
            "repeated-prompts", "request-records", "no-steady-state", "load-incomplete")  # fmt: skip
    assert [finding for finding in case.findings if finding.rule in ours] == []


def mmlu(value: float, num_questions: int = 14_042, limit: int | None = None) -> BenchmarkScore:
    return BenchmarkScore(
        task="mmlu", metric="acc,none", value=value, stderr=0.004, num_questions=num_questions, limit=limit,
        num_fewshot=5, task_version="2", harness_version="0.4.13",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "findings", "verdict"),
    [
        ((mmlu(0.66),), [], "VALID"),
        ((mmlu(0.60),), [("error", "mmlu: 0.6000")], "INVALID"),
        ((mmlu(0.66, 13_000),), [("open", "mmlu: the data has 13,000 questions")], "OPEN"),
        ((mmlu(0.66, 57, 1),), [("open", "mmlu: 1 questions of each task or subject")], "OPEN"),
        (
            (mmlu(0.3, 1_319).model_copy(update={"task": "gsm8k"}),),
            [("open", "no published accuracy of the weights was reproduced")],
            "OPEN",
        ),
        ((), [("open", "no published accuracy of the weights was reproduced")], "OPEN"),
    ],
)
def test_a_published_accuracy_is_reproduced_on_all_questions(
    tmp_path: Path, scores: tuple[BenchmarkScore, ...], findings: list[tuple[str, str]], verdict: str
) -> None:
    published: Any = {"mmlu": Reference(value=0.667, within=0.015, source="its card")}
    case = judged(tmp_path, replace(SERVED, scores=scores, published=published))
    assert found(case, "benchmark-accuracy") == findings
    assert case.verdict == verdict, case.reasons


def test_a_client_that_is_too_slow_makes_a_run_open(tmp_path: Path) -> None:
    case = judged(tmp_path, Served(SERVED.stages, settings=SERVED.settings, lag_p99_ms=60.0))
    assert case.verdict == "OPEN"
    (limit, tail) = found(case, "slow-client")
    assert (limit[0], tail[0]) == ("open", "warning")
    assert "median lag 30 ms" in limit[1]
    assert "lag 60 ms (p99)" in tail[1]


@pytest.mark.parametrize(
    ("device_type", "start", "load", "actual"),
    [
        ("cpu", (80.0, 270.0), (6.5, 20.0), None),  # a whole model compiled on a busy machine: measured
        ("cpu", (120.0, 60.0), (6.5, 20.0), "the server took 120.0 s of CPU time to start, the framework 6.5 s"),
        ("cpu", (120.0, 60.0), (25.0, 20.0), None),
        ("acme", (900.0, 310.0), (5.0, 5.0), "the server took 310.0 s to start, the framework 5.0 s"),
        ("acme", (900.0, 310.0), (5.0, 70.0), None),
    ],
)
def test_a_start_that_takes_far_longer_than_the_load_of_the_model_makes_a_run_open(
    tmp_path: Path, device_type: str, start: tuple[float, float], load: tuple[float, float], actual: str | None
) -> None:
    times, loaded = (StartTimes(cpu_s=pair[0], wall_s=pair[1]) for pair in (start, load))
    ended = COMPLETED.model_copy(update={"load": loaded})
    told = found(judged(tmp_path, replace(SERVED, start=times, ended=ended, device_type=device_type)), "untimed-work")
    assert [(severity, text[: len(actual or "")]) for severity, text in told] == ([("open", actual)] if actual else [])


def test_a_server_that_stores_answers_is_found(tmp_path: Path) -> None:
    def stored(records: list[RequestRecord]) -> Records:
        seen: set[int] = set()
        changed = []
        for record in sorted(records, key=lambda record: (record.stage, record.due_s)):
            if record.stage >= 0:
                prompt = record.number % 90
                told: dict[str, Any] = {"prompt": prompt}
                if prompt in seen:
                    told |= {"first_s": record.due_s + 0.01, "end_s": record.due_s + 0.011, "gaps_us": ()}
                seen.add(prompt)
                record = record.model_copy(update=told)
            changed.append(record)
        return changed

    case = judged(tmp_path, Served(SERVED.stages, settings=settings(num_compared=2)), stored)
    assert case.verdict == "INVALID"
    assert [severity for severity, _ in found(case, "result-cache")] == ["error"]


@pytest.mark.parametrize(
    "changed",
    [{"first_s": 0.0}, {"gaps_us": (900_000,) * 15}, {"gaps_us": (-5,)}, {"end_s": 1e6}, {"due_s": -1.0, "sent_s": 0.0},
     {"first_s": None}],
)  # fmt: skip
def test_records_whose_times_contradict_each_other_make_a_run_invalid(tmp_path: Path, changed: dict[str, Any]) -> None:
    case = judged(tmp_path, change=each(lambda record: changed, 149))
    assert "error" in {severity for severity, _ in found(case, "request-records")}


def scenario(**changed: Any) -> dict[str, Any]:
    fields = {
        "scenario": "server", "stage": 1, "valid": True, "functional": False, "tokens_per_second": 10.0,
        "queries_per_second": 1.0, "num_failed": 0, "log_dir": "loadgen/server",
    }  # fmt: skip
    return fields | changed


@pytest.mark.parametrize(
    ("result", "severity", "what"),
    [
        (scenario(), None, ""),
        (scenario(valid=False, reason="2 of 9 queries failed"), "error", "2 of 9 queries failed"),
        (scenario(tokens_per_second=None, reason="no tried rate held the limits"), "warning", "has no figure"),
        (None, "error", "no result for scenario server"),
    ],
)
def test_loadgens_verdict_counts(
    tmp_path: Path, result: dict[str, Any] | None, severity: str | None, what: str
) -> None:
    limits = {"slo": {"ttft_ms": 1e6, "tpot_ms": 1e6}, "scenarios": ["server"]}
    run = make_served_run(tmp_path / "run", replace(SERVED, settings=settings(**limits)))
    if result is not None:
        add_event(next(run.rglob("rank0.out.log")), "TOKEN_SCENARIO", result)
    case = measure_run(run).cases[0]
    judgement = found(case, "loadgen-invalid")
    assert [each for each, _ in judgement] == ([] if severity is None else [severity])
    assert what in "".join(actual for _, actual in judgement)
    assert case.figures[FigureName.LOADGEN_SERVER_TOKENS].mean == (result["tokens_per_second"] if result else None)


TWO_STAGES = {"load": {"concurrency": [4, 64]}}
NOT_KEPT = Served((Stage(QUEUE, 400, rate=40.0),), settings={"load": {"arrival": "poisson", "rates": [40.0]}})
TOO_FEW = Served((Stage(QUEUE, 8, concurrency=8),), settings={"load": {"concurrency": [8]}})
ENDPOINT = replace(SERVED, settings=settings(server=None, endpoint="http://127.0.0.1:1", num_compared=0))
SPECULATIVE = replace(SERVED, settings=settings(server_options={"draft": "tiny"}))
FAILED = {"status": "http_error", "http_status": 503, "output_tokens": None, "usage_output": None}


@pytest.mark.parametrize(
    ("served", "change", "rule", "severity", "words"),
    [
        (replace(SERVED, agreement=0.95), list, "served-answers", "valid", ""),
        (replace(SERVED, agreement=0.85), list, "served-answers", "error", "0.850 of the tokens agree"),
        (replace(SERVED, settings=settings(num_compared=0)), list, "served-answers", "open", "num_compared is 0"),
        (SERVED, each(lambda record: {"prompt": record.prompt + 5}), "served-answers", "error", "no request has"),
        (ENDPOINT, list, "served-answers", "open", "an endpoint's weights are unknown"),
        (
            SERVED, each(lambda record: {"prompt": 100_000 + record.number % 90}),
            "repeated-prompts", "warning", "60 of 150 requests repeat a prompt",
        ),
        (SERVED, lambda records: random.Random(1).sample(records, 140), "request-records", "error", "have no record"),
        (SERVED, lambda records: [*records, records[-1]], "request-records", "error", "1 records contradict"),
        (replace(SERVED, settings=TWO_STAGES), list, "load-incomplete", "error", "not measured: 64"),
        (NOT_KEPT, list, "no-steady-state", "warning", "fell behind"),
        (TOO_FEW, list, "no-steady-state", "error", ""),
        (SERVED, told(FAILED, 150), "request-errors", "warning", "http error 503"),
        (SERVED, told(FAILED, 10), "request-errors", "error", "http error 503"),
        (SERVED, told({"usage_output": 15}, 50), "answer-length", "error", "3 answers have another length"),
        (SERVED, told({"output_tokens": 8}, 50), "answer-length", "error", "3 answers have another length"),
        (SERVED, told({"output_tokens": 12, "usage_output": None}, 50), "answer-length", "error", "3 answers have"),
        (SERVED, told({"output_tokens": 15}), "token-count", "open", "2,250 tokens by the model's tokenizer and 2,400"),
        (SERVED, told({"output_tokens": 16}), "token-count", "valid", ""),
        (SPECULATIVE, list, "speculative-decoding", "warning", "the server decodes speculatively (tiny)"),
    ],
)  # fmt: skip
def test_each_rule_judges_a_record_that_was_changed(
    tmp_path: Path, served: Served, change: Change, rule: str, severity: str, words: str
) -> None:
    case = judged(tmp_path, served, change)
    assert [kind for kind, _ in found(case, rule)] == ([] if severity == "valid" else [severity])
    assert words in "".join(actual for _, actual in found(case, rule))
    assert case.verdict == {"error": "INVALID", "open": "OPEN"}.get(severity, "VALID"), case.reasons
