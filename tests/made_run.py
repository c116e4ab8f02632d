"""Makes run directories through the documented formats: GENERATED, nothing in them was measured on any machine."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.run.record.directory import measure_run
from accelmark.spec.job import JobSpec, NodeExit, RankExit, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Provenance, flatten
from accelmark.spec.log.events import Evaluation, Finished, Started, StepWindow
from accelmark.spec.log.perflog import encode_line
from accelmark.spec.plugins.case import ReferenceLoss, Target
from accelmark.spec.plugins.catalog import FolderRef
from accelmark.spec.plugins.vendor import Chip, Peaks
from accelmark.spec.rules import RunRules
from accelmark.spec.settings.training import EndSettings, LoaderSettings, TrainSettings

BOOT_MS = 5_000_000.0
"""Monotonic clock when rank 0's process starts."""
WALL_MS = 1_790_000_000_000.0
INIT_MS = 2_000.0
"""From the start of the process to TRAIN_START."""

PEAKS = Peaks(fp32=10.0, bf16=100.0)
CHIP = Chip(name="X1", variant="Pod", device_name="Acme X1 Pod", peaks=PEAKS, source="made up for tests")
TARGET = Target(metric="accuracy", direction="at_least", value=0.9, why="made up for tests")


@dataclass(frozen=True)
class Made:
    """What a made round looks like; the defaults give round figures."""

    nnodes: int = 1
    nproc: int = 1
    rounds: int = 1
    windows: int = 10
    steps_per_window: int = 10
    step_ms: float = 9.0
    first_step_ms: float | None = None
    data_wait_ms: float = 1.0
    own_ms: tuple[float, ...] = ()
    """Of each rank, its own part of a step; empty: ranks log none."""
    eval_ms: float = 500.0
    eval_windows: tuple[int, ...] = (5, 10)
    """Windows (from 1) after which the model is evaluated."""
    metrics: tuple[float, ...] = (0.5, 0.95)
    batch_size: int = 8
    units_per_sample: int = 16
    target: Target | None = TARGET
    precision: str = "bf16"
    device_type: str = "acme"
    hardware: str = "X1"
    chip: Chip | None = CHIP
    flops_per_sample: float | None = 8e9
    power_w: float = 200.0
    interval_s: float = 0.25
    jitter: float = 0.0
    """Spread of step times, losses, power: 0 makes every figure computable by hand."""
    is_open: bool = False
    synthetic: bool = False
    min_rounds: int = 1
    telemetry: bool = True
    rapl: bool = False
    model: str = "toy"
    case_version: int = 1
    reference_loss: ReferenceLoss | None = None
    rules: RunRules | None = None

    @property
    def key(self) -> CaseKey:
        return CaseKey(
            model=self.model,
            framework="pytorch",
            hardware=self.hardware,
            nnodes=self.nnodes,
            nproc=self.nproc,
            repeat=self.rounds,
        )


