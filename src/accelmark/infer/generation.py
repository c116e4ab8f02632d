"""Generate text with an engine: batches of requests, one after the other, recorded as served requests are."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from random import SystemRandom
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelmark.infer.engine_process import EngineProcess
from accelmark.serving.answers import AnswerSample, compare_answers, run_benchmarks
from accelmark.serving.load import Decode, Encode, LoadPlan, ServedModel
from accelmark.serving.loadgen import done, first, run_token_loadgen
from accelmark.serving.request import Load, LoadGenRun, PlannedRequest, Record, Watch
from accelmark.serving.stages import Stages, TokenScenarios
from accelmark.spec.backports import pairwise, zip_strict
from accelmark.spec.errors import DataError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.events import Event
from accelmark.spec.log.inference import REQUESTS_FILE, LoadStage, RequestRecord
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.serving import generation_load


def generate(
    settings: InferSettings,
    model: ServedModel,
    process: EngineProcess,
    job: JobSpec,
    node_dir: Path,
    emit: Callable[[Event, Any], None],
) -> int:
    """Measure accuracy in benchmarks, run all stages, and compare a sample of the answers with the framework's.

    Returns the seed of the prompts. Raises AccelmarkError: the engine or the framework failed, or prompts are too few.
    """
    load = generation_load(settings)
    if model.input_tokens is None or model.text is None:
        raise DataError("generation needs the model's tokenizer (tokenizer.json)")
    plan = LoadPlan(load, model)
    sample = AnswerSample(load.num_compared, SystemRandom())
    client = EngineClient(process, model.input_tokens, model.text, max(settings.generate_batches))
    with (node_dir / REQUESTS_FILE).open("w", encoding="utf-8") as stream:
        stages = Stages(client, model, emit, stream, sample, lambda: None)
        if settings.benchmarks:
            stages.progress.begin("answering benchmarks")
            arguments = {"model_dir": str(model.directory), "batch_size": settings.batch_size}
            run_benchmarks(settings, arguments, job.data_dirs, node_dir, stages.progress.report, process.call)
        plan.run(stages.run)
        TokenScenarios(load, plan, stages, node_dir, emit).run()
    stages.progress.begin("comparing answers")
    compare_answers(load, job, model, sample, node_dir, stages.progress.report)
    return plan.seed


class _Batch(NamedTuple):
    requests: Sequence[PlannedRequest]
    tokens: Tensor
    """(requests, length)."""
    num_tokens: int


class EngineClient(NamedTuple):
    """Sends batches to an engine; times are on the clock of this process, where tokens arrive."""

    process: EngineProcess
    encode: Encode
    decode: Decode
    live_batch: int
    """Queries of LoadGen that are computed at a time at most."""

    def run_stage(self, requests: Iterable[PlannedRequest], load: Load, record: Record, watch: Watch) -> LoadStage:
        """Run batches of ``load.concurrency`` requests for about ``load.until_s``, at least three.

        Two batches before are in no figure: in the first the engine may compile for its shape, and the duration of the
        second shows how many batches the stage has.
        """
        planned = iter(requests)
        if load.loadgen is not None:
            return self._run_loadgen(load.loadgen, planned, load, record, watch)
        size = load.concurrency or 1
        took_ns = 1
        for _ in range(2):
            warm_up = self._batch(islice(planned, size))
            before_ns = time.monotonic_ns()
            self._generate(warm_up, watch)
            took_ns = max(time.monotonic_ns() - before_ns, 1)
        num_queries = max(3, round(load.until_s * 1e9 / took_ns))  # the window of a stage is without the last batch
        batches: list[_Batch] = []
        while len(batches) < num_queries and len(chosen := list(islice(planned, size))) == size:
            batches.append(self._batch(chosen))
        begin_ns = due_ns = time.monotonic_ns()
        done = []
        for batch in batches:
            arrivals_ns, answers = self._generate(batch, watch)
            done.append((batch, due_ns, arrivals_ns, answers))
            due_ns = arrivals_ns[-1]
        for batch, batch_due_ns, batch_ns, answers in done:
            for request, answer in zip_strict(batch.requests, answers):
                self._record(record, load, request, batch, answer, begin_ns, batch_due_ns, batch_due_ns, batch_ns)
        return load.ended(begin_ns, (due_ns - begin_ns) / 1e9, size * len(batches))

    def _run_loadgen(
        self, run: LoadGenRun, requests: Iterator[PlannedRequest], load: Load, record: Record, watch: Watch
    ) -> LoadStage:
        """Compute the queries of LoadGen, which a thread runs to its end, in batches of those that wait."""
        waiting: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        """Queries with the time at which they are due, and None at the end."""
        requests = chain(list(islice(requests, load.num_drawn)), requests)

        def work() -> None:
            def issue(queries: Sequence[int]) -> None:
                for query in queries:
                    waiting.put((query, time.monotonic_ns()))

            try:
                run_token_loadgen(run, issue)
            finally:
                waiting.put(None)

        begin_ns = end_ns = time.monotonic_ns()
        num_requests = 0
        threading.Thread(target=work, name="loadgen", daemon=True).start()
        while taken := self._waiting_queries(waiting, watch):
            batch = self._batch(islice(requests, len(taken)))
            sent_ns = time.monotonic_ns()
            times_ns, answers = self._generate(batch, watch, [query for query, _ in taken])
            end_ns, num_requests = times_ns[-1], num_requests + len(taken)
            for request, (query, due_ns), answer in zip_strict(batch.requests, taken, answers):
                done(query, len(answer))
                self._record(record, load, request, batch, answer, begin_ns, due_ns, sent_ns, times_ns)
        return load.ended(begin_ns, (end_ns - begin_ns) / 1e9, num_requests)

    def _waiting_queries(self, waiting: SimpleQueue[tuple[int, int] | None], watch: Watch) -> list[tuple[int, int]]:
        """Wait for queries; return up to a batch of them, none after the end."""
        while True:
            watch()
            with suppress(Empty):
                taken = [waiting.get(timeout=0.2)]
                while len(taken) < self.live_batch and not waiting.empty():
                    taken.append(waiting.get())
                return [query for query in taken if query is not None]

    def _batch(self, chosen: Iterable[PlannedRequest]) -> _Batch:
        requests = list(chosen)
        tokens = torch.tensor([self.encode(str(request.content)) for request in requests])
        return _Batch(requests, tokens, requests[0].requested_tokens)

    def _generate(self, batch: _Batch, watch: Watch, queries: Sequence[int] = ()) -> tuple[list[int], list[list[int]]]:
        """Return when the tokens of each step arrived (``time.monotonic_ns``), and the answers."""
        times_ns, steps = list[int](), list[Tensor]()
        for at_ns, tokens in self.process.generate(batch.tokens, batch.num_tokens):
            if not times_ns:
                for query in queries:
                    first(query)
            times_ns.append(at_ns)
            steps.append(tokens)
            watch()  # thousands of tokens take minutes
        return times_ns, torch.stack(steps, 1).tolist()

    def _record(
        self,
        record: Record,
        load: Load,
        request: PlannedRequest,
        batch: _Batch,
        answer: list[int],
        begin_ns: int,
        due_ns: int,
        sent_ns: int,
        arrivals_ns: Sequence[int],
    ) -> None:
        text = self.decode(answer)
        times_us = [round((at_ns - begin_ns) / 1e3) for at_ns in arrivals_ns]
        ended = RequestRecord(
            stage=load.stage,
            number=request.number,
            prompt=request.prompt,
            due_s=(due_ns - begin_ns) / 1e9,
            sent_s=(sent_ns - begin_ns) / 1e9,
            first_s=times_us[0] / 1e6,
            end_s=times_us[-1] / 1e6,
            gaps_us=tuple(later - earlier for earlier, later in pairwise(times_us)),
            status="ok",
            finish_reason="length",
            input_tokens=batch.tokens.shape[1],
            output_tokens=len(times_us),
            requested_tokens=request.requested_tokens,
            text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        )
        record(request, ended, text)
