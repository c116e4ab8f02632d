"""Scaling over hosts and ranks, and the measurement of a cluster: collectives, checkpoints, recovery of a rank."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Final, Literal, NamedTuple

from pydantic import Field

from accelmark.results.figures import FigureName
from accelmark.results.read.round_dir import ledger_events, node_dirs, rank_logs, read_json
from accelmark.results.schema import CaseResult
from accelmark.results.store.loaded_run import RESULT_FILE, LoadedCase, LoadedRun, load_round
from accelmark.spec.errors import RunError
from accelmark.spec.log.events import Event, SavedCheckpoint, StepWindow
from accelmark.spec.log.perflog import PerfLogReader
from accelmark.spec.log.records import Ceilings
from accelmark.spec.model import Spec

_SCALED: Final = FigureName.THROUGHPUT_STEADY
_SCALE_SETTINGS: Final = (
    "batch_size", "eval_batch_size", "gradient_accumulation_steps", "optimizer.lr", "schedule.", "end.", "evaluate.",
    "parallelism", "zero.", "threads", "loader.", "checkpoint", "log_every_steps", "seed",
)  # fmt: skip
"""Prefixes of settings that change with the scale, or do not change the work of a step."""
_LINEAR: Final = 1.02


class ScalePoint(NamedTuple):
    """One scale of a case."""

    run: str
    nnodes: int
    nproc: int
    throughput: float
    """Units per second of all ranks, without warm-up."""
    speedup: float
    """Over the smallest scale of the curve."""
    efficiency: float
    """``speedup`` over the ratio of ranks: 1 is ideal."""
    half95: float | None
    """Half of the 95 % interval of ``efficiency``; None where a side has one round."""
    batch_size: str
    """Per rank; scaling is weak where it is the same at all scales."""
    is_busy: bool = False
    """Whether other work ran on the hosts."""

    @property
    def ranks(self) -> int:
        """Ranks over all hosts."""
        return self.nnodes * self.nproc

    @property
    def scale(self) -> str:
        """Hosts × devices per host, as in keys."""
        return f"{self.nnodes}×{self.nproc}"


class ScalingCurve(NamedTuple):
    """A case on one chip at several scales, smallest first."""

    model: str
    framework: str
    chip: str
    precision: str
    unit: str
    synthetic: bool
    points: tuple[ScalePoint, ...]

    @property
    def same_batch(self) -> bool:
        """Whether every scale had the same batch per rank."""
        return len({point.batch_size for point in self.points}) == 1

    @property
    def is_busy(self) -> bool:
        """Whether other work ran on the hosts at any scale."""
        return any(point.is_busy for point in self.points)

    @property
    def is_superlinear(self) -> bool:
        """Whether any efficiency is above 1 by more than ratios of rounds usually scatter."""
        return any(point.efficiency > _LINEAR for point in self.points)


def scaling_curves(runs: Iterable[LoadedRun]) -> list[ScalingCurve]:
    """Return a curve for each training case with at least two scales, from the newest run of each scale.

    Cases are grouped by version, chip, precision, open or closed, synthetic or real data, and all settings that do
    not depend on the scale.
    """
    groups: dict[tuple[str, ...], dict[tuple[int, int], LoadedCase]] = {}
    for run in sorted(runs, key=lambda run: run.summary.started_at):
        for case in run.cases:
            spread, key, marks = case.result.figures.get(_SCALED), case.result.key, case.result.marks
            if not case.succeeded or spread is None or not spread.mean:
                continue
            first = case.succeeded[0]
            kept = {name: one.value for name, one in first.settings.items() if not name.startswith(_SCALE_SETTINGS)}
            group = (
                key.model, key.framework, key.hardware, first.precision, str(first.case_version),
                "open" if "open" in marks else "", "synthetic" if "synthetic" in marks else "",
                json.dumps(kept, default=str, sort_keys=True),
            )  # fmt: skip
            groups.setdefault(group, {})[key.nnodes, key.nproc] = case
    curves = []
    for _, scales in sorted(groups.items()):
        if len(scales) > 1:
            ordered = sorted(scales.values(), key=lambda case: (case.result.key.world_size, case.result.key.nnodes))
            smallest, key = ordered[0].result, ordered[0].result.key
            curve = ScalingCurve(
                key.model, key.framework, key.hardware, ordered[0].succeeded[0].precision, smallest.unit,
                "synthetic" in smallest.marks, tuple(_point(case, smallest) for case in ordered),
            )  # fmt: skip
            curves.append(curve)
    return curves


def _point(case: LoadedCase, base: CaseResult) -> ScalePoint:
    key, spread, base_spread = case.result.key, case.result.figures[_SCALED], base.figures[_SCALED]
    speedup = (spread.mean or 0.0) / (base_spread.mean or math.nan)
    efficiency = speedup * base.key.world_size / key.world_size
    own, of_base = spread.relative_half95, base_spread.relative_half95
    half = None
    if case.result is not base and own is not None and of_base is not None:
        half = efficiency * math.hypot(own, of_base)
    batch = case.succeeded[0].settings.get("batch_size")
    return ScalePoint(
        case.run.summary.run, key.nnodes, key.nproc, spread.mean or 0.0, speedup, efficiency, half,
        str(batch.value) if batch else "–", "busy_machine" in case.result.marks,
    )  # fmt: skip


CLUSTER_FILE: Final = "cluster.json"
SCALING_DIR: Final = "scaling"
RECOVERY_DIR: Final = "recovery"
Part = Literal["scaling", "collectives", "checkpoints", "recovery"]


class CheckpointWrites(Spec):
    """Checkpoints that training on all hosts wrote."""

    num_checkpoints: int
    num_bytes: int
    """Size of the last checkpoint, read on the host of rank 0."""
    duration_s: float
    """Median over the checkpoints of the longest wait of any rank."""
    mb_per_s: float
    """``num_bytes`` over ``duration_s``, in 1e6 bytes."""


class Recovery(Spec):
    """What happened after a rank was killed, in seconds; hosts' clocks are compared with the coordinator's."""

    rank: int
    host: str
    noticed_s: float
    """From the kill until the job had ended on all hosts."""
    restarted_s: float
    """Until the agents of the next attempt were started, checks of the hosts included."""
    trained_s: float
    """Until rank 0 had loaded the checkpoint and taken a step, as long as the mean of its first logged steps."""
    lost_steps: int
    """Steps that were trained after the last checkpoint, and again."""

    @property
    def total_s(self) -> float:
        """From the kill until training went on."""
        return self.noticed_s + self.restarted_s + self.trained_s


class ClusterReport(Spec):
    """What was measured on a cluster; ``scaling/`` next to it is the run with the scaling."""

    schema_version: Literal[1] = 1
    name: str
    hosts: tuple[str, ...]
    nproc: int
    """Devices per host."""
    vendor: str
    hardware: str
    case: str
    measured_at: str
    """UTC, ISO 8601."""
    accelmark_version: str
    collectives: Ceilings | None = None
    checkpoints: CheckpointWrites | None = None
    recovery: Recovery | None = None
    reasons: dict[Part, str] = Field(default_factory=dict)
    """Why a part has no value."""
    disturbed: dict[Part, tuple[str, ...]] = Field(default_factory=dict)
    """Other work on the hosts while a part was measured; a part without an entry was measured on idle hosts."""
    one_machine: tuple[str, ...] = ()
    """Hosts that are one machine, whose cores, memory and disks they share."""

    def doubts(self, curve: ScalingCurve) -> list[str]:
        """Return why the efficiency of a scaling curve does not show how the cluster scales; empty where it does."""
        doubts = ["other work on the hosts"] if self.disturbed.get("scaling") else []
        doubts += [f"{len(self.one_machine)} hosts are one machine"] if self.one_machine else []
        return doubts + (["above 100\u202f%"] if curve.is_superlinear else [])


def checkpoint_writes(round_dir: Path) -> CheckpointWrites:
    """Return what writing the checkpoints of a round took. Raises RunError: none was written."""
    durations: dict[str, float] = {}
    num_bytes = 0
    for rank, log in rank_logs(round_dir).items():
        for record in PerfLogReader(log):
            if record.event == Event.CHECKPOINT:
                saved = record.value_as(SavedCheckpoint)
                writing_s = saved.duration_s + (saved.background_s or 0.0)
                durations[saved.name] = max(writing_s, durations.get(saved.name, 0.0))
                num_bytes = saved.num_bytes or num_bytes if rank == 0 else num_bytes
    if not durations or not num_bytes:
        raise RunError(f"{round_dir}: no checkpoint was written")
    took_s = median(durations.values())
    return CheckpointWrites(
        num_checkpoints=len(durations), num_bytes=num_bytes, duration_s=took_s, mb_per_s=num_bytes / took_s / 1e6
    )


def disturbances_of(round_dirs: Iterable[Path]) -> tuple[str, ...]:
    """Return other work on the hosts of rounds, each text once."""
    from accelmark.results.rounds.hosts import disturbances  # imports NumPy, which planning does not need

    results = (load_round(place / RESULT_FILE) for place in round_dirs if (place / RESULT_FILE).is_file())
    return tuple(dict.fromkeys(text for result in results for text in disturbances(result.findings)))


def hosts_of_one_machine(round_dir: Path) -> tuple[str, ...]:
    """Return the hosts of a round whose agents ran since the same boot of a machine, such as containers on it."""
    boots = {node.host: read_json(node.path / "agent.pid").get("boot_id") for node in node_dirs(round_dir)}
    number = Counter(boots.values())
    return tuple(host for host, boot in boots.items() if boot is not None and number[boot] > 1)


def recovery_of(run: Path, directory: str, rank: int) -> Recovery:
    """Return how the only job of a run went on after ``rank`` was killed in its first attempt. Raises RunError."""
    round_dir = run / directory
    reasons = [str(event["reason"]) for event in ledger_events(run) if event.get("reason")]
    why = reasons[-1] if reasons else "no reason was recorded"
    logs = ((node.host, rank_log) for node in node_dirs(round_dir / "attempt1") for rank_log in node.rank_logs())
    host, log = next(((host, log) for host, (number, log) in logs if number == rank), ("", None))
    warnings = [record for record in PerfLogReader(log) if record.event == Event.WARNING] if log is not None else []
    if not warnings or "global_steps" not in warnings[-1].value:
        raise RunError(f"{round_dir}: rank {rank} was not killed: {why}")
    killed_s, killed_step = warnings[-1].time_ms / 1e3, int(warnings[-1].value["global_steps"])
    changes = [event for event in ledger_events(run) if event.get("kind") == "state"]
    times_s = (datetime.fromisoformat(str(event["at"])).timestamp() for event in changes)
    states = {(event.get("attempt"), event.get("state")): at_s for event, at_s in zip(changes, times_s, strict=True)}
    again = rank_logs(round_dir).get(0)
    records = list(PerfLogReader(again)) if again else []
    events = (Event.TRAIN_START, Event.STEP_END)
    start, step = (next((record for record in records if record.event == event), None) for event in events)
    ended, restarted = states.get((1, "failed")), states.get((2, "running"))
    if ended is None or restarted is None or start is None or step is None:
        raise RunError(f"{round_dir}: no step was taken after rank {rank} was killed: {why}")
    window, begun = step.value_as(StepWindow), int(start.value["global_steps"])
    first_s = (start.time_ms + window.wall_ms / (window.global_steps - begun)) / 1e3
    return Recovery(
        rank=rank, host=host, noticed_s=ended - killed_s, restarted_s=restarted - ended, trained_s=first_s - restarted,
        lost_steps=killed_step - begun,
    )  # fmt: skip
