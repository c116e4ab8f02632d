"""A request that the load plans, its stage, and the service that it is sent to."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from accelmark.spec.errors import RequestError, RunError, raising
from accelmark.spec.log.inference import LoadStage, RequestRecord, ServeEndReason
from accelmark.spec.plugins.programs import REQUEST_PLACEHOLDER
from accelmark.spec.settings.serving import StageArrival, TokenScenario

Api = Literal["completions", "chat"]
Message = Mapping[str, Any]
"""A message of a chat: ``role`` and ``content``."""


class ServeError(RunError):
    """A server or endpoint failed."""

    def __init__(self, message: str, end_reason: ServeEndReason) -> None:
        super().__init__(message)
        self.end_reason: ServeEndReason = end_reason


class PlannedRequest(NamedTuple):
    """One request of a stage."""

    number: int
    """Position in the stage."""
    prompt: int
    """Number of the prompt; the same number is the same prompt."""
    content: str | tuple[Message, ...]
    """Text, or the messages of a chat."""
    requested_tokens: int
    due_s: float | None = None
    """Seconds from the beginning of the stage; null in a closed loop."""
    input_tokens: int | None = None
    """Tokens of the prompt, where they were counted."""


Watch = Callable[[], None]
"""Called several times a second, or every second, while something lasts; its exceptions end that."""
Record = Callable[[PlannedRequest, RequestRecord, str], object]
"""Gets each request that ended with its record and the text of its answer."""


@dataclass(frozen=True)
class LoadGenSettings:
    """Settings of one LoadGen run."""

    min_duration_s: float
    min_queries: int
    queries_per_s: float = 1.0
    """Offline: expected samples per second; Server: target rate of queries."""
    latency_s: float = 1.0
    """SingleStream and MultiStream: expected latency."""
    samples_per_query: int = 1
    latency_bound_ms: float | None = None
    token_latencies: bool = False
    """Whether latencies of the first and of further tokens are measured; the answers' tokens are then counted."""
    ttft_ms: float | None = None
    """Limits of the Server scenario with token latencies, in place of ``latency_bound_ms``."""
    tpot_ms: float | None = None
    share: float = 0.99
    """Share of the queries of the Server scenario with token latencies that must hold the limits."""


@dataclass(frozen=True)
class LoadGenRun:
    """A run of a scenario with token latencies, whose queries are the requests of a stage of the load."""

    scenario: TokenScenario
    settings: LoadGenSettings
    log_dir: Path
    tokenizer_dir: Path | None = None
    """Directory of the tokenizer that counts the tokens of answers; None: the server's count is used."""


@dataclass(frozen=True)  # pydantic 2.9 cannot read a named tuple whose annotations name what the reader lacks
class Load:
    """The kind of the stage."""

    stage: int
    """-1 for warm-up."""
    until_s: float
    """Time in which requests are started; those in progress are waited for."""
    timeout_s: float
    arrival: StageArrival = "closed"
    concurrency: int | None = None
    """Requests in progress of a closed loop."""
    rate: float | None = None
    """Requests per second of an open loop, as it was planned."""
    is_search: bool = False
    later_s: float = 0.0
    """Planned duration of the later stages, for the remaining time."""
    loadgen: LoadGenRun | None = None
    num_drawn: int | None = None
    """Requests for LoadGen that are drawn before the stage begins."""
    input_tokens: int | None = None
    """Lengths of prompts and answers; None where the settings of prompts state them."""
    output_tokens: int | None = None

    def ended(
        self,
        begin_ns: int,
        duration_s: float,
        num_requests: int,
        *,
        lag_p50_ms: float | None = None,
        lag_p99_ms: float | None = None,
        client_cpu_share: float = 0.0,
    ) -> LoadStage:
        """Return the stage that began at ``begin_ns`` (``time.monotonic_ns``) as it is logged at its end."""
        shared = {name: value for name, value in vars(self).items() if name in LoadStage.model_fields}
        return LoadStage(
            **shared,
            scenario=self.loadgen.scenario if self.loadgen else None,
            begin_mono_s=begin_ns / 1e9,
            duration_s=duration_s,
            num_requests=num_requests,
            lag_p50_ms=lag_p50_ms,
            lag_p99_ms=lag_p99_ms,
            client_cpu_share=client_cpu_share,
        )


@dataclass(frozen=True)
class Endpoint:
    """A service with the OpenAI-compatible API."""

    base_url: str
    """``http://host:port`` or ``https://host/path``; ``/v1`` is added where it ends with no version of the API."""
    model: str
    api: Api = "completions"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of requests; see :class:`accelmark.spec.plugins.programs.ServerSpec`."""

    def url(self, api: Api | None = None) -> str:
        """Return the URL of requests to ``api``, by default the endpoint's own. Raises RequestError: it is none."""
        base = self.base_url.rstrip("/")
        try:
            parts = urlsplit(base)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.query or parts.fragment or parts.username is not None:
            raise RequestError(f"endpoint: {self.base_url!r} is not a base URL (http://HOST:PORT or https://HOST/PATH)")
        path = "/chat/completions" if (api or self.api) == "chat" else "/completions"
        return f"{base}{'' if re.search(r'/v[0-9]+$', base) else '/v1'}{path}"

    def require_reachable(self) -> None:
        """Connect once. Raises ServeError: nothing accepts the connection."""
        parts = urlsplit(self.url())
        port = parts.port or (443 if parts.scheme == "https" else 80)
        what = f"{self.base_url}: cannot be reached; check the URL, and that the server runs"
        with raising(partial(ServeError, end_reason="unreachable"), what, OSError):
            socket.create_connection((parts.hostname, port), timeout=10.0).close()

    def body(self, request: PlannedRequest) -> bytes:
        """Return the body of a request: JSON, greedy decoding, streamed, with ``usage`` at the end."""
        fields: dict[str, Any] = {"model": self.model}
        if self.api == "chat":
            chat = isinstance(request.content, tuple)
            fields["messages"] = request.content if chat else [{"role": "user", "content": request.content}]
        elif isinstance(request.content, str):
            fields["prompt"] = request.content
        else:
            raise RequestError("prompts: messages need api: chat")
        fields |= {"max_tokens": request.requested_tokens, "temperature": 0.0, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        further = json.dumps(dict(self.fields)).replace(f'"{REQUEST_PLACEHOLDER}"', str(request.requested_tokens))
        return json.dumps(fields | json.loads(further), ensure_ascii=False, separators=(",", ":")).encode()
