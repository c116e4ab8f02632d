"""Find the settings with which the quick cases train fastest on this machine, and check that they reach the target.

Run ``python -m benchmarks.best_practice`` (``--cases``). Each candidate changes a few settings of a case and trains on
real data with the real plan and driver, in its own process with an empty compiler cache; the default is measured twice.
The step time is the median over the windows of the last two thirds. ``--gate NAME...`` trains candidates to the end
with each seed, and reports time and metric against the target. Results are written to ``results/best_practice.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from accelmark.plan.build import build_plan
from accelmark.plan.plan import Plan
from accelmark.plan.request import Detected
from accelmark.results.read.rank_log import Attempt, read_train_log
from accelmark.run.controller.data import data_dirs
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.plugins.catalog import load_case, load_vendor
from accelmark.spec.runfile import CaseRequest, RunSpec
from accelmark.telemetry.host import cpu_model

RESULTS: Final = Path(__file__).parent / "results" / "best_practice.json"
WARM: Final = 1 / 3
PLAIN: Final = "default, glibc's own allocation"
"""Without the environment variables of the vendor `cpu`."""
HUGE: Final = "default, heap in huge pages"
ASLEEP: Final = "default, waiting threads sleep at once"
"""Instead of spinning first, which is libgomp's default."""
TRIED: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    PLAIN: {},
    HUGE: {},
    ASLEEP: {},
    "fp32": {"precision": "fp32"},
    "compiled": {"compile": "default"},
    "1 thread": {"threads": 1},
    "1 thread, compiled": {"threads": 1, "compile": "default"},
}
IMAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "channels first": {"channels_last": False},
    "2 loader workers": {"loader.num_workers": 2},
}
STEPS: Final = {"resnet_mini": 180, "llama_mini": 16, "minilm_finetune": 10}
"""Steps of a speed run, about five seconds."""


@dataclass(frozen=True)
class Speed:
    """Step time of one candidate of a case."""

    case: str
    candidate: str
    settings: dict[str, Any]
    step_ms: float
    against_default: float
    """Step time relative to the default's."""


@dataclass(frozen=True)
class Held:
    """Result of one training to the end."""

    case: str
    candidate: str
    seed: int
    total_s: float
    """From the start of the process to its end."""
    train_s: float
    """From the first step, with evaluation and compilation."""
    metric: float
    target: float
    reached: bool


def plan_of(case: str, settings: Mapping[str, Any]) -> Plan:
    """Return the plan of one candidate; the run is open, since speed runs are shorter than the case."""
    request = RunSpec(name="best", open=True, cases=(CaseRequest(key=case, settings=dict(settings)),))
    return build_plan(
        request,
        cluster=ClusterSpec(),
        detected=Detected("cpu", "CPU", None, 1),
        data_dirs=data_dirs,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        where="benchmarks/best_practice.py",
    )


def train(case: str, settings: Mapping[str, Any], *, environment: Mapping[str, str]) -> Attempt:
    """Train in a new process, on all cores unless ``settings`` limit them, and return the data of its log."""
    job = plan_of(case, settings).jobs[0].job
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        job = job.model_copy(update={"checkpoint_dir": directory / "checkpoints"})
        (directory / "job.json").write_text(job.model_dump_json(), encoding="utf-8")
        whole = {
            **os.environ,
            **environment,
            "ACCELMARK_NODE_DIR": name,
            "OMP_NUM_THREADS": str(settings.get("threads") or len(os.sched_getaffinity(0))),
            "TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled"),
        }
        command = [sys.executable, "-m", "accelmark.train.loop.rank", str(directory / "job.json")]
        ended = subprocess.run(command, env=whole, capture_output=True, text=True, check=False)
        log = directory / "rank0.out.log"
        if ended.returncode:
            raise RuntimeError(f"{case} with {dict(settings)} failed:\n{log.read_text(encoding='utf-8')[-2000:]}")
        return read_train_log(log, 0).attempts[-1]


