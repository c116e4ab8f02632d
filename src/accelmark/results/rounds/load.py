"""Read the requests of a load on a server or an engine, and compute the figures of its stages.

Formulas follow vLLM's benchmark (docs.vllm.ai, "Benchmark CLI"), except that latencies count from when a request
was due, not from when it was sent, so that a load generator that falls behind does not hide the server's delay
(coordinated omission).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from accelmark.results import schema
from accelmark.results.schema import PERCENTILES, Distribution, Quantile, ServingStage
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RunError, first_error, raising
from accelmark.spec.log import inference
from accelmark.spec.log.inference import Answer, LoadStage, RequestRecord, StageLoad
from accelmark.spec.model import Spec
from accelmark.spec.settings.serving import ServeSettings, Slo

S = TypeVar("S", bound=Spec)

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.signedinteger]
Booleans = npt.NDArray[np.bool_]
Texts = npt.NDArray[np.object_]

_RECORDS_AT_ONCE: Final = 1024
_FLOATS: Final = (
    "due_s", "sent_s", "first_s", "end_s", "input_tokens", "output_tokens", "requested_tokens", "usage_input",
    "usage_output", "queue_s",
)  # fmt: skip


@dataclass
class LinesReport:
    """Lines of a file of records that could not be read."""

    malformed: int = 0
    first_problem: str = ""
    """Line number and cause."""


@dataclass(frozen=True)
class Requests:
    """Requests as columns, as in ``requests.jsonl``; NaN: null. Times are seconds since the request's stage began."""

    stage: Integers
    number: Integers
    prompt: Integers
    due_s: Floats
    sent_s: Floats
    first_s: Floats
    end_s: Floats
    status: Texts
    """Status, with the HTTP status where that is the error (``http_error 503``)."""
    is_ok: Booleans
    finish_reason: Texts
    input_tokens: Floats
    output_tokens: Floats
    requested_tokens: Floats
    usage_input: Floats
    usage_output: Floats
    queue_s: Floats
    gaps_us: Integers
    """Gaps between outputs of all requests, one request after another."""
    num_gaps: Integers
    """Gaps of each request."""

    def __len__(self) -> int:
        return len(self.stage)

    @property
    def tokens(self) -> Floats:
        """Tokens of each answer: counted with the model's own tokenizer, else the server's ``usage``; NaN: neither."""
        return np.where(np.isnan(self.output_tokens), self.usage_output, self.output_tokens)

    @property
    def tokens_in(self) -> Floats:
        """Tokens of each prompt, counted in the same way."""
        return np.where(np.isnan(self.input_tokens), self.usage_input, self.input_tokens)

    def where(self, chosen: Booleans) -> Requests:
        """Return the chosen requests."""
        kept = {column.name: getattr(self, column.name)[chosen] for column in fields(self) if column.name != "gaps_us"}
        return Requests(**kept, gaps_us=self.gaps_us[np.repeat(chosen, self.num_gaps)])


def read_requests(path: Path) -> tuple[Requests, LinesReport]:
    """Read ``requests.jsonl``; a missing file has no requests. Raises RunError when it cannot be read."""
    report = LinesReport()
    return RequestTable(_lines(path, RequestRecord, report)).requests(), report


class RequestTable:
    """Collects records as columns, which take a small part of the memory of records."""

    def __init__(self, records: Iterable[RequestRecord] = ()) -> None:
        self._recent: list[RequestRecord] = []
        self._parts: list[Requests] = []
        for record in records:
            self.add(record)

    def add(self, record: RequestRecord) -> None:
        """Add a record."""
        self._recent.append(record)
        if len(self._recent) == _RECORDS_AT_ONCE:
            self._parts.append(_columns_of(self._recent))
            self._recent.clear()

    def requests(self) -> Requests:
        """Return the records so far, in their order."""
        parts = [*self._parts, _columns_of(self._recent)]
        columns = (column.name for column in fields(Requests))
        return Requests(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns})


