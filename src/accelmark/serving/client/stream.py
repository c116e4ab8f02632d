"""Server-sent events of a response: outputs with their arrivals, text, end reason and ``usage``."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Final, final

from pydantic_core import from_json

from accelmark.spec.backports import zip_strict

_EVENT_END: Final = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_EVENTS_AT_ONCE: Final = 64
"""Events that are read before other connections get their turn: about 0.1 ms."""
_REASONING: Final = ("reasoning_content", "reasoning")
"""Keys of the text that a model writes before its answer."""
_QUEUE_TIME: Final = ("metrics", "queue_time_ms")
"""Where a server states how long a request waited before it began (vLLM, "Per-Request Metrics")."""


@final
@dataclass
class Stream:
    """Content of a stream of completions."""

    arrivals_ns: list[int] = field(default_factory=list)
    """Arrival of each event that has text."""
    parts: list[str] = field(default_factory=list)
    """Their texts."""
    finish_reason: str | None = None
    usage_input: int | None = None
    usage_output: int | None = None
    queue_ms: float | None = None
    """Time that the request waited in the server's queue, as the server states it."""
    is_done: bool = False
    """Whether ``[DONE]`` arrived."""
    server_error: str | None = None
    """Message of an error that the server sent as an event."""
    malformed: str | None = None
    """The first violation of the API; later events were not read."""

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(self.parts)

    def add(self, event: Any, arrived_ns: int) -> None:
        """Take one event, as JSON values, or the ValueError of what is not JSON.

        Raises:
            _MalformedError: it is not as the API defines it.
        """
        if isinstance(event, ValueError):
            raise _MalformedError("an event is not JSON")
        if not isinstance(event, dict):
            raise _MalformedError("an event is not a JSON object")
        if (error := event.get("error")) is not None:
            message = error.get("message") if isinstance(error, dict) else error
            self.server_error = str(message or error)
            return
        choices = event.get("choices") or ()
        if not isinstance(choices, (list, tuple)) or not all(isinstance(choice, dict) for choice in choices):
            raise _MalformedError("choices: is not a list of JSON objects")
        for choice in choices:
            if text := _text_of(choice):
                self.parts.append(text)
                self.arrivals_ns.append(arrived_ns)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if isinstance(usage := event.get("usage"), dict):
            self.usage_input = _count(usage, "prompt_tokens", self.usage_input)
            self.usage_output = _count(usage, "completion_tokens", self.usage_output)
        section, name = _QUEUE_TIME
        if isinstance(metrics := event.get(section), dict) and isinstance(waited := metrics.get(name), (int, float)):
            self.queue_ms = float(waited)

    def add_plain(self, event: Any, arrived_ns: int) -> bool:
        """Take an event of one choice with nothing but text, as most are; return False for any other."""
        try:
            (choice,) = event["choices"]
            delta = choice.get("delta")
            text = choice["text"] if delta is None else delta["content"]
            if choice.get("finish_reason") or event.get("usage") or (delta is not None and len(delta) > 2):
                return False
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        if type(text) is not str or not text:
            return False
        self.parts.append(text)
        self.arrivals_ns.append(arrived_ns)
        return True


class _MalformedError(Exception):
    """An event is not as the API defines it."""


async def read_stream(pieces: Sequence[bytes], arrivals_ns: Sequence[int]) -> Stream:
    """Read the body of a response, which arrived in ``pieces``; other connections get their turn in between.

    An event has arrived with the piece that has its end.
    """
    stream = Stream()
    events = _events(pieces, arrivals_ns)
    while batch := list(islice(events, _EVENTS_AT_ONCE)):
        for (payload, arrived_ns), value in zip_strict(batch, _values([payload for payload, _ in batch])):
            if stream.add_plain(value, arrived_ns):
                continue
            if payload.strip() == b"[DONE]":
                stream.is_done = True
                return stream
            try:
                stream.add(value, arrived_ns)
            except _MalformedError as error:
                shown = payload.strip()[:80].decode("utf-8", errors="replace")
                stream.malformed = f"{error}: {shown!r}"
                return stream
        await asyncio.sleep(0)
    return stream


def has_output(pieces: Sequence[bytes]) -> bool:
    """Return whether an event with text is in the received part of a body."""
    stream = Stream()
    for payload, _ in _events(pieces, [0] * len(pieces)):
        if payload.strip() == b"[DONE]":
            return False
        try:
            stream.add(_value(payload), 0)
        except _MalformedError:  # or the rest of it has not arrived
            return False
        if stream.arrivals_ns:
            return True
    return False


def _events(pieces: Sequence[bytes], arrivals_ns: Sequence[int]) -> Iterator[tuple[bytes, int]]:
    """Yield the data of each event with its arrival; comments and other fields are left out."""
    for number, piece in enumerate(pieces):
        if piece.find(b"\n\n") != len(piece) - 2 or piece[:5] != b"data:" or piece.find(b"\n") != len(piece) - 2:
            break
        yield piece[5:-2], arrivals_ns[number]  # a piece is an event, as most are
    else:
        return
    pieces, arrivals_ns = pieces[number:], arrivals_ns[number:]
    body, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
    begin = index = 0
    for match in _EVENT_END.finditer(body):
        block, begin = body[begin : match.start()], match.end()
        index = bisect_left(ends, begin, index)
        if payload := _payload(block):
            yield payload, arrivals_ns[index]
    if payload := _payload(body[begin:]):  # a last event without its blank line
        yield payload, arrivals_ns[-1]


def _payload(block: bytes) -> bytes:
    if block.startswith(b"data:") and b"\n" not in block and b"\r" not in block:
        return block[5:].strip()
    lines = (line for line in _LINE_END.split(block) if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines).strip()


def _values(payloads: Sequence[bytes]) -> list[Any]:
    """Parse JSON in one call, since calls cost more than bytes; other texts become their ValueError."""
    texts = [b"null" if payload.strip() == b"[DONE]" else payload for payload in payloads]
    try:
        values: list[Any] = from_json(b"[%b]" % b",".join(texts))
    except ValueError:
        values = []
    return values if len(values) == len(texts) else [_value(text) for text in texts]


def _value(text: bytes) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        return error


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        reasoning = next((delta[name] for name in _REASONING if delta.get(name)), None)
        texts = [reasoning, delta.get("content")]
    else:
        texts = [choice.get("text")]
    if any(text is not None and not isinstance(text, str) for text in texts):
        raise _MalformedError("the text of a choice is not a string")
    return "".join(text for text in texts if text)


def _count(usage: dict[str, Any], name: str, before: int | None) -> int | None:
    count = usage.get(name)
    return count if isinstance(count, int) and count >= 0 else before