def variables(candidate: str) -> Mapping[str, str]:
    """Return the environment variables of a candidate's ranks."""
    if candidate == PLAIN:
        return {}
    more = {HUGE: {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, ASLEEP: {"OMP_WAIT_POLICY": "PASSIVE"}}
    return load_vendor("cpu").environment | more.get(candidate, {})


def late_windows_ms(attempt: Attempt) -> list[float]:
    """Return the step time of each window after the first third, which includes autotuning and compilation."""
    walls_ms, lengths = attempt.windows.wall_ms, attempt.windows.lengths
    steps = [wall_ms / length for wall_ms, length in zip(walls_ms, lengths, strict=True)]
    return steps[max(1, round(len(steps) * WARM)) :]


def speeds(case: str) -> list[Speed]:
    """Measure all candidates of a case, the default first and last."""
    spec = load_case(case)
    if spec.train is None:
        raise ValueError(f"{case} has no training side")
    tried = {**TRIED, **(IMAGES if spec.train.settings.get("channels_last") else {})}
    steps = STEPS[case]
    windows = max(1, steps // (15 if steps > 50 else 8))
    common = {"end.max_steps": steps, "end.max_epochs": None, "log_every_steps": windows, "evaluate.max_batches": 1}
    times: dict[str, list[float]] = {name: [] for name in tried}
    for name in (*tried, "default"):
        attempt = train(case, {**common, **tried[name]}, environment=variables(name))
        times[name] += late_windows_ms(attempt)
        print(f"  {case}, {name}: {statistics.median(times[name]):.2f} ms", file=sys.stderr, flush=True)
    step = {name: statistics.median(found) for name, found in times.items()}
    return [
        Speed(case, name, dict(tried[name]), round(step[name], 3), round(step[name] / step["default"], 4))
        for name in sorted(step, key=lambda name: step[name])
    ]


def held(case: str, candidate: str, settings: Mapping[str, Any], seed: int) -> Held:
    """Train a candidate to its end, and return time and metric."""
    spec = load_case(case)
    if spec.train is None or spec.train.target is None:
        raise ValueError(f"{case} has no target")
    began = time.monotonic()
    attempt = train(case, {**settings, "seed": seed}, environment=variables(candidate))
    total_s = time.monotonic() - began
    target = spec.train.target
    metric = attempt.evaluations[-1][1].metrics[target.metric]
    if metric is None:
        raise ValueError(f"{case} with {candidate} ended without a finite {target.metric}")
    times = round(total_s, 1), round(attempt.train_ms / 1000, 1)
    print(f"  {case}, {candidate}, seed {seed}: {metric:.4f} in {times[0]} s", file=sys.stderr, flush=True)
    return Held(case, candidate, seed, *times, round(metric, 4), target.value, target.reached(metric))


def main() -> None:
    """Measure, print a table in Markdown, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--gate", nargs="*", help="train these candidates to the end and nothing else")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 3], help="of those")
    options = parser.parse_args()
    found: list[Speed] = []
    ends: list[Held] = []
    for case in options.cases:
        if options.gate is not None:
            tried = {**TRIED, **IMAGES}
            ends += [held(case, name, tried[name], seed) for seed in options.seeds for name in options.gate]
        else:
            found += speeds(case)
    print("| Case | Settings | Step, ms | Against the default |\n|---|---|---:|---:|")
    for one in found:
        print(f"| {one.case} | {one.candidate} | {one.step_ms:.2f} | {one.against_default - 1:+.1%} |")
    if ends:
        print("\n| Case | Settings | Seed | Metric | Whole time, s | Training, s |\n|---|---|---:|---:|---:|---:|")
    for end in ends:
        miss = "" if end.reached else f" (misses {end.target})"
        print(f"| {end.case} | {end.candidate} | {end.seed} | {end.metric}{miss} | {end.total_s} | {end.train_s} |")
    write(found, ends)


def write(found: list[Speed], ends: list[Held]) -> None:
    """Write results; those of other cases and candidates in the file are kept."""
    record: dict[str, Any] = {"speeds": [], "held": []}
    if RESULTS.exists():
        record = json.loads(RESULTS.read_text(encoding="utf-8"))
    cases = {one.case for one in found}
    ended = {(one.case, one.candidate) for one in ends}
    record["machine"] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    record["speeds"] = [old for old in record["speeds"] if old["case"] not in cases] + [asdict(one) for one in found]
    record["held"] = [old for old in record["held"] if (old["case"], old["candidate"]) not in ended]
    record["held"] += [asdict(one) for one in ends]
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