def _columns_of(records: Sequence[RequestRecord]) -> Requests:
    columns: dict[str, Any] = {
        name: np.array([getattr(record, name) for record in records], dtype=np.float64) for name in _FLOATS
    }
    for name in ("stage", "number", "prompt"):
        columns[name] = np.array([getattr(record, name) for record in records], dtype=np.int64)
    return Requests(
        **columns,
        is_ok=np.array([record.status == "ok" for record in records], dtype=np.bool_),
        status=np.array([_status_of(record) for record in records], dtype=np.object_),
        finish_reason=np.array([record.finish_reason for record in records], dtype=np.object_),
        gaps_us=np.array([gap for record in records for gap in record.gaps_us], dtype=np.int32),
        num_gaps=np.array([len(record.gaps_us) for record in records], dtype=np.int64),
    )


def _status_of(record: RequestRecord) -> str:
    has_code = record.status == "http_error" and record.http_status is not None
    return f"{record.status} {record.http_status}" if has_code else record.status


def read_comparisons(node_dir: Path) -> tuple[list[Answer], list[inference.BenchmarkScore], int]:
    """Return the compared answers and scores of a run, which may be missing, and the number of malformed lines."""
    report = LinesReport()
    answers = list(_lines(node_dir / inference.ANSWERS_FILE, Answer, report))
    return answers, list(_lines(node_dir / inference.SCORES_FILE, inference.BenchmarkScore, report)), report.malformed


def _lines(path: Path, model: type[S], report: LinesReport) -> Iterator[S]:
    unreadable = raising(RunError, f"{path}: cannot be read", OSError)
    with unreadable, suppress(FileNotFoundError), path.open("rb", buffering=2**18) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield model.model_validate_json(line)
            except ValidationError as error:
                report.malformed += 1
                report.first_problem = report.first_problem or f"line {number}: {first_error(error)}"


_BLOCKS: Final = 30
_MIN_IN_BLOCK: Final = 10
_MIN_BLOCKS: Final = 5
_TAIL: Final = 0.025
_Z: Final = 1.959964
_REACH: Final = 10.0
"""Standard deviations around a percentile in which the ranks of its interval are looked for: millions of samples have
millions of ranks, and the limits are at about two."""


