"""Client of an engine: batches of requests, one after the other, recorded as served requests are."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from accelmark.infer.process.engine_process import EngineProcess
from accelmark.serving.client.processes import Load
from accelmark.serving.load.prompts import Decode, Encode
from accelmark.serving.request import PlannedRequest
from accelmark.spec.log.serving import LoadStage, RequestRecord

_MIN_BATCHES: Final = 3
"""Batches of a stage at least: its window is without the last one."""


class _Batch(NamedTuple):
    requests: Sequence[PlannedRequest]
    tokens: Tensor
    """(requests, length)."""
    num_tokens: int


@final
class EngineClient:
    """Sends batches to an engine; its clock is that of this process, on which tokens arrive."""

    def __init__(self, process: EngineProcess, encode: Encode, decode: Decode) -> None:
        self._process = process
        self._encode = encode
        self._decode = decode

    def run_stage(
        self,
        requests: Iterable[PlannedRequest],
        load: Load,
        record: Callable[[RequestRecord, str], None],
        watch: Callable[[], None] = lambda: None,
    ) -> LoadStage:
        """Run batches of ``load.concurrency`` requests for about ``load.until_s``, at least three.

        Two batches before the stage begins are in no figure: in the first the engine may compile for its shape, and
        the duration of the second shows how many batches the stage has, which are made before it begins.

        Raises:
            AccelmarkError: the engine failed.
        """
        planned = iter(requests)
        size = load.concurrency or 1
        took_ns = 1
        for _ in range(2):
            warm_up = self._batch(list(islice(planned, size)))
            before_ns = time.monotonic_ns()
            self._generate(warm_up)
            took_ns = max(time.monotonic_ns() - before_ns, 1)
        wanted = max(_MIN_BATCHES, round(load.until_s * 1e9 / took_ns))
        batches: list[_Batch] = []
        while len(batches) < wanted and len(chosen := list(islice(planned, size))) == size:
            batches.append(self._batch(chosen))
        begin_ns = due_ns = time.monotonic_ns()
        done = []
        for batch in batches:
            arrivals_ns, answers = self._generate(batch)
            done.append((batch, due_ns, arrivals_ns, answers))
            due_ns = arrivals_ns[-1]
            watch()
        for batch, batch_due_ns, batch_ns, answers in done:
            for request, answer in zip(batch.requests, answers, strict=True):
                times_us = [round((at_ns - begin_ns) / 1e3) for at_ns in batch_ns]
                text = self._decode(answer)
                due_s = (batch_due_ns - begin_ns) / 1e9
                record(_record(request, load.stage, due_s, batch.tokens.shape[1], times_us, text), text)
        return LoadStage(
            stage=load.stage,
            arrival=load.arrival,
            concurrency=load.concurrency,
            rate=None,
            input_tokens=load.input_tokens,
            output_tokens=load.output_tokens,
            begin_mono_s=begin_ns / 1e9,
            duration_s=(due_ns - begin_ns) / 1e9,
            num_requests=size * len(batches),
            lag_p50_ms=None,
            lag_p99_ms=None,
            client_cpu_share=0.0,
        )

    def _batch(self, requests: Sequence[PlannedRequest]) -> _Batch:
        tokens = torch.tensor([self._encode(str(request.content)) for request in requests])
        return _Batch(requests, tokens, requests[0].requested_tokens)

    def _generate(self, batch: _Batch) -> tuple[list[int], list[list[int]]]:
        """Return when the tokens of each step arrived (``time.monotonic_ns``), and the answers."""
        steps = list(self._process.generate(batch.tokens, batch.num_tokens))
        return [at_ns for at_ns, _ in steps], torch.stack([tokens for _, tokens in steps], 1).tolist()


def _record(
    request: PlannedRequest, stage: int, due_s: float, input_tokens: int, times_us: Sequence[int], text: str
) -> RequestRecord:
    return RequestRecord(
        stage=stage,
        number=request.number,
        prompt=request.prompt,
        due_s=due_s,
        sent_s=due_s,
        first_s=times_us[0] / 1e6,
        end_s=times_us[-1] / 1e6,
        gaps_us=tuple(later - earlier for earlier, later in pairwise(times_us)),
        status="ok",
        finish_reason="length",
        input_tokens=input_tokens,
        output_tokens=len(times_us),
        requested_tokens=request.requested_tokens,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
