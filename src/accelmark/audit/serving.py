"""Rules about serving: the case's fixed values, the load, errors, lengths, tokens, the client, answers and caches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from accelmark.audit.evidence import Evidence, Findings, RoundEvidence, changed_settings
from accelmark.audit.inference import loadgen_findings
from accelmark.results.schema import ServingRound, ServingStage, finding
from accelmark.spec.job import InferJob, ServeJob
from accelmark.spec.number_format import percent
from accelmark.spec.settings.inference import BENCHMARK_DATA
from accelmark.spec.settings.serving import ServeSettings, generation_load

MAX_FAILED_SHARE: Final = 0.01
"""Share of a stage's requests that may fail with a warning."""
MAX_LAG_SHARE: Final = 0.01
"""The client's lag (p99) as a share of the median TTFT."""
MAX_CLIENT_CPU: Final = 0.9
"""CPU time of the busiest client process over the stage's duration."""
MAX_TOKEN_DIFFERENCE: Final = 0.02
"""Relative difference of both counts of tokens: splitting text into tokens again may give other tokens."""
MIN_CACHE_SPEEDUP: Final = 2.0
"""Speed-up of repeated prompts, in the whole duration and per token after the first, of a stored answer."""
MIN_PREFIX_SPEEDUP: Final = 1.25
"""Speed-up of the first token of repeated prompts that shows a prefix cache."""
MAX_LITTLES_DIFFERENCE: Final = 0.05
"""Relative difference of both counts of requests in progress, without requests at the ends of the window."""
MIN_WINDOW_S: Final = {"mini": 5.0, "standard": 60.0}
"""Length of a window from which its rates are steady, by the size of a case."""
MIN_START_S: Final = {"cpu": 100.0, "other": 300.0}
"""Start of a server beyond the framework's load of the same model that is reported: CPU time on CPUs, else time.
docs/reference/serving.md has honest starts; none was measured on accelerators."""
MAX_LOADS: Final = 4.0
"""The same as a multiple of that load: conversion and compilation take longer for larger models."""
_LEAST_SHARE: Final = 0.99
"""Share of its planned length that a window has at least, which ends by a timer."""


def served(evidence: Evidence) -> Iterator[tuple[RoundEvidence, ServingRound, ServeSettings]]:
    """Yield the rounds with a load that succeeded, of servers and of offline generation, with results and load."""
    for entry in evidence.succeeded:
        work = entry.job.work if entry.job is not None else None
        if entry.result.serving is None:
            continue
        if isinstance(work, ServeJob):
            yield entry, entry.result.serving, work.settings
        elif isinstance(work, InferJob):
            yield entry, entry.result.serving, generation_load(work.settings)


def _listed(parts: Sequence[str]) -> str:
    return "; ".join([*parts[:3], *([f"and {len(parts) - 3} more stages"] if len(parts) > 3 else [])])


def case_contract(entry: RoundEvidence) -> Findings:
    """Check that the values that a serving case fixes are unchanged."""
    case = entry.standard.spec.serve if entry.standard is not None else None
    serve = entry.job.work if entry.job is not None else None
    if case is None or not isinstance(serve, ServeJob):
        return
    if case.min_agreement != serve.min_agreement:
        actual = f"min_agreement was changed from {case.min_agreement:g} to {serve.min_agreement:g}"
        yield finding("error", "target", "min_agreement of case.yaml", actual)
    chosen = ("server", "endpoint", "served_model", "server_options")  # a run may always choose its server
    yield from changed_settings(entry, case.settings, serve.settings, (*case.mutable, *chosen))