def blocks_of(times: Floats) -> Integers:
    """Assign requests to blocks of neighbours in time: :data:`_BLOCKS`, or fewer of at least ten requests."""
    count = len(times)
    number = min(_BLOCKS, count // _MIN_IN_BLOCK)
    ranks = np.empty(count, dtype=np.int64)
    ranks[np.argsort(times, kind="stable")] = np.arange(count)
    return ranks * max(number, 1) // max(count, 1)


def distribution(values: Floats, blocks: Integers, absent: str) -> Distribution:
    """Return percentiles of ``values``, whose samples of one block may depend on each other.

    The interval is that of the order statistics X(l) and X(u) with P(l <= B < u) >= 95 % for B binomial with the share
    of the percentile (Conover, Practical Nonparametric Statistics, 3.2). B counts independent samples: the number of
    samples over the design effect, which is the variance of the share of samples below the percentile between blocks
    over that of independent samples (Kish, Survey Sampling, 5.4). ``absent`` is the reason where there are no samples.
    """
    count = len(values)
    if not count:
        return Distribution(count=0, quantiles={name: Quantile(value=None, reason=absent) for name in PERCENTILES})
    ordered = np.sort(values)
    quantiles = {name: _quantile(values, ordered, blocks, share) for name, share in PERCENTILES.items()}
    return Distribution(count=count, mean=float(values.mean()), quantiles=quantiles, curve=latency_curve(ordered))


def latency_curve(ordered: Sequence[float] | npt.NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """Return (share of samples, latency in ms) in steps of 1 %, in finer steps from 99 %; ``ordered`` is sorted."""
    if not len(ordered):
        return ()
    last = len(ordered) - 1
    shares = [point / 100 for point in range(100)] + [1 - 10 ** (-nines / 10) for nines in range(20, 41)]
    indices = sorted({round(last * share) for share in shares} | {last})
    return tuple(((index + 1) / len(ordered), round(float(ordered[index]), 5)) for index in indices)


def _quantile(values: Floats, ordered: Floats, blocks: Integers, share: float) -> Quantile:
    count = len(ordered)
    needed = math.ceil(1 / (1 - share) - 1e-9)
    if count < needed:
        return Quantile(value=None, reason=f"needs {needed:,} samples, {count:,} were measured")
    value = float(ordered[math.ceil(share * count - 1e-9) - 1])
    independent = max(round(count / design_effect(values <= value, blocks)), 1)
    low, high = interval_ranks(independent, share)
    scale = count / independent
    first = math.floor(low * scale) if low else 0
    last = math.ceil(high * scale - 1e-9) if high <= independent else count + 1
    lower = float(ordered[max(first, 1) - 1]) if low else None
    upper = float(ordered[last - 1]) if last <= count else None
    return Quantile(value=value, low=lower, high=upper, num_independent=independent)


def design_effect(is_below: npt.NDArray[np.bool_], blocks: Integers) -> float:
    """Return the variance of a share over the variance of a share of independent samples, at least 1."""
    count, share = len(is_below), float(is_below.mean())
    sizes = np.bincount(blocks)
    if len(sizes) < _MIN_BLOCKS or not 0 < share < 1:
        return 1.0
    below = np.bincount(blocks, weights=is_below)
    between = len(sizes) / (len(sizes) - 1) * float(((below - share * sizes) ** 2).sum()) / count
    return max(between / (share * (1 - share)), 1.0)


def interval_ranks(count: int, share: float) -> tuple[int, int]:
    """Return the ranks (from 1) around a percentile; rank 0 or ``count + 1``: no limit on this side."""
    from scipy.special import bdtr

    centre, reach = count * share, _REACH * math.sqrt(count * share * (1 - share)) + _REACH
    first = max(math.floor(centre - reach), 0)
    below = bdtr(np.arange(first, min(math.ceil(centre + reach), count)), count, share)  # P(B < rank), ranks from 1
    return first + int(np.searchsorted(below, _TAIL, side="right")), first + int(np.searchsorted(below, 1 - _TAIL)) + 1


def share_interval(good: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``count`` > 0 samples (Wilson, JASA 22, 1927)."""
    share, square = good / count, _Z**2
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = _Z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)


MAX_BACKLOG_SHARE: Final = 0.05
"""Requests of an open load that may be left at the end of the window, over those at its beginning, as a share of the
requests due in it."""
MIN_BACKLOG: Final = 3.0
"""The same in standard deviations of a Poisson number of requests."""
MAX_TIMELINE: Final = 300
_OWN_COUNT_MARGIN: Final = 0.9
"""An answer of the pinned length may give fewer tokens when its text is split into tokens again."""
_CLOCK_S: Final = 0.002
"""Resolution allowed for in comparisons of times."""


class SteadyWindow(NamedTuple):
    """The steady-state window of a stage in seconds since it began."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.begin_s

    def has(self, times: Floats) -> Booleans:
        """Return which times are in the window."""
        inside: Booleans = (times >= self.begin_s) & (times < self.end_s)
        return inside


def steady_window(requests: Requests, concurrency: int | None) -> SteadyWindow | str:
    """Return the window without ramp-up and drain, or the reason why there is none.

    Closed load: from when ``concurrency`` requests were first in progress until the last request was started. Open
    load: from when the first request was due until the last one was due.
    """
    if not len(requests):
        return "the stage has no requests"
    due = np.sort(requests.due_s)
    begin_s = float(due[0])
    if concurrency is not None:
        in_progress = np.arange(1, len(due) + 1) - np.searchsorted(np.sort(requests.end_s), due, side="right")
        reached = np.flatnonzero(in_progress >= concurrency)
        if not len(reached):
            return f"the concurrency {concurrency} was never reached: at most {int(in_progress.max())} were in progress"
        begin_s = float(due[reached[0]])
    window = SteadyWindow(begin_s, float(due[-1]))
    if window.length_s <= 0:
        return "no request was started after the load was reached: the stage is too short"
    return window


def measured_stage(
    requests: Requests, load: LoadStage, settings: ServeSettings, num_devices: int, ended_s: float | None
) -> ServingStage:
    """Return the figures of one stage; ``ended_s`` is the time of its LOAD_END since it began, None without one."""
    errors = Counter(status for status in requests.status if status != "ok")
    both = requests.is_ok & np.isfinite(requests.output_tokens) & np.isfinite(requests.usage_output)
    both_in = requests.is_ok & np.isfinite(requests.input_tokens) & np.isfinite(requests.usage_input)
    fields: dict[str, Any] = {
        **{name: getattr(load, name) for name in StageLoad.model_fields},
        "num_requests": len(requests),
        "num_missing": max(load.num_requests - len(requests), 0),
        # Records that the load generator did not count, or that have the number of another.
        "num_implausible": int((~plausible(requests, ended_s)).sum())
        + len(requests)
        - min(len(np.unique(requests.number)), load.num_requests),
        "errors": dict(errors),
        "num_tokens_unknown": int((requests.is_ok & np.isnan(requests.tokens)).sum()),
        "own_tokens": int(requests.output_tokens[both].sum()),
        "usage_tokens": int(requests.usage_output[both].sum()),
        "own_prompt_tokens": int(requests.input_tokens[both_in].sum()),
        "usage_prompt_tokens": int(requests.usage_input[both_in].sum()),
        **_wrong_lengths(requests, settings),
    }
    window = steady_window(requests, load.concurrency)
    if isinstance(window, str):
        return ServingStage(**fields, window_s=None, num_measured=0, reasons=(window,))
    due = requests.where((requests.due_s >= window.begin_s) & (requests.due_s < window.end_s))
    ended = requests.is_ok & window.has(requests.end_s)
    ok = due.where(due.is_ok & np.isfinite(due.first_s))
    blocks = blocks_of(ok.due_s)
    tpot_s = time_per_token(ok)
    none = "no request was answered in the window"
    no_tpot = "no answer has a second token" if np.isfinite(ok.tokens).any() else "tokens were not counted"

    def known(seconds: Floats, absent: str) -> Distribution:
        is_known = np.isfinite(seconds)
        return distribution(1000 * seconds[is_known], blocks[is_known], absent if len(ok) else none)

    latencies = {
        "ttft": known(ok.first_s - ok.due_s, none),
        "sent_to_first": known(ok.first_s - ok.sent_s, none),
        "itl": distribution(
            ok.gaps_us / 1000, np.repeat(blocks, ok.num_gaps), "no answer has a second output" if len(ok) else none
        ),
        "tpot": known(tpot_s, no_tpot),
        "e2e": known(ok.end_s - ok.due_s, none),
        "queued": known(ok.sent_s - ok.due_s, none),
        "server_queue": known(ok.queue_s, "the server does not state it"),
    }
    output_rate, total_rate, tokens_per_output = _token_rates(requests, window)
    tpot_ms = latencies["tpot"].at("p50")
    offered = len(due) / window.length_s
    backlog = len(due) - int(window.has(requests.end_s).sum())
    allowed = max(MAX_BACKLOG_SHARE * len(due), MIN_BACKLOG * np.sqrt(len(due)))
    is_saturated = load.concurrency is None and backlog > allowed
    begins_s, ends_s = (np.clip(times, window.begin_s, window.end_s) for times in (requests.due_s, requests.end_s))
    reasons = [] if output_rate is not None else ["neither a tokenizer nor the server's usage counts the tokens"]
    return ServingStage(
        **fields,
        window_s=window,
        num_measured=len(due),
        latencies=latencies,
        offered_rate=offered,
        request_rate=int(ended.sum()) / window.length_s,
        output_token_rate=output_rate,
        total_token_rate=total_rate,
        token_rate_per_device=None if output_rate is None else output_rate / num_devices,
        token_rate_per_user=1000 / tpot_ms if tpot_ms else None,
        tokens_per_output=tokens_per_output,
        is_saturated=is_saturated,
        mean_concurrency=float((ends_s - begins_s).sum()) / window.length_s,
        littles_concurrency=offered * float((due.end_s - due.due_s).mean()) if len(due) else None,
        reasons=tuple(reasons),
        **_service_level(due, window, settings.slo, is_saturated=is_saturated),
    )


def time_per_token(requests: Requests) -> Floats:
    """Return (e2e - TTFT) / (tokens - 1) of each request in seconds; NaN for fewer than two tokens."""
    further = requests.tokens - 1
    return np.where(further > 0, (requests.end_s - requests.first_s) / np.where(further > 0, further, 1), np.nan)


def outputs_of(requests: Requests) -> tuple[Floats, Floats]:
    """Return the arrivals in seconds and tokens of all outputs of requests with a first output and known tokens.

    They are in no order. An answer's tokens are shared equally by its outputs.
    """
    per_output = requests.tokens / (requests.num_gaps + 1)
    elapsed_s = np.cumsum(requests.gaps_us, dtype=np.int64) / 1e6
    before_s = np.concatenate(([0.0], elapsed_s))[np.cumsum(requests.num_gaps) - requests.num_gaps]
    later_s = np.repeat(requests.first_s - before_s, requests.num_gaps) + elapsed_s
    arrival_s = np.concatenate((requests.first_s, later_s))
    return arrival_s, np.concatenate((per_output, np.repeat(per_output, requests.num_gaps)))


def counted(requests: Requests) -> Requests:
    """Return the requests that were answered with a known number of tokens."""
    return requests.where(requests.is_ok & np.isfinite(requests.first_s) & np.isfinite(requests.tokens))


def _token_rates(requests: Requests, window: SteadyWindow) -> tuple[float | None, float | None, float | None]:
    known = counted(requests)
    if not len(known):
        return None, None, None
    arrival_s, output_tokens = outputs_of(known)
    tokens = float(output_tokens[window.has(arrival_s)].sum())
    prompts = float(np.nan_to_num(known.tokens_in)[window.has(known.first_s)].sum())
    per_output = float(known.tokens.sum()) / len(output_tokens)
    return tokens / window.length_s, (tokens + prompts) / window.length_s, per_output


def _service_level(due: Requests, window: SteadyWindow, slo: Slo, *, is_saturated: bool) -> dict[str, Any]:
    if not slo.has_limits or not len(due):
        return {}
    holding = due.is_ok.copy()
    if slo.ttft_ms is not None:
        holding &= 1000 * (due.first_s - due.due_s) <= slo.ttft_ms
    if slo.e2e_ms is not None:
        holding &= 1000 * (due.end_s - due.due_s) <= slo.e2e_ms
    if slo.tpot_ms is not None:
        holding &= (due.tokens <= 1) | (1000 * time_per_token(due) <= slo.tpot_ms)
    good = int(holding.sum())
    low, high = share_interval(good, len(due))
    share = good / len(due)
    level = {"goodput": good / window.length_s, "slo_share": share, "slo_share_low": low, "slo_share_high": high}
    return level | {"holds_slo": share >= slo.share and not is_saturated}


def plausible(requests: Requests, ended_s: float | None) -> Booleans:
    """Return which requests have times in their order, within the stage, and gaps that fit between them."""
    sent_s = np.where(np.isnan(requests.sent_s), requests.due_s, requests.sent_s)
    first_s = np.where(np.isnan(requests.first_s), np.maximum(sent_s, requests.due_s), requests.first_s)
    gaps_s = np.concatenate(([0], np.cumsum(requests.gaps_us, dtype=np.int64))) / 1e6
    ends = np.cumsum(requests.num_gaps)
    streamed_s = gaps_s[ends] - gaps_s[ends - requests.num_gaps]
    good = (requests.due_s >= -_CLOCK_S) & (sent_s >= requests.due_s - _CLOCK_S) & (first_s >= sent_s - _CLOCK_S)
    good &= first_s + streamed_s <= requests.end_s + _CLOCK_S
    good &= np.isfinite(requests.first_s) | (requests.num_gaps == 0)
    if ended_s is not None:
        good &= requests.end_s <= ended_s + _CLOCK_S
    if len(requests.gaps_us):
        negative = np.concatenate(([0], np.cumsum(requests.gaps_us < 0)))
        good &= negative[ends] == negative[ends - requests.num_gaps]
    return np.asarray(good)


def _wrong_lengths(requests: Requests, settings: ServeSettings) -> dict[str, Any]:
    """Count the answers of another length than the pinned one.

    The server's ``usage`` must be exact. Text that is split into tokens again may give fewer of them, so the own count
    decides on its own only where there is no usage, or where it is below 90 % of the requested number.
    """
    if not settings.is_pinned:
        return {}
    own, usage, requested = requests.output_tokens, requests.usage_output, requests.requested_tokens
    wrong = requests.is_ok & (
        (np.isfinite(usage) & (usage != requested))
        | (np.isfinite(own) & (own < _OWN_COUNT_MARGIN * requested))
        | (np.isnan(usage) & (own < requested))
    )
    places = np.flatnonzero(wrong)
    if not len(places):
        return {}
    first = int(places[0])
    counts = ((usage[first], "by the server's usage"), (own[first], "by the model's tokenizer"))
    told = " and ".join(f"{count:.0f} tokens {where}" for count, where in counts if count == count)
    example = f"request {requests.number[first]} has {told} instead of {requested[first]:.0f}"
    if reason := requests.finish_reason[first]:
        example += f" (finish_reason {reason})"
    return {"num_wrong_length": len(places), "wrong_length": example}


def timeline_of(requests: Requests) -> tuple[schema.TimelineRequest, ...]:
    """Return the first requests of a stage for the chart, in the order in which they were due."""
    first = np.lexsort((requests.number, requests.due_s))[:MAX_TIMELINE]
    names = ("due_s", "sent_s", "queue_s", "first_s", "end_s")
    columns = {name: getattr(requests, name)[first].tolist() for name in names}
    return tuple(
        schema.TimelineRequest(
            number=int(requests.number[index]),
            status=requests.status[index],
            **{name: round(times[row], 5) if times[row] == times[row] else None for name, times in columns.items()},
        )
        for row, index in enumerate(first.tolist())
    )


MIN_REPEATED: Final = 5
"""Repeated and first uses of prompts from which their speeds are compared."""
MAX_SPEEDUP: Final = 1000.0
"""Greatest speed-up that is reported: a stored answer may take no measurable time."""


def compared_answers(
    answers: Sequence[Answer], requests: Requests, num_promised: int, min_agreement: float
) -> schema.AnswersCompared:
    """Return the agreement of the answers with the framework's: the mean of each answer's share of agreeing tokens."""
    ok = requests.where(requests.is_ok)
    known = set(zip_strict(ok.stage.tolist(), ok.number.tolist(), ok.prompt.tolist()))
    shares = [min(answer.num_agreeing / answer.num_tokens, 1.0) for answer in answers if answer.num_tokens > 0]
    return schema.AnswersCompared(
        num_promised=num_promised,
        num_compared=len(shares),
        agreement=sum(shares) / len(shares) if shares else None,
        worst=min(shares, default=None),
        min_agreement=min_agreement,
        num_foreign=sum((answer.stage, answer.number, answer.prompt) not in known for answer in answers),
    )


def prompt_use(requests: Requests) -> schema.PromptUse:
    """Return how often prompts were used again, and how much faster they were then; warm-up is a use as well.

    Durations are relative to the mean of their stage, so that stages of different load are compared together.
    """
    order = np.lexsort((requests.due_s, requests.stage))
    _, first = np.unique(requests.prompt[order], return_index=True)
    again = np.ones(len(requests), dtype=np.bool_)
    again[order[first]] = False
    measured = requests.stage >= 0
    answered = requests.is_ok & measured & (requests.tokens > 0) & np.isfinite(requests.first_s)
    tokens = np.where(answered, requests.tokens, 1)
    return schema.PromptUse(
        num_requests=int(measured.sum()),
        num_unique=len(np.unique(requests.prompt[measured])),
        num_repeated=int((answered & again).sum()),
        e2e_speedup=_speedup((requests.end_s - requests.due_s) / tokens, answered, again, requests),
        tpot_speedup=_speedup(time_per_token(requests), answered, again, requests),
        ttft_speedup=_speedup(requests.first_s - requests.due_s, answered, again, requests),
    )


def _speedup(durations: Floats, answered: Booleans, again: Booleans, requests: Requests) -> float | None:
    """Return the median of first uses over the median of repeated uses; None where there are too few."""
    relative: Floats = np.full(len(durations), np.nan)
    for stage in np.unique(requests.stage[answered]).tolist():
        here = answered & (requests.stage == stage) & np.isfinite(durations)
        if here.any() and (middle := float(durations[here].mean())) > 0:
            relative[here] = durations[here] / middle
    before, after = relative[~again & np.isfinite(relative)], relative[again & np.isfinite(relative)]
    if min(len(before), len(after)) < MIN_REPEATED:
        return None
    return min(float(np.median(before)) / max(float(np.median(after)), 1e-9), MAX_SPEEDUP)


_NUM_BINS: Final = 300
_MIN_BIN_S: Final = 0.5


def curves_of(loads: Sequence[LoadStage], requests: Requests) -> dict[str, tuple[schema.Point, ...]]:
    """Return ``throughput`` (output tokens/s) and ``requests_in_progress``; ``step`` is the number of the stage."""
    begins_s = [(load.stage, load.begin_mono_s - loads[0].begin_mono_s) for load in loads]
    numbered = ((number, begin_s, requests.where(requests.stage == number)) for number, begin_s in begins_s)
    stages = [stage for stage in numbered if len(stage[2])]
    if not stages:
        return {}
    end_s = max(begin_s + float(requests.end_s.max()) for _, begin_s, requests in stages)
    num_bins = max(min(_NUM_BINS, int(end_s / _MIN_BIN_S)), 1)
    edges = np.linspace(0.0, max(end_s, _MIN_BIN_S), num_bins + 1)
    tokens = np.zeros(num_bins)
    busy_s = np.zeros(num_bins)
    for _, begin_s, requests in stages:
        arrival_s, output_tokens = outputs_of(counted(requests))
        tokens += np.histogram(begin_s + arrival_s, bins=edges, weights=output_tokens)[0]
        # Time that requests cover up to each edge: number begun x edge - sum of begins, less the same of their ends.
        covered_s = np.zeros(len(edges))
        for sign, times in ((1, requests.due_s), (-1, requests.end_s)):
            times = np.sort(begin_s + times)
            number = np.searchsorted(times, edges, side="right")
            covered_s += sign * (number * edges - np.concatenate(([0.0], np.cumsum(times)))[number])
        busy_s += np.diff(covered_s)
    width_s = edges[1] - edges[0]
    middles = (edges[:-1] + edges[1:]) / 2
    numbers = np.searchsorted([begin_s for _, begin_s, _ in stages], middles, side="right") - 1
    names = [stages[max(number, 0)][0] for number in numbers.tolist()]
    return {
        name: tuple(
            schema.Point(step=stage, time_s=round(time, 3), value=float(f"{total / width_s:.5g}"))
            for stage, time, total in zip_strict(names, middles.tolist(), totals.tolist())
        )
        for name, totals in (("throughput", tokens), ("requests_in_progress", busy_s))
    }
