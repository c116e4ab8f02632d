"""Arrivals, lengths, prompts, stages, search, reported progress, URL and body of requests, without a server."""

from __future__ import annotations

import gc
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from accelmark.results.rounds.load import Requests, RequestTable
from accelmark.serving import load as loads
from accelmark.serving.answers import AnswerSample
from accelmark.serving.load import LoadPlan, ServedModel, draw_length, due_times, open_prompts, read_trace, search_rate
from accelmark.serving.request import Endpoint, Load, PlannedRequest, Record
from accelmark.serving.stages import LoadReporter, Stages
from accelmark.spec.errors import DataError, RequestError
from accelmark.spec.log.events import Event
from accelmark.spec.log.inference import LoadProgress, LoadStage, RequestRecord
from accelmark.spec.settings.serving import Arrival, Lengths, LoadSettings, PromptSettings, ServeSettings, Slo

WORDS = random.Random(1).choices(["the", "king", "walks", "to", "night", "and", "ghosts", "thee"], k=1500)


def encode_pairs(text: str) -> list[int]:
    """A tokenizer that merges: two equal letters are one token, any other letter is one; so cuts change counts."""
    found, place = [], 0
    while place < len(text):
        is_pair = text[place : place + 2] == 2 * text[place]
        found.append(1000 * is_pair + ord(text[place]))
        place += 1 + is_pair
    return found


