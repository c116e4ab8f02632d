"""Generate text with an engine: batches of requests, one after the other, recorded as served requests are."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from accelmark.infer.engine_process import EngineProcess
from accelmark.serving.answers import AnswerSample, compare_answers
from accelmark.serving.benchmarks import run_benchmarks
from accelmark.serving.load.plan import LoadPlan
from accelmark.serving.load.prompts import Decode, Encode
from accelmark.serving.loadgen.scenarios import TokenScenarios
from accelmark.serving.model import ServedModel
from accelmark.serving.request import Answered, Load, PlannedRequest, Record
from accelmark.serving.stages import Stages
from accelmark.spec.errors import DataError
from accelmark.spec.log.events import Event
from accelmark.spec.log.serving import ANSWERS_FILE, REQUESTS_FILE, LoadStage, RequestRecord
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.serving import generation_load

_WAIT_S: Final = 0.2
"""Longest wait for a submitted request before the stage is watched again."""
_MIN_BATCHES: Final = 3
"""Batches of a stage at least: its window is without the last one."""


def generate(
    settings: InferSettings,
    model: ServedModel,
    process: EngineProcess,
    data_dirs: Mapping[str, Path],
    device_type: str,
    node_dir: Path,
    emit: Callable[[Event, Any], None],
) -> None:
    """Measure accuracy in benchmarks, run all stages, and compare a sample of the answers with the framework's.

    Raises:
        AccelmarkError: the engine or the framework failed, or the text has too few prompts.
    """
    load = generation_load(settings)
    if model.input_tokens is None or model.text is None:
        raise DataError("generation needs the model's tokenizer (tokenizer.json)")
    plan = LoadPlan(load, model)
    sample = AnswerSample(load.num_compared, random.Random(load.seed))
    client = EngineClient(process, model.input_tokens, model.text, max(settings.generate_batches))
    with (node_dir / REQUESTS_FILE).open("w", encoding="utf-8") as stream:
        stages = Stages(client, model, emit, stream, sample, lambda: None)
        if settings.benchmarks:
            stages.progress.begin("answering benchmarks")
            asked = {"model_dir": str(model.directory), "batch_size": settings.batch_size}
            run_benchmarks(settings, asked, data_dirs, node_dir, stages.progress.report, process.call)
        plan.run(stages.run)
        TokenScenarios(load, plan, stages, node_dir, emit).run()
    stages.progress.begin("comparing answers")
    compare_answers(load, device_type, model, sample, node_dir / ANSWERS_FILE)


class _Batch(NamedTuple):
    requests: Sequence[PlannedRequest]
    tokens: Tensor
    """(requests, length)."""
    num_tokens: int


@final
class EngineClient:
    """Sends batches to an engine; its clock is that of this process, on which tokens arrive."""

    def __init__(self, process: EngineProcess, encode: Encode, decode: Decode, live_batch: int = 1) -> None:
        """Take the engine's process and the tokenizer; submitted requests are computed ``live_batch`` at a time."""
        self.process = process
        self._encode = encode
        self.decode = decode
        self.live_batch = live_batch
        """Submitted requests that are computed at a time at most."""

    def run_stage(
        self,
        requests: Iterable[PlannedRequest],
        load: Load,
        record: Record,
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
            warm_up = self.batch(list(islice(planned, size)))
            before_ns = time.monotonic_ns()
            self._generate(warm_up)
            took_ns = max(time.monotonic_ns() - before_ns, 1)
        wanted = max(_MIN_BATCHES, round(load.until_s * 1e9 / took_ns))
        batches: list[_Batch] = []
        while len(batches) < wanted and len(chosen := list(islice(planned, size))) == size:
            batches.append(self.batch(chosen))
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
                text = self.decode(answer)
                due_s = (batch_due_ns - begin_ns) / 1e9
                ended = _record(request, load.stage, due_s, batch.tokens.shape[1], times_us, text)
                record(request, ended, text)
        return load.ended(begin_ns, (due_ns - begin_ns) / 1e9, size * len(batches))

    @contextmanager
    def live_stage(
        self,
        load: Load,
        record: Record,
        watch: Callable[[], None] = lambda: None,
    ) -> Iterator[LiveBatches]:
        """Open a stage whose requests are submitted one by one, and computed in batches of those that wait."""
        yield LiveBatches(self, load, record, watch)

    def batch(self, requests: Sequence[PlannedRequest]) -> _Batch:
        """Return requests of the same lengths as a batch."""
        tokens = torch.tensor([self._encode(str(request.content)) for request in requests])
        return _Batch(requests, tokens, requests[0].requested_tokens)

    def _generate(self, batch: _Batch) -> tuple[list[int], list[list[int]]]:
        """Return when the tokens of each step arrived (``time.monotonic_ns``), and the answers."""
        steps = list(self.process.generate(batch.tokens, batch.num_tokens))
        return [at_ns for at_ns, _ in steps], torch.stack([tokens for _, tokens in steps], 1).tolist()


@final
class LiveBatches:
    """A stage of an engine whose requests wait until the batch before them is done."""

    def __init__(
        self,
        client: EngineClient,
        load: Load,
        record: Record,
        watch: Callable[[], None],
    ) -> None:
        self._client = client
        self._load = load
        self._record = record
        self._watch = watch
        self._waiting: SimpleQueue[tuple[PlannedRequest, Answered, int]] = SimpleQueue()
        self._num_requests = 0
        self._begin_ns = self._end_ns = time.monotonic_ns()

    def submit(self, request: PlannedRequest, answered: Answered) -> None:
        """Let a request wait; it is due now."""
        self._waiting.put((request, answered, time.monotonic_ns()))

    def follow(self, is_over: Callable[[], bool]) -> None:
        """Compute batches of the requests that wait until ``is_over``.

        Raises:
            AccelmarkError: the engine failed.
        """
        while not is_over():
            self._watch()
            if taken := self._take():
                self._compute(taken)

    def finish(self) -> LoadStage:
        """Return the stage."""
        return self._load.ended(self._begin_ns, (self._end_ns - self._begin_ns) / 1e9, self._num_requests)

    def _take(self) -> list[tuple[PlannedRequest, Answered, int]]:
        """Return up to a batch of waiting requests; none where none comes soon."""
        found = []
        with suppress(Empty):
            found.append(self._waiting.get(timeout=_WAIT_S))
            while len(found) < self._client.live_batch:
                found.append(self._waiting.get_nowait())
        return found

    def _compute(self, taken: Sequence[tuple[PlannedRequest, Answered, int]]) -> None:
        sent_ns = time.monotonic_ns()
        arrivals_ns: list[int] = []
        steps: list[Tensor] = []
        batch = self._client.batch([request for request, _, _ in taken])
        for at_ns, tokens in self._client.process.generate(batch.tokens, batch.num_tokens):
            if not arrivals_ns:
                for _, answered, _ in taken:
                    answered.on_first()
            arrivals_ns.append(at_ns)
            steps.append(tokens)
        self._end_ns = arrivals_ns[-1]
        times_us = [round((at_ns - self._begin_ns) / 1e3) for at_ns in arrivals_ns]
        for (request, answered, due_ns), answer in zip(taken, torch.stack(steps, 1).tolist(), strict=True):
            self._num_requests += 1
            text = self._client.decode(answer)
            due_s, sent_s = ((at_ns - self._begin_ns) / 1e9 for at_ns in (due_ns, sent_ns))
            found = _record(request, self._load.stage, due_s, batch.tokens.shape[1], times_us, text)
            found = found.model_copy(update={"sent_s": sent_s})
            answered.on_done(self._record(request, found, text) or found)


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
