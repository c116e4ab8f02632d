"""Compute the figures of a stage of load on a server from the records of its requests.

Formulas are those of vLLM's benchmark (docs.vllm.ai, "Benchmark CLI"), except that latencies count from when a request
was due, not from when it was sent, so that a load generator that falls behind does not hide the server's delay
(coordinated omission).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, NamedTuple

import numpy as np

from accelmark.results.figures.quantiles import blocks_of, distribution, share_interval
from accelmark.results.read.requests import Booleans, Floats, Requests
from accelmark.results.serving_schema import ServingStage, TimelineRequest
from accelmark.spec.log.serving import LoadStage
from accelmark.spec.settings.serving import ServeSettings, Slo

MAX_BACKLOG_SHARE: Final = 0.05
"""Requests of an open load that may be left at the end of the window, over those at its beginning, as a share of the
requests due in it."""
MIN_BACKLOG: Final = 3.0
"""The same in standard deviations of a Poisson number of requests."""
MAX_TIMELINE: Final = 300
_OWN_COUNT_MARGIN: Final = 0.9
"""An answer of the pinned length may give fewer tokens when its text is split into tokens again."""
_OF_LOAD: Final = (
    "stage", "arrival", "concurrency", "rate", "is_search", "scenario", "input_tokens", "output_tokens", "duration_s",
    "lag_p50_ms", "lag_p99_ms", "client_cpu_share",
)  # fmt: skip
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
    """Return the figures of one stage; ``requests`` are its own.

    ``ended_s`` is the time of its event LOAD_END since it began, None without one.
    """
    errors = Counter(status for status in requests.status if status != "ok")
    fields: dict[str, Any] = {
        **{name: getattr(load, name) for name in _OF_LOAD},
        "num_requests": len(requests),
        "num_missing": max(load.num_requests - len(requests), 0),
        "num_implausible": int((~plausible(requests, ended_s)).sum()) + _surplus(requests, load.num_requests),
        "errors": dict(errors),
        **_token_counts(requests),
        **_wrong_lengths(requests, settings),
    }
    window = steady_window(requests, load.concurrency)
    if isinstance(window, str):
        return ServingStage(**fields, window_s=None, num_measured=0, reasons=(window,))
    return ServingStage(**fields, window_s=window, **_over_window(requests, window, load, settings, num_devices))


def _over_window(
    requests: Requests, window: SteadyWindow, load: LoadStage, settings: ServeSettings, num_devices: int
) -> dict[str, Any]:
    due = requests.where((requests.due_s >= window.begin_s) & (requests.due_s < window.end_s))
    ended = requests.is_ok & in_window(requests.end_s, window)
    latencies = latencies_of(due)
    output_rate, total_rate, tokens_per_output = _token_rates(requests, window)
    tpot_ms = latencies["tpot"].at("p50")
    offered = len(due) / window.length_s
    backlog = len(due) - int(in_window(requests.end_s, window).sum())
    is_saturated = load.concurrency is None and backlog > max(
        MAX_BACKLOG_SHARE * len(due), MIN_BACKLOG * np.sqrt(len(due))
    )
    duration_s = np.clip(requests.end_s, window.begin_s, window.end_s) - np.clip(
        requests.due_s, window.begin_s, window.end_s
    )
    reasons = [] if output_rate is not None else ["neither a tokenizer nor the server's usage counts the tokens"]
    return {
        "num_measured": len(due),
        "latencies": latencies,
        "offered_rate": offered,
        "request_rate": int(ended.sum()) / window.length_s,
        "output_token_rate": output_rate,
        "total_token_rate": total_rate,
        "token_rate_per_device": None if output_rate is None else output_rate / num_devices,
        "token_rate_per_user": 1000 / tpot_ms if tpot_ms else None,
        "tokens_per_output": tokens_per_output,
        "is_saturated": is_saturated,
        "mean_concurrency": float(duration_s.sum()) / window.length_s,
        "littles_concurrency": offered * float((due.end_s - due.due_s).mean()) if len(due) else None,
        "reasons": tuple(reasons),
        **_service_level(due, window, settings.slo, is_saturated=is_saturated),
    }


def in_window(times: Floats, window: SteadyWindow) -> Booleans:
    """Return which times are in the window."""
    inside: Booleans = (times >= window.begin_s) & (times < window.end_s)
    return inside


def latencies_of(requests: Requests) -> dict[str, Any]:
    """Return the distribution of each latency, of the requests that were answered."""
    ok = requests.where(requests.is_ok & np.isfinite(requests.first_s))
    blocks = blocks_of(ok.due_s)
    tpot_s = time_per_token(ok)
    has_tpot = np.isfinite(tpot_s)
    was_sent = np.isfinite(ok.sent_s)
    has_queue = np.isfinite(ok.queue_s)
    none = "no request was answered in the window"
    no_queue = "the server does not state it"
    no_gaps = "no answer has a second output" if len(ok) else none
    no_tpot = "no answer has a second token" if np.isfinite(ok.tokens).any() else "tokens were not counted"
    return {
        "ttft": distribution(1000 * (ok.first_s - ok.due_s), blocks, none),
        "sent_to_first": distribution(1000 * (ok.first_s - ok.sent_s)[was_sent], blocks[was_sent], none),
        "itl": distribution(ok.gaps_us / 1000, np.repeat(blocks, ok.num_gaps), no_gaps),
        "tpot": distribution(1000 * tpot_s[has_tpot], blocks[has_tpot], no_tpot if len(ok) else none),
        "e2e": distribution(1000 * (ok.end_s - ok.due_s), blocks, none),
        "queued": distribution(1000 * (ok.sent_s - ok.due_s)[was_sent], blocks[was_sent], none),
        "server_queue": distribution(1000 * ok.queue_s[has_queue], blocks[has_queue], no_queue if len(ok) else none),
    }


def time_per_token(requests: Requests) -> Floats:
    """Return (e2e - TTFT) / (tokens - 1) of each request in seconds; NaN for fewer than two tokens."""
    further = requests.tokens - 1
    return np.where(further > 0, (requests.end_s - requests.first_s) / np.where(further > 0, further, 1), np.nan)


class Outputs(NamedTuple):
    """The outputs of answers, in no order."""

    arrival_s: Floats
    tokens: Floats
    """An answer's tokens are shared equally by its outputs."""