def load_complete(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that every stage of the load was measured."""
    load = settings.load
    is_closed = load.arrival == "closed"
    measured = {
        (stage.concurrency if is_closed else stage.rate, stage.input_tokens, stage.output_tokens)
        for stage in serving.planned_stages
    }
    wanted: Sequence[float] = load.concurrency if is_closed else load.rates
    lengths: Sequence[tuple[int | None, int | None]] = load.lengths or ((None, None),)
    missing = [
        f"{value:g}" + (f" with {pair[0]} + {pair[1]} tokens" if pair[0] else "")
        for pair in lengths
        for value in wanted
        if (value, *pair) not in measured
    ]
    if missing:
        stages = f"every stage of load.{'concurrency' if is_closed else 'rates'}"
        yield finding("error", "load-incomplete", stages, f"not measured: {', '.join(missing)}")
    if load.search and not any(stage.is_search for stage in serving.stages):
        yield finding("error", "load-incomplete", "a search (load.search)", "no rate was searched")


def requests(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that every request has a consistent record and an answer, of the requested length where it is pinned."""
    if missing := sum(stage.num_missing for stage in serving.stages):
        actual = f"{missing} requests that the load generator counted have no record"
        yield finding("error", "request-records", "a record of every request", actual)
    if strange := sum(stage.num_implausible for stage in serving.stages):
        actual = f"{strange} records contradict each other or the events of their stage"
        yield finding("error", "request-records", "due, sent, first output, gaps and end in this order", actual)
    for stage in serving.planned_stages:  # in a search, failed requests miss the SLO, which is no fault
        if not stage.num_failed:
            continue
        share = stage.num_failed / stage.num_requests
        kinds = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in sorted(stage.errors.items()))
        actual = f"{stage.label}: {stage.num_failed} of {stage.num_requests} requests failed ({kinds})"
        expected = f"at most {percent(MAX_FAILED_SHARE)} of the requests of a stage"
        yield finding("error" if share > MAX_FAILED_SHARE else "warning", "request-errors", expected, actual)
    if wrong := [stage for stage in serving.stages if stage.num_wrong_length]:
        number = sum(stage.num_wrong_length for stage in wrong)
        actual = f"{number} answers have another length: {wrong[0].wrong_length}"
        yield finding("error", "answer-length", "the requested number of tokens", actual)
    elif serving.output_length == "natural":
        yield finding("info", "answer-length", "", "answers end where the model ends them (natural length)")


