"""The record of a request from what arrived for it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

from accelmark.serving.client.connection import Response
from accelmark.serving.client.messages import Ended, Request
from accelmark.serving.client.stream import Stream, read_stream
from accelmark.spec.log.serving import RequestRecord, RequestStatus

_HTTP_OK: Final = 200
_SHOWN_BYTES: Final = 300


@final
@dataclass(frozen=True, slots=True)
class Exchange:
    """A request with what arrived for it; times are of ``time.monotonic_ns``."""

    request: Request
    due_ns: int
    end_ns: int
    response: Response
    status: RequestStatus | None = None
    """Where it was given up; null where the response decides."""
    error: str | None = None


async def record_of(exchange: Exchange, stage: int, begin_ns: int) -> Ended:
    """Return the record of a request, with times from ``begin_ns``, and the answer's text."""
    request, response = exchange.request, exchange.response
    is_stream = response.status == _HTTP_OK and response.content_type.startswith("text/event-stream")
    stream = await read_stream(response.pieces, response.arrivals_ns) if is_stream else Stream()
    status, error = (exchange.status, exchange.error) if exchange.status else _status(response, stream, is_stream)
    arrivals = [round((at_ns - begin_ns) / 1e3) for at_ns in stream.arrivals_ns]
    record = RequestRecord(
        stage=stage,
        number=request.number,
        prompt=request.prompt,
        due_s=_seconds(exchange.due_ns - begin_ns),
        sent_s=None if response.sent_ns is None else _seconds(response.sent_ns - begin_ns),
        first_s=arrivals[0] / 1e6 if arrivals else None,
        end_s=_seconds(exchange.end_ns - begin_ns),
        gaps_us=tuple(later - earlier for earlier, later in pairwise(arrivals)),
        status=status,
        http_status=response.status,
        error=" ".join(error.split()) if error else None,
        finish_reason=stream.finish_reason,
        input_tokens=request.input_tokens,
        requested_tokens=request.requested_tokens,
        usage_input=stream.usage_input,
        usage_output=stream.usage_output,
        queue_s=None if stream.queue_ms is None else round(stream.queue_ms / 1e3, 6),
        text_sha256=hashlib.sha256(stream.text.encode()).hexdigest() if is_stream else None,
    )
    return Ended(record=record, text=stream.text)


def _status(response: Response, stream: Stream, is_stream: bool) -> tuple[RequestStatus, str | None]:
    if response.is_malformed:
        return "malformed", response.error
    if response.error:
        return "dropped", response.error
    if response.status != _HTTP_OK:
        return "http_error", f"HTTP {response.status}: {_message(b''.join(response.pieces))}"
    if not is_stream:
        return "malformed", f"the response is {response.content_type or 'without a type'}, not text/event-stream"
    if stream.server_error:
        return "http_error", f"error in the stream: {stream.server_error}"
    if stream.malformed:
        return "malformed", stream.malformed
    if not stream.is_done and stream.finish_reason is None:
        return "malformed", "the stream ended without a finish_reason and without [DONE]"
    return "ok", None


def _message(body: bytes) -> str:
    """Return the message of an error's body, which most servers send as JSON."""
    try:
        found = json.loads(body)
    except ValueError:
        return body[:_SHOWN_BYTES].decode("utf-8", errors="replace")
    for name in ("error", "message", "detail"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return str(found)[:_SHOWN_BYTES]


def _seconds(duration_ns: int) -> float:
    return round(duration_ns / 1e9, 6)