def outputs_of(requests: Requests) -> Outputs:
    """Return all outputs of the requests, which have a first output and a number of tokens."""
    per_output = requests.tokens / (requests.num_gaps + 1)
    elapsed_s = np.cumsum(requests.gaps_us, dtype=np.int64) / 1e6
    before_s = np.concatenate(([0.0], elapsed_s))[np.cumsum(requests.num_gaps) - requests.num_gaps]
    later_s = np.repeat(requests.first_s - before_s, requests.num_gaps) + elapsed_s
    return Outputs(
        np.concatenate((requests.first_s, later_s)),
        np.concatenate((per_output, np.repeat(per_output, requests.num_gaps))),
    )


def counted(requests: Requests) -> Requests:
    """Return the requests that were answered with a known number of tokens."""
    return requests.where(requests.is_ok & np.isfinite(requests.first_s) & np.isfinite(requests.tokens))


def _token_rates(requests: Requests, window: SteadyWindow) -> tuple[float | None, float | None, float | None]:
    """Return output tokens/s, total tokens/s, and tokens per output.

    Tokens count when their output arrived, a prompt's tokens when its first output did.
    """
    known = counted(requests)
    if not len(known):
        return None, None, None
    outputs = outputs_of(known)
    tokens = float(outputs.tokens[in_window(outputs.arrival_s, window)].sum())
    prompts = float(np.nan_to_num(known.tokens_in)[in_window(known.first_s, window)].sum())
    per_output = float(known.tokens.sum()) / len(outputs.tokens)
    return tokens / window.length_s, (tokens + prompts) / window.length_s, per_output


def within_slo(requests: Requests, slo: Slo) -> Booleans:
    """Return which requests were answered and held all limits; an answer of one token holds every limit of TPOT."""
    good = requests.is_ok.copy()
    if slo.ttft_ms is not None:
        good &= 1000 * (requests.first_s - requests.due_s) <= slo.ttft_ms
    if slo.e2e_ms is not None:
        good &= 1000 * (requests.end_s - requests.due_s) <= slo.e2e_ms
    if slo.tpot_ms is not None:
        tpot_ms = 1000 * time_per_token(requests)
        good &= (requests.tokens <= 1) | (tpot_ms <= slo.tpot_ms)
    return good


def has_limits(slo: Slo) -> bool:
    """Return whether an SLO limits anything."""
    return any(limit is not None for limit in (slo.ttft_ms, slo.tpot_ms, slo.e2e_ms))


def _service_level(due: Requests, window: SteadyWindow, slo: Slo, *, is_saturated: bool) -> dict[str, Any]:
    if not has_limits(slo) or not len(due):
        return {}
    good = int(within_slo(due, slo).sum())
    share = good / len(due)
    low, high = share_interval(good, len(due))
    return {
        "goodput": good / window.length_s,
        "slo_share": share,
        "slo_share_low": low,
        "slo_share_high": high,
        "holds_slo": share >= slo.share and not is_saturated,
    }


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
    plausibly: Booleans = good
    return plausibly


def _surplus(requests: Requests, num_counted: int) -> int:
    """Return the number of records that the load generator did not count, or that have the number of another."""
    return len(requests) - min(len(np.unique(requests.number)), num_counted)


def _token_counts(requests: Requests) -> dict[str, int]:
    """Return the sums of both counts of tokens over the answers that have both."""
    both = requests.is_ok & np.isfinite(requests.output_tokens) & np.isfinite(requests.usage_output)
    both_in = requests.is_ok & np.isfinite(requests.input_tokens) & np.isfinite(requests.usage_input)
    return {
        "num_tokens_unknown": int((requests.is_ok & np.isnan(requests.tokens)).sum()),
        "own_tokens": int(requests.output_tokens[both].sum()),
        "usage_tokens": int(requests.usage_output[both].sum()),
        "own_prompt_tokens": int(requests.input_tokens[both_in].sum()),
        "usage_prompt_tokens": int(requests.usage_input[both_in].sum()),
    }


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
    reason = requests.finish_reason[first]
    return {
        "num_wrong_length": len(places),
        "wrong_length": f"{example} (finish_reason {reason})" if reason else example,
    }


def timeline_of(requests: Requests) -> tuple[TimelineRequest, ...]:
    """Return the first requests of a stage for the chart, in the order in which they were due."""

    def rounded(value: float) -> float | None:
        return round(value, 5) if value == value else None

    order = np.lexsort((requests.number, requests.due_s))[:MAX_TIMELINE].tolist()
    return tuple(
        TimelineRequest(
            number=int(requests.number[index]),
            due_s=round(float(requests.due_s[index]), 5),
            sent_s=rounded(float(requests.sent_s[index])),
            queue_s=rounded(float(requests.queue_s[index])),
            first_s=rounded(float(requests.first_s[index])),
            end_s=round(float(requests.end_s[index]), 5),
            status=requests.status[index],
        )
        for index in order
    )