def token_count(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Compare the tokens by the model's own tokenizer with the server's ``usage``."""
    stages = serving.stages
    answers = sum(stage.own_tokens for stage in stages), sum(stage.usage_tokens for stage in stages)
    prompts = sum(stage.own_prompt_tokens for stage in stages), sum(stage.usage_prompt_tokens for stage in stages)
    for what, (own, usage) in (("answers", answers), ("prompts", prompts)):
        if own != usage:
            is_open = what == "answers" and abs(own - usage) / max(usage, own) > MAX_TOKEN_DIFFERENCE
            expected = f"a difference of at most {percent(MAX_TOKEN_DIFFERENCE)}"
            actual = f"{what} have {own:,} tokens by the model's tokenizer and {usage:,} by the server's usage"
            yield finding("open" if is_open else "info", "token-count", expected, actual)
    if not serving.has_tokenizer and any(stage.num_measured for stage in stages):
        actual = "tokens are those of the server's usage: there was no tokenizer to count them with"
        yield finding("open", "token-count", "tokens counted with the model's own tokenizer", actual)
    if unknown := sum(stage.num_tokens_unknown for stage in stages):
        actual = f"{unknown} answers have no number of tokens and are in no rate of tokens"
        yield finding("warning", "token-count", "", actual)


def client_limit(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that the load generator did not limit what was measured: medians, and the percentiles above them."""
    limits, late, tail = percent(MAX_LAG_SHARE), list[str](), list[str]()
    for stage in serving.planned_stages:
        ttft_ms = stage.quantile("ttft", "p50")
        limit_ms = math.inf if ttft_ms is None else MAX_LAG_SHARE * ttft_ms
        if stage.lag_p50_ms is not None and stage.lag_p50_ms > limit_ms:
            late.append(f"{stage.label}: median lag {stage.lag_p50_ms:.3g} ms")
        if stage.client_cpu_share > MAX_CLIENT_CPU:
            late.append(f"{stage.label}: a client process used {percent(stage.client_cpu_share)} of a core")
        if stage.lag_p99_ms is not None and stage.lag_p99_ms > limit_ms:
            tail.append(f"{stage.label}: lag {stage.lag_p99_ms:.3g} ms (p99)")
    if late:
        expected = f"a median lag of at most {limits} of the median TTFT, CPU below {percent(MAX_CLIENT_CPU)}"
        yield finding("open", "slow-client", expected, f"limited by the client: {_listed(late)}")
    if tail:
        actual = f"high percentiles include the client's lag: {_listed(tail)}"
        yield finding("warning", "slow-client", f"a p99 lag of at most {limits} of the median TTFT", actual)


def served_answers(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that answers under load are the framework's."""
    answers = serving.answers
    expected = f"a mean agreement of at least {answers.min_agreement:g}"
    if answers.num_foreign:
        actual = f"{answers.num_foreign} comparisons are of answers that no request has"
        yield finding("error", "served-answers", "answers of requests under load", actual)
    if answers.agreement is None:
        where = "an endpoint's weights are unknown" if serving.endpoint else f"num_compared is {answers.num_promised}"
        actual = f"no answer under load was compared with the framework's: {where}"
        yield finding("open", "served-answers", expected, actual)
    elif answers.agreement < answers.min_agreement:
        spread = f"mean of {answers.num_compared} answers, lowest {answers.worst:.3f}"
        agree = f"{answers.agreement:.3f} of the tokens agree with the framework's greedy answers"
        yield finding("error", "served-answers", expected, f"{agree}, from their start ({spread})")
    elif answers.num_compared < answers.num_promised:
        actual = f"{answers.num_compared} answers were compared"
        yield finding("open", "served-answers", f"{answers.num_promised} answers compared", actual)


def server_start(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that the server's start took no longer than loading the model explains: answers could be computed in it."""
    if serving.start is None or serving.load is None or entry.job is None:
        return
    is_cpu = entry.job.device_type == "cpu"
    took_s, load_s = (times.cpu_s if is_cpu else times.wall_s for times in (serving.start, serving.load))
    if took_s - load_s > max(MIN_START_S["cpu" if is_cpu else "other"], MAX_LOADS * load_s):
        unit = "s of CPU time" if is_cpu else "s"
        actual = f"the server took {took_s:.1f} {unit} to start, the framework {load_s:.1f} {unit} to load the model"
        yield finding("open", "untimed-work", "as much untimed work as loading the model takes", actual)


def benchmarks(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that benchmarks were measured in full, and that a published accuracy was reproduced where there is one."""
    scores = {score.task: score for score in serving.scores}
    work = entry.job.work if entry.job is not None else None
    published = work.benchmarks if isinstance(work, ServeJob | InferJob) else {}
    case = entry.standard.spec.infer if entry.standard is not None else None
    if isinstance(work, InferJob) and case is not None:
        standard = set(case.configurations.get("benchmarks", ()))
        if left_out := sorted(standard.difference(settings.benchmarks)):
            yield finding("open", "benchmark-accuracy", "the tasks of case.yaml", f"without {', '.join(left_out)}")
    if missing := [task for task in settings.benchmarks if task not in scores]:
        yield finding("error", "benchmark-accuracy", "a score of every task", f"no score of {', '.join(missing)}")
    for task, score in scores.items():
        if score.limit is not None:
            actual = f"{task}: {score.limit} questions of each task or subject"
            yield finding("open", "benchmark-accuracy", "all questions", actual)
        elif score.num_questions != (expected_number := BENCHMARK_DATA[task].num_questions):
            actual = f"{task}: the data has {score.num_questions:,} questions"
            yield finding("open", "benchmark-accuracy", f"{expected_number:,} questions", actual)
    for task, reference in published.items():
        if task in scores and abs(scores[task].value - reference.value) > reference.within:
            actual = f"{task}: {scores[task].value:.4f}"
            expected = f"{reference.value:.4f} ± {reference.within:g} ({reference.source})"
            yield finding("error", "benchmark-accuracy", expected, actual)
    if published and not published.keys() & scores.keys():
        actual = "no published accuracy of the weights was reproduced"
        yield finding("open", "benchmark-accuracy", f"a score of {' or '.join(published)} (benchmarks)", actual)


def result_cache(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that prompts are unique and that repeated ones are not answered from a store."""
    use = serving.prompts
    if not use.num_repeated:
        return
    whole, decoding, first = use.e2e_speedup, use.tpot_speedup, use.ttft_speedup
    if whole is not None and decoding is not None and min(whole, decoding) >= MIN_CACHE_SPEEDUP:
        per_token = f"{whole:.3g} times as fast per token as new ones, {decoding:.3g} times after the first token"
        actual = f"repeated prompts are answered {per_token}"
        yield finding("error", "result-cache", f"less than {MIN_CACHE_SPEEDUP:g} times", actual)
        return
    actual = f"{use.num_repeated} of {use.num_requests} requests repeat a prompt"
    if first is not None and first >= MIN_PREFIX_SPEEDUP:
        actual += f", whose first token comes {first:.3g} times as fast: a prefix cache"
    yield finding("warning", "repeated-prompts", "a new prompt in every request", actual)


def steady_state(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that stages have figures and were in a steady state."""
    for stage in serving.planned_stages:
        if stage.output_token_rate is None:
            actual = f"{stage.label}: no figures: {'; '.join(stage.reasons) or 'no request was answered'}"
            expected = "a steady-state window in every stage"
            yield finding("warning" if serving.headline is not None else "error", "no-steady-state", expected, actual)
        elif stage.is_saturated:
            actual = f"{stage.label}: the server answered {stage.request_rate:.4g} requests/s and fell behind"
            yield finding("warning", "no-steady-state", "a rate that the server keeps up with", actual)
        elif difference := _littles_difference(stage):
            expected = "as many requests in progress as rate x latency (Little's law)"
            yield finding("warning", "no-steady-state", expected, difference)


def _littles_difference(stage: ServingStage) -> str | None:
    mean, by_law, e2e = stage.mean_concurrency, stage.littles_concurrency, stage.latencies.get("e2e")
    if not mean or not by_law or e2e is None or not e2e.mean or stage.window_s is None:
        return None
    at_the_ends = e2e.mean / 1000 / (stage.window_s[1] - stage.window_s[0])
    if abs(by_law / mean - 1) <= MAX_LITTLES_DIFFERENCE + at_the_ends:
        return None
    return f"{stage.label}: {mean:.3g} requests were in progress, rate x latency is {by_law:.3g}"


def speculative_decoding(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Mark speculative decoding, which is allowed: its speed depends on the text."""
    if setting := serving.facts.get("speculative_decoding"):
        yield finding("warning", "speculative-decoding", "", f"the server decodes speculatively ({setting})")


def loadgen(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that LoadGen reports each scenario with a figure as valid."""
    yield from loadgen_findings([(one, one.tokens_per_second) for one in serving.scenarios], settings.scenarios)


def enough_measured(entry: RoundEvidence, serving: ServingRound, settings: ServeSettings) -> Findings:
    """Check that the windows are long enough."""
    least_s = MIN_WINDOW_S[entry.size]
    short = [
        f"{stage.label}: {stage.window_s[1] - stage.window_s[0]:.2f} s"
        for stage in serving.planned_stages
        if stage.window_s is not None and stage.window_s[1] - stage.window_s[0] < _LEAST_SHARE * least_s
    ]
    if short:
        setting = "generate_duration_s" if entry.result.inference is not None else "load.duration_s"
        expected = f"windows of at least {least_s:g} s for a {entry.size} case: increase {setting}"
        yield finding("warning", "too-short", expected, _listed(short))