def make_run(run_dir: Path, made: Made | None = None) -> Path:
    """Make a whole run with its plan and events; the results are left to be computed."""
    made = made or Made()
    run_dir.mkdir(parents=True)
    jobs, events = [], []
    for number in range(1, made.rounds + 1):
        name = f"{made.key.slug}/round{number}"
        one = replace(made, step_ms=made.step_ms * (1 + 0.02 * made.jitter * (number % 3 - 1)))
        job = make_round(run_dir / name, one, number)
        jobs.append({"directory": name, "job": job.model_dump(mode="json"), "nodes": []})
        events += [{"at": "", "kind": "state", "job": name, "state": s} for s in ("queued", "running", "succeeded")]
    plan = {"schema_version": 1, "name": "made", "accelmark_version": "0.0.0", "vendor": "acme", "jobs": jobs}
    (run_dir / "plan.json").write_text(json.dumps(plan))
    source = {"kind": "wheel", "version": "0.0.0", "sha256": "00" * 32}
    (run_dir / "source.json").write_text(json.dumps(source))
    (run_dir / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run_dir


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of the JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change each object in a file of JSON lines."""
    entries = (change(json.loads(line)) for line in path.read_text().splitlines())
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def end_round(round_dir: Path, state: str, reason: str) -> None:
    """Record the end of a round as the coordinator does."""
    event = {"kind": "state", "job": f"{round_dir.parent.name}/{round_dir.name}", "state": state, "reason": reason}
    with (round_dir.parents[1] / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def make_round(round_dir: Path, made: Made, number: int = 1) -> JobSpec:
    """Make one round: job.json and every host's directory."""
    round_dir.mkdir(parents=True)
    job = _job(made, number)
    (round_dir / "job.json").write_text(job.model_dump_json())
    for noderank in range(made.nnodes):
        node = round_dir / f"node{noderank:02d}_noderank{noderank}"
        node.mkdir()
        ranks = range(noderank * made.nproc, (noderank + 1) * made.nproc)
        end_ms = BOOT_MS
        for rank in ranks:
            with (node / f"rank{rank}.out.log").open("w") as log:
                for event, value, mono_ms in rank_events(made, rank, number):
                    log.write(perflog(event, value, mono_ms, rank))
                    end_ms = mono_ms
        if made.telemetry:
            write_telemetry(node / "telemetry.jsonl", made, end_ms, random.Random(number))
        write_surroundings(node, made, noderank, ranks, (end_ms - BOOT_MS) / 1e3)
    return job


def perflog(event: str, value: dict[str, Any], mono_ms: float, rank: int) -> str:
    clocks = {"time_ms": WALL_MS + mono_ms - BOOT_MS, "mono_ms": mono_ms}
    return encode_line(event, value, {"file": "made.py", "lineno": 1, **clocks, "rank": rank}) + "\n"


def rank_events(made: Made, rank: int, number: int = 1) -> Any:
    """Yield (event, value, monotonic ms) of one rank."""
    noise = random.Random(number * 10_007 + rank)
    world = made.key.world_size
    yield "INIT_START", {}, BOOT_MS
    yield "INIT_END", started(made, rank, number).model_dump(mode="json"), BOOT_MS + INIT_MS - 100
    start = clock = BOOT_MS + INIT_MS
    yield "TRAIN_START", {}, clock
    samples, losses = 0, [0.0]
    evaluations = iter(made.metrics)
    for window in range(1, made.windows + 1):
        steps = window * made.steps_per_window
        first = steps - made.steps_per_window
        step_ms = [made.step_ms * (1 + made.jitter * abs(noise.gauss(0, 0.05))) for _ in range(made.steps_per_window)]
        if window == 1 and made.first_step_ms is not None:
            step_ms[0] = made.first_step_ms
        if made.jitter and window % 17 == 0:
            step_ms[-1] *= 1.8
        exact = (4 * math.exp(-(at + 1) / (made.windows * made.steps_per_window) * 3) for at in range(first, steps))
        losses = [loss + made.jitter * noise.gauss(0, 0.05) for loss in exact]
        wall = sum(step_ms) + made.data_wait_ms * made.steps_per_window
        clock += wall
        samples += made.steps_per_window * made.batch_size * world
        yield "STEP_END", StepWindow(
            global_steps=steps, epoch=0, num_trained_samples=samples, learning_rate=0.1, loss=losses[-1],
            losses=tuple(losses), step_ms=tuple(step_ms),
            data_wait_ms=(made.data_wait_ms,) * made.steps_per_window, wall_ms=wall,
            own_ms=(made.own_ms[rank],) * made.steps_per_window if made.own_ms else (),
        ).model_dump(mode="json"), clock  # fmt: skip
        if window in made.eval_windows:
            clock += made.eval_ms
            metric = next(evaluations)
            yield "EVALUATE", Evaluation(
                global_steps=steps, epoch=0, num_trained_samples=samples, metrics={"accuracy": metric},
                duration_s=made.eval_ms / 1e3, elapsed_s=(clock - start) / 1e3, reached=metric >= 0.9,
            ).model_dump(mode="json"), clock  # fmt: skip
    yield "TRAIN_END", {}, clock
    end = finished(made, losses[-1], samples)
    shown = list(made.metrics)[: len([window for window in range(1, made.windows + 1) if window in made.eval_windows])]
    stated = {"raw_train_time": (clock - start) / 1e3, "final_metrics": {"accuracy": shown[-1]} if shown else {}}
    yield "FINISHED", end.model_dump(mode="json") | stated, clock + 100


def started(made: Made, rank: int, number: int = 1) -> Started:
    return Started(
        framework="pytorch", framework_version="2.13.0", device_type=made.device_type, device_name="Acme X1 Pod",
        device_index=rank % made.nproc, world_size=made.key.world_size, hostname="node00", threads=1,
        seed=1000 * number + rank,
        precision=made.precision, model_class="toy.Model", num_parameters=1_000_000, parameter_hash="ab" * 32,
        checkpoint_hash=f"{number:02x}" * 32 if rank == 0 else None, optimizer_class="torch.optim.SGD", hooks={},
        library_versions={"torch": "2.13.0"},
    )  # fmt: skip


def finished(made: Made, loss: float, samples: int) -> Finished:
    """The rank's own account; its rates are wrong on purpose, since no figure may come from them."""
    return Finished(
        state="completed", end_reason="max_steps", converged=True, e2e_time=-1, init_time=-1, raw_train_time=-1,
        train_no_eval_time=-1, pure_training_computing_time=-1, global_steps=made.windows * made.steps_per_window,
        num_trained_samples=samples, throughput_raw=-1, throughput_no_eval=-1, throughput_pure_compute=-1,
        final_loss=loss, final_metrics={"accuracy": 0.0}, peak_device_memory_mib=512.0, num_parameters=1_000_000,
        flops_per_sample=made.flops_per_sample, flops_per_sample_formula=made.flops_per_sample,
    )  # fmt: skip


def _job(made: Made, number: int) -> JobSpec:
    settings = TrainSettings(
        batch_size=made.batch_size,
        precision=made.precision,
        end=EndSettings(max_steps=made.windows * made.steps_per_window),
        loader=LoaderSettings(synthetic=made.synthetic),
        log_every_steps=made.steps_per_window,
        model={"seq_length": made.units_per_sample, "width": 4},
    )
    provenance = {
        name: Provenance(value=value, layer="case.yaml" if name != "batch_size" else "command line",
                         replaced=(("case.yaml", 4),) if name == "batch_size" else ())
        for name, value in flatten(settings.model_dump(mode="json")).items()
    }  # fmt: skip
    return JobSpec(
        key=made.key, round=number,
        case=FolderRef(name=made.model, path=Path("cases") / made.model, sha256=hashlib.sha256(b"case").hexdigest()),
        case_version=made.case_version, vendor="nvidia", device_type=made.device_type, framework_module=None,
        collective_backend="gloo", chip=made.chip, data_dirs={}, checkpoint_dir=Path("checkpoints"), open=made.is_open,
        work=TrainJob(unit="token", units_per_sample=made.units_per_sample, target=made.target,
                       reference_loss=made.reference_loss, min_repeats=made.min_rounds,
                       settings=settings).for_round(number),
        provenance=provenance, rules=made.rules,
    )  # fmt: skip


def write_telemetry(path: Path, made: Made, end_ms: float, noise: random.Random) -> None:
    begin, end = BOOT_MS / 1e3 - 1.0, end_ms / 1e3 + 1.0
    infos = [{"index": i, "name": "Acme X1 Pod", "memory_total_mib": 65536.0, "reasons": {}} for i in range(made.nproc)]
    no_rapl = {} if made.rapl else {"rapl_j": "there is no powercap interface"}
    reasons = {"power_w": "no management controller"} | no_rapl
    if made.device_type == "cpu":
        infos = []
    header = {"schema_version": 1, "vendor": "acme", "interval_s": made.interval_s, "devices": infos}
    count = int((end - begin) / made.interval_s) + 1
    with path.open("w") as file:
        file.write(json.dumps({"header": header | {"reasons": reasons}}) + "\n")
        for i in range(count):
            t = begin + i * made.interval_s
            training = BOOT_MS + INIT_MS <= t * 1e3 <= end_ms - 100
            wobble = made.jitter * noise.gauss(0, 0.02) if training else 0.0
            devices: list[dict[str, Any]] = [
                {"index": d, "utilisation": min((0.9 if training or not made.jitter else 0.05) + wobble, 1.0),
                 "memory_used_mib": 512.0, "memory_total_mib": 65536.0,
                 # Readings of a sensor are never all equal.
                 "power_w": (made.power_w if training or not made.jitter else 60.0) * (1 + wobble + 1e-9 * (i % 2)),
                 "temperature_c": 40.0 + (made.jitter * 15 * (1 - math.exp(-i / 40))), "sm_clock_mhz": 1500.0,
                 "throttle": [], "energy_j": None}
                for d in range(len(infos))
            ]  # fmt: skip
            host = {"cpu": 0.25 + wobble, "mem_used_mib": 2048.0, "mem_total_mib": 16384.0, "load1": 0.2,
                    "power_w": None, "rapl_j": i * made.interval_s * 50.0 if made.rapl else None}  # fmt: skip
            file.write(json.dumps({"t": t, "wall": WALL_MS / 1e3 + t, "host": host, "devices": devices}) + "\n")
        file.write(json.dumps({"footer": {"cpu_time_s": 0.125, "samples": count, "missed": 0}}) + "\n")


def write_surroundings(node: Path, made: Made, noderank: int, ranks: range, duration_s: float) -> None:
    host = f"node{noderank:02d}"
    info = {"host": host, "hostname": host, "os": "Made-up Linux 1", "kernel": "6.1", "load1_at_start": 0.1,
            "cpu": {"model": "Made-up CPU", "usable_cores": 8, "logical_cores": 8}, "memory_total_mib": 16384.0,
            "python": "3.11.9", "environment": {"OMP_NUM_THREADS": "1"}}  # fmt: skip
    (node / "sys_info.json").write_text(json.dumps(info))
    (node / "agent.json").write_text(json.dumps({"nproc": made.nproc}))
    exits = tuple(RankExit(rank=r, local_rank=r % made.nproc, state="succeeded", exit_code=0) for r in ranks)
    end = NodeExit(host=host, noderank=noderank, state="succeeded", reason=None, started_at="2026-11-21T10:00:00.000Z",
                   duration_s=duration_s, ranks=exits)  # fmt: skip
    (node / "exit.json").write_text(end.model_dump_json())


def measured_run(path: Path, **changes: Any) -> Path:
    """Make and summarise a run with three rounds that vary a little."""
    run = make_run(path, Made(**({"rounds": 3, "jitter": 1.0, "windows": 10} | changes)))
    measure_run(run)
    return run


def loaded(path: Path, **changes: Any) -> LoadedRun:
    """Make a run and read it."""
    return load_run(measured_run(path, **changes))
