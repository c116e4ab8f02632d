"""Makes serving runs from a simulated queue: GENERATED, nothing in them was measured on any machine.

The queue has known parameters, so that percentiles and Little's law can be compared with theory.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelmark.spec.job import JobSpec, ServeJob
from accelmark.spec.key import CaseKey
from accelmark.spec.log.inference import (
    Answer,
    BenchmarkScore,
    LoadStage,
    RequestRecord,
    ServeFinished,
    ServeStarted,
    StartTimes,
)
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.plugins.programs import ServerSpec
from accelmark.spec.settings.inference import Benchmark, Reference
from accelmark.spec.settings.serving import ServeSettings
from tests.made_run import BOOT_MS, CHIP, INIT_MS, Made, perflog, write_surroundings, write_telemetry

ROUND = Path("toy:pytorch:X1:1:1:1") / "round1"
PAUSE_S = 0.5
"""Between two stages."""


COMPLETED = ServeFinished(state="completed", end_reason="completed", e2e_time=1.0)


@dataclass(frozen=True)
class Queue:
    """A server with slots, first come, first served; a request holds a slot until its answer ends."""

    slots: int = 1
    service_s: Callable[[random.Random], float] = field(default=lambda noise: noise.expovariate(1.0))
    """Duration of a request in its slot."""
    prefill_share: float = 0.2
    """Part of the service until the first output."""
    tokens: int = 11
    tokens_per_output: int = 1
    states_queue: bool = False
    """Whether the server states the time in its queue."""


@dataclass(frozen=True)
class Stage:
    """One stage of the load on a queue."""

    queue: Queue
    num_requests: int
    concurrency: int | None = None
    rate: float | None = None
    """Poisson arrivals."""
    is_search: bool = False


def simulate(stage: Stage, number: int, seed: int = 1, first_prompt: int = 0) -> list[RequestRecord]:
    """Return the records of one stage, in the order in which requests ended."""
    noise, queue = random.Random(seed), stage.queue
    free = [0.0] * queue.slots
    ends: list[float] = []
    records: list[RequestRecord] = []
    clock = 0.0
    for position in range(stage.num_requests):
        if stage.concurrency is not None:
            due = 0.0 if position < stage.concurrency else heapq.heappop(ends)
        else:
            assert stage.rate is not None
            clock += noise.expovariate(stage.rate)
            due = clock
        begin = max(due, heapq.heappop(free))
        service = queue.service_s(noise)
        heapq.heappush(free, begin + service)
        heapq.heappush(ends, begin + service)
        first = begin + queue.prefill_share * service
        num_gaps = queue.tokens // queue.tokens_per_output - 1
        gap_us = int((begin + service - first) / max(num_gaps, 1) * 1e6)
        records.append(
            RequestRecord(
                stage=number,
                number=position,
                prompt=first_prompt + position,
                due_s=due,
                sent_s=due + 1e-5,
                first_s=first,
                end_s=begin + service,
                gaps_us=(gap_us,) * num_gaps,
                status="ok",
                http_status=200,
                finish_reason="length",
                input_tokens=20,
                output_tokens=queue.tokens,
                requested_tokens=queue.tokens,
                usage_input=20,
                usage_output=queue.tokens,
                queue_s=begin - due if queue.states_queue else None,
                text_sha256="ab" * 32,
            )
        )
    return sorted(records, key=lambda record: record.end_s)


@dataclass(frozen=True)
class Served:
    """What a made serving round looks like."""

    stages: tuple[Stage, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    power_w: float = 200.0
    agreement: float = 1.0
    min_agreement: float = 0.9
    is_open: bool = False
    ended: ServeFinished = COMPLETED
    start: StartTimes | None = None
    device_type: str = "acme"
    lag_p99_ms: float = 0.01
    scores: tuple[BenchmarkScore, ...] = ()
    published: dict[Benchmark, Reference] = field(default_factory=dict)


Change = Callable[[list[RequestRecord]], Sequence[RequestRecord]]


def make_served_run(run_dir: Path, served: Served, change: Change = list) -> Path:
    """Make a run with one round; ``change`` changes its records before they are written."""
    round_dir = run_dir / ROUND
    node = round_dir / "node00_noderank0"
    node.mkdir(parents=True)
    job = serve_job(served)
    (round_dir / "job.json").write_text(job.model_dump_json())
    plan = {"schema_version": 1, "name": "made", "accelmark_version": "0.0.0", "vendor": "acme"}
    jobs = [{"directory": ROUND.as_posix(), "job": job.model_dump(mode="json"), "nodes": []}]
    (run_dir / "plan.json").write_text(json.dumps(plan | {"jobs": jobs}))
    (run_dir / "source.json").write_text(json.dumps({"kind": "wheel", "version": "0.0.0", "sha256": "00" * 32}))
    records: list[RequestRecord] = []
    clock_s = (BOOT_MS + INIT_MS) / 1e3
    lines = [perflog("INIT_START", {}, BOOT_MS, 0), perflog("INIT_END", _started(served), BOOT_MS + INIT_MS - 1, 0)]
    warm_up = Stage(served.stages[0].queue, 4, concurrency=1) if served.stages else None
    stages = enumerate((warm_up, *served.stages) if warm_up else (), start=-1)
    for number, stage in stages:
        made = simulate(stage, number, seed=number + 7, first_prompt=100_000 * (number + 1))
        records += made
        load = _load(stage, number, clock_s, made, served)
        clock_s += load.duration_s + PAUSE_S
        lines.append(perflog("LOAD_END", load.model_dump(mode="json"), 1e3 * (clock_s - PAUSE_S + 0.01), 0))
    lines.append(perflog("FINISHED", served.ended.model_dump(mode="json"), 1e3 * clock_s, 0))
    (node / "rank0.out.log").write_text("".join(lines))
    (node / "requests.jsonl").write_text("".join(record.model_dump_json() + "\n" for record in change(records)))
    compared = [record for record in records if record.stage >= 0][: job_settings(served).num_compared]
    agreeing = round(100 * served.agreement)
    answers = (
        Answer(stage=one.stage, number=one.number, prompt=one.prompt, num_tokens=100, num_agreeing=agreeing)
        for one in compared
    )
    (node / "answers.jsonl").write_text("".join(answer.model_dump_json() + "\n" for answer in answers))
    (node / "scores.jsonl").write_text("".join(score.model_dump_json() + "\n" for score in served.scores))
    made_telemetry = Made(power_w=served.power_w)
    write_telemetry(node / "telemetry.jsonl", made_telemetry, 1e3 * clock_s, random.Random(1))
    write_surroundings(node, made_telemetry, 0, range(1), clock_s - BOOT_MS / 1e3)
    return run_dir


def job_settings(served: Served) -> ServeSettings:
    return ServeSettings.model_validate({"server": "toy", "num_compared": 4} | served.settings)


def serve_job(served: Served) -> JobSpec:
    settings = job_settings(served)
    flags = {"server_options.draft": ["--draft", "{value}"]}
    declared = {"options": {"draft": None}, "flags": flags, "facts": {"speculative_decoding": "draft"}}
    named = {"name": "toy", "title": "Toy", "command": ("toy",), "tried": "no"}
    server = ServerSpec.model_validate(named | declared) if settings.endpoint is None else None
    return JobSpec(
        key=CaseKey(model="toy", framework="pytorch", hardware="X1"), round=1,
        case=FolderRef(name="toy", path=Path("cases/toy"), sha256="ab" * 32), case_version=1, vendor="nvidia",
        device_type=served.device_type, framework_module=None, collective_backend="gloo", chip=CHIP, data_dirs={},
        checkpoint_dir=Path("checkpoints"), open=served.is_open,
        work=ServeJob(
            server=server, settings=settings, min_agreement=served.min_agreement, benchmarks=served.published
        ),
    )  # fmt: skip


def _started(served: Served) -> dict[str, Any]:
    settings = job_settings(served)
    return ServeStarted(
        framework="toy", framework_version="1.0", device_type="acme", device_name="Acme X1 Pod", hostname="node00",
        threads=1, precision="fp32", library_versions={}, server=settings.server, endpoint=settings.endpoint or "",
        command=("toy", "--port", "1"), served_model="toy", start_s=1.5 if settings.endpoint is None else None,
        start=served.start,
        num_devices=1, weights_sha256="cd" * 32, has_tokenizer=True,
    ).model_dump(mode="json")  # fmt: skip


def _load(stage: Stage, number: int, begin_s: float, made: list[RequestRecord], served: Served) -> LoadStage:
    return LoadStage(
        stage=number, arrival="closed" if stage.concurrency is not None else "poisson", concurrency=stage.concurrency,
        rate=stage.rate, is_search=stage.is_search, begin_mono_s=begin_s, duration_s=made[-1].end_s,
        num_requests=len(made), lag_p50_ms=served.lag_p99_ms / 2, lag_p99_ms=served.lag_p99_ms, client_cpu_share=0.1,
    )  # fmt: skip