def decode_pairs(tokens: list[int]) -> str:
    return "".join(chr(token % 1000) * (1 + token // 1000) for token in tokens)


PAIRS: Any = SimpleNamespace(tokens=encode_pairs, text=decode_pairs, prompt_text=lambda: " ".join(WORDS))
WITHOUT_TOKENIZER: Any = SimpleNamespace(tokens=None, text=None, prompt_text=PAIRS.prompt_text)


@pytest.mark.parametrize(
    ("arrival", "burstiness", "variation"),
    [("constant", 1.0, 0.0), ("poisson", 5.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)],
)
def test_arrivals_have_the_rate_and_the_variation_asked_for(
    arrival: Arrival, burstiness: float, variation: float
) -> None:
    times = [due.timestamp for due in due_times(arrival, 50.0, 200.0, burstiness, np.random.default_rng(7))]
    gaps = np.diff(times)
    assert len(times) / 200 == pytest.approx(50, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05, abs=1e-6)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 200


def test_lognormal_lengths_have_their_mean_and_limits() -> None:
    rng = np.random.default_rng(3)
    free = Lengths(distribution="lognormal", mean=200, stdev=100)
    drawn = [draw_length(free, rng) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(200, rel=0.03)
    assert np.std(drawn) == pytest.approx(100, rel=0.06)
    cut = free.model_copy(update={"min": 150, "max": 250})
    assert {draw_length(cut, rng, most=240) for _ in range(2000)} >= {150, 240}
    assert all(150 <= draw_length(cut, rng) <= 250 for _ in range(500))


@settings_of_hypothesis(max_examples=20)
@given(st.integers(min_value=1, max_value=120), st.integers(min_value=0, max_value=40), st.integers(0, 5))
def test_prompts_have_exactly_their_tokens_and_are_not_repeated(length: int, prefix: int, seed: int) -> None:
    prefix = min(prefix, length // 2)
    lengths = Lengths(mean=length)
    settings = PromptSettings(input=lengths, shared_prefix_tokens=prefix, num_prefixes=2, repeat=length < 8)
    prompts = open_prompts(settings, PAIRS, "completions", seed)
    drawn = [prompts.draw() for _ in range(12)]
    assert {len(encode_pairs(str(each.content))) for each in drawn} == {length}
    assert {each.input_tokens for each in drawn} == {length}
    if length >= 8:
        assert len({each.content for each in drawn}) == 12
    if prefix > 2:
        assert len({str(each.content)[: prefix // 2] for each in drawn}) <= 2


def test_a_table_of_the_answers_to_all_windows_of_the_text_has_no_prompt() -> None:
    for model in (WITHOUT_TOKENIZER, PAIRS):
        text = " ".join(model.prompt_text().split())
        prompts = open_prompts(PromptSettings(input=Lengths(mean=40)), model, "completions", 1)
        assert not [drawn for _ in range(20) if (drawn := str(prompts.draw().content)) in text]


def test_the_seed_decides_the_prompts_and_words_replace_tokens_without_a_tokenizer() -> None:
    def drawn(seed: int) -> list[Any]:
        prompts = open_prompts(PromptSettings(input=Lengths(mean=20)), WITHOUT_TOKENIZER, "completions", seed)
        return [prompts.draw(output_tokens=5) for _ in range(4)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert {len(str(each.content).split()) for each in drawn(1)} == {20}
    assert {(each.input_tokens, each.requested_tokens) for each in drawn(1)} == {(None, 5)}


def test_prompts_of_a_file_keep_their_order_and_lengths(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "aab", "output_tokens": 9}\n{"prompt": "b"}\n', encoding="utf-8")
    settings = PromptSettings(source="jsonl", file=str(file), output=Lengths(mean=5))
    prompts = open_prompts(settings, PAIRS, "completions", 1)
    drawn = [prompts.draw(), prompts.draw(output_tokens=6)]
    assert [(each.content, each.input_tokens, each.requested_tokens) for each in drawn] == [("aab", 2, 9), ("b", 1, 6)]
    with pytest.raises(DataError, match=r"all of its 2 prompts were used; give more.*prompts.repeat"):
        prompts.draw()
    again = open_prompts(settings.model_copy(update={"repeat": True}), PAIRS, "completions", 1)
    assert [again.draw().prompt for _ in range(5)] == [0, 1, 0, 1, 0]


def test_conversations_in_the_layout_of_sharegpt(tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    turn = {"from": "human", "value": "question"}, {"from": "gpt", "value": "aabb"}
    conversations: list[Any] = [
        {"id": "1", "conversations": [*turn, turn[0]]},
        {"id": "2", "conversations": [turn[0]]},
        {"id": "3", "conversations": [turn[1], turn[0]]},
        {"id": "4", "conversations": [{"from": "human", "value": "much longer"}, turn[1]]},
    ]
    file.write_text(json.dumps(conversations), encoding="utf-8")
    settings = PromptSettings(source="sharegpt", file=str(file), input=Lengths(max=8))
    prompts = open_prompts(settings, PAIRS, "chat", 1)
    assert prompts.num_left == 1
    prompt = prompts.draw()
    assert (prompt.content, prompt.input_tokens, prompt.requested_tokens) == ("question", 8, 2)
    for wrong in ({}, {"conversations": [{"from": "human", "value": None}, turn[1]]}, {"conversations": ["a", "b"]}):
        file.write_text(json.dumps([*conversations, wrong]), encoding="utf-8")
        with pytest.raises(DataError, match=r"conversations.json: entry 4: not a conversation"):
            open_prompts(settings, PAIRS, "chat", 1)


def test_a_trace_gives_times_and_lengths_and_its_bad_lines_are_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    line = '{"timestamp": %s, "input_tokens": 30, "output_tokens": 7}\n'
    file.write_text(line % 100 + line % 100.5 + line % 190, encoding="utf-8")
    assert [(due.timestamp, due.output_tokens) for due in read_trace(file, 60)] == [(0, 7), (0.5, 7)]
    load = LoadSettings(arrival="trace", trace=str(file), warmup_requests=0, duration_s=60)
    stages = _stages(ServeSettings(load=load, seed=3))
    ((stage, requests),) = stages
    assert (stage.arrival, stage.rate) == ("trace", None)
    assert [(each.due_s, each.input_tokens, each.requested_tokens) for each in requests] == [(0, 30, 7), (0.5, 30, 7)]
    file.write_text(line % 5 + line % 4, encoding="utf-8")
    with pytest.raises(DataError, match=r"trace.jsonl:2: timestamp 4 is before"):
        read_trace(file, 60)
    file.write_text(line % 5 + "{}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"trace.jsonl:2: timestamp: is missing"):
        read_trace(file, 60)
    file.write_text(line % 0 + line % 500, encoding="utf-8")  # milliseconds
    with pytest.raises(DataError, match=r"only the first of 2 requests is due within 60 s .*timestamp is in seconds"):
        read_trace(file, 60)


def _stages(
    settings: ServeSettings, answer: Callable[[Load, PlannedRequest], float] = lambda load, request: 0.01
) -> list[tuple[Load, list[PlannedRequest]]]:
    """Run a plan against a server that answers after ``answer`` seconds; return its stages."""
    stages: list[tuple[Load, list[PlannedRequest]]] = []

    def run_stage(load: Load, requests: Iterable[PlannedRequest]) -> tuple[LoadStage, Requests]:
        taken = [request for request, _ in zip(requests, range(2000), strict=False)]
        records = [_record(load, request, answer(load, request)) for request in taken]
        done = LoadStage(
            stage=load.stage, arrival=load.arrival, concurrency=load.concurrency, rate=load.rate,
            is_search=load.is_search, begin_mono_s=0.0, duration_s=10.0, num_requests=len(records),
            lag_p50_ms=None, lag_p99_ms=None, client_cpu_share=0.0,
        )  # fmt: skip
        stages.append((load, taken))
        return done, RequestTable(records).requests()

    LoadPlan(settings, PAIRS).run(run_stage)
    return stages


def _record(load: Load, request: PlannedRequest, took_s: float, **changes: Any) -> RequestRecord:
    due_s = request.due_s or 0.0
    record = RequestRecord(
        stage=load.stage, number=request.number, prompt=request.prompt, due_s=due_s, sent_s=due_s,
        first_s=due_s + took_s, end_s=due_s + 2 * took_s, status="ok", requested_tokens=request.requested_tokens,
    )  # fmt: skip
    return record.model_copy(update=changes)


def test_a_plan_has_warm_up_and_a_stage_for_each_concurrency_and_repeats_no_prompt() -> None:
    stages = _stages(ServeSettings(load=LoadSettings(concurrency=(2, 8), max_requests=20, warmup_requests=3)))
    assert [(each.stage, each.concurrency, len(requests)) for each, requests in stages] == [
        (-1, 3, 3), (0, 2, 20), (1, 8, 20),
    ]  # fmt: skip
    numbers = [request.prompt for _, requests in stages for request in requests]
    assert len(set(numbers)) == len(numbers) == 43
    assert {request.due_s for _, requests in stages for request in requests} == {None}


def test_open_stages_have_the_same_times_in_every_run() -> None:
    load = LoadSettings(arrival="poisson", rates=(5.0, 20.0), duration_s=10, warmup_requests=0)
    once, again = (_stages(ServeSettings(load=load, seed=4)) for _ in range(2))
    assert [requests for _, requests in once] == [requests for _, requests in again]
    assert [each.rate for each, _ in once] == [5, 20]
    assert LoadPlan(ServeSettings(load=load), PAIRS).left_s == 20
    assert all(request.due_s is not None and request.due_s < 10 for _, requests in once for request in requests)


@pytest.mark.parametrize("arrival", ["closed", "gamma"])
def test_the_plan_searches_the_highest_rate_that_holds(arrival: Arrival) -> None:
    slo = Slo(ttft_ms=100.0, share=0.9)
    load = LoadSettings(arrival=arrival, concurrency=(1,), search=True, duration_s=10, max_requests=500)
    stages = _stages(ServeSettings(load=load, slo=slo), lambda load, _: 0.05 if (load.rate or 0) < 37 else 0.2)
    searched = [each for each, _ in stages if each.is_search]
    assert {each.arrival for each in searched} == {"poisson" if arrival == "closed" else "gamma"}
    assert [each.stage for each, _ in stages if each.stage >= 0] == list(range(len(stages) - 1))
    best = max(each.rate or 0 for each in searched if (each.rate or 0) < 37)
    assert best > 37 / (1 + loads.PRECISION)


def test_a_search_begins_above_the_given_rate_that_held() -> None:
    load = LoadSettings(arrival="poisson", rates=(4.0, 8.0, 64.0), search=True, duration_s=10, max_requests=700)
    settings = ServeSettings(load=load, slo=Slo(ttft_ms=100.0, share=0.9))
    stages = _stages(settings, lambda load, _: 0.05 if (load.rate or 0) < 37 else 0.2)
    rates = [each.rate or 0 for each, _ in stages if each.is_search]
    assert rates[:2] == [16, 32]
    assert max(rate for rate in rates if rate < 37) > 37 / (1 + loads.PRECISION)


@given(st.floats(0.01, 1e4), st.floats(0.5, 100))
def test_a_search_ends_near_the_limit(limit: float, first: float) -> None:
    tried: list[float] = []
    expected: list[int] = []

    def holds(rate: float, steps_left: int) -> bool:
        tried.append(rate)
        expected.append(steps_left)
        return rate <= limit

    rate = search_rate(holds, first, max_steps=60)
    assert expected == [max(loads.EXPECTED_STEPS - step, 0) for step in range(1, len(tried) + 1)]
    assert rate is not None
    assert rate <= limit <= rate * (1 + loads.PRECISION)
    assert len(tried) == len(set(tried))


def test_a_search_is_bounded() -> None:
    assert search_rate(lambda rate, left: True, 1.0, max_steps=5) == 16
    tried: list[float] = []

    def refuse(rate: float, steps_left: int) -> bool:
        tried.append(rate)
        return False

    assert search_rate(refuse, 1.0, least=0.2) is None
    assert tried == [1, 0.5, 0.25]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"s": 1000.0}
    monkeypatch.setattr("accelmark.serving.stages.time.monotonic", lambda: now["s"])
    return now


def test_parts_have_a_share_and_an_eta_and_the_share_never_falls(clock: dict[str, float]) -> None:
    seen: list[LoadProgress] = []

    def emit(event: Any, value: LoadProgress) -> None:
        seen.append(value)

    reporter = LoadReporter(emit)
    reporter.begin("warming up")
    assert (seen[-1].share, seen[-1].eta_s) == (None, None)
    clock["s"] += 5
    reporter.begin("under load", 10.0, later_s=30.0)
    assert (seen[-1].share, seen[-1].eta_s) == (0.0, 40.0)
    clock["s"] += 4
    reporter.add(7)
    assert (seen[-1].num_requests, seen[-1].share, seen[-1].eta_s) == (7, 0.1, 36.0)
    clock["s"] += 0.5
    reporter.add(1)
    assert len(seen) == 3, "at most one a second"
    clock["s"] += 5.5
    reporter.begin("scenario server", 10.0, later_s=90.0)  # the search takes longer than expected
    assert (seen[-1].share, seen[-1].eta_s) == (0.1, 100.0)
    clock["s"] += 1000
    reporter.begin("scenario server", 10.0)
    clock["s"] += 100000
    reporter.report()
    assert (seen[-1].share, seen[-1].eta_s) == (0.99, 0.0), "overdue, and not complete"


class _AtOnce:
    """A client whose requests all end when the last one is drawn."""

    def run_stage(
        self, requests: Iterable[PlannedRequest], load: Load, record: Record, watch: Callable[[], None] = lambda: None
    ) -> LoadStage:
        drawn = list(requests)
        for request in drawn:
            record(request, _record(load, request, 0.01, gaps_us=tuple(range(1000, 1100))), "text")
        return load.ended(0, 1.0, len(drawn))


def _served(emit: Callable[[Event, Any], None], watch: Callable[[], None] = lambda: None) -> Stages:
    model = SimpleNamespace(tokens=None, directory=None)
    return Stages(_AtOnce(), cast(ServedModel, model), emit, io.StringIO(), AnswerSample(2, random.Random(1)), watch)


def test_drawing_many_long_prompts_is_no_silence(clock: dict[str, float]) -> None:
    phases: list[Event] = []
    watched: list[float] = []
    stages = _served(lambda event, _: phases.append(event), lambda: watched.append(clock["s"]))

    def drawn() -> Iterator[PlannedRequest]:
        for number in range(600):
            clock["s"] += 0.5
            yield PlannedRequest(number, number, "a long prompt", 8, 0.1 * number)

    stages.run(Load(0, 60.0, 60.0, "poisson", rate=10.0), drawn())
    assert phases.count(Event.HEARTBEAT) > 290
    assert len(watched) >= 600, "a server that ends is noticed meanwhile"


def test_a_stage_keeps_columns_of_its_requests_and_no_records() -> None:
    stages = _served(lambda *_: None)
    planned = (PlannedRequest(number, number, "a prompt", 8) for number in range(3000))
    _, requests = stages.run(Load(0, 60.0, 60.0, concurrency=4), planned)
    assert requests.number.tolist() == list(range(3000))
    assert (requests.gaps_us[:300].tolist(), set(requests.num_gaps.tolist())) == ([*range(1000, 1100)] * 3, {100})
    gc.collect()
    assert sum(type(each) is RequestRecord for each in gc.get_objects()) < 1200


def test_a_base_url_may_end_with_the_version_and_what_is_none_is_an_error() -> None:
    for base in ("http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"):
        assert Endpoint(base, "m").url() == "http://host:1/v1/completions"
        assert Endpoint(base, "m", "chat").url() == "http://host:1/v1/chat/completions"
    for base in ("host:1", "ftp://host", "http://", "http://host:99999", "http://me:word@host", "http://h?a=1"):
        with pytest.raises(RequestError, match=r"is not a base URL \(http://HOST:PORT"):
            Endpoint(base, "m").url()


def test_pinned_fields_are_filled_at_any_depth() -> None:
    pinned = {"ignore_eos": True, "min_tokens": "{output_tokens}", "sampling": {"least": ["{output_tokens}"]}}
    body = json.loads(Endpoint("http://host", "m", fields=pinned).body(PlannedRequest(0, 0, "Höre", 4)))
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ("Höre", 4, 4)
    assert (body["ignore_eos"], body["sampling"]) == (True, {"least": [4]})
