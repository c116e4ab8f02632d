"""Read what the hosts of a round recorded besides the ranks' logs: telemetry, contention with other work, and exits.

Other work is detected on a host before the round, on its devices, and by waits for CPU cores during the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from accelmark.results.read.round_dir import LedgerState, NodeDir, read_json
from accelmark.results.read.telemetry import Samples, read_samples
from accelmark.results.rounds.consumption import HostSamples, Spans
from accelmark.results.schema import Environment, Finding, JobState, Mark, RoundResult, finding
from accelmark.spec.backports import pairwise
from accelmark.spec.job import JobSpec, NodeExit, TrainingWork
from accelmark.spec.log.events import FinishedBase
from accelmark.spec.model import Spec
from accelmark.spec.number_format import limit_percent, percent

MAX_CPU_WAIT_SHARE: Final = 0.02
"""Share of a rank's time that a thread may wait for a core."""
MIN_OTHERS_SHARE: Final = 0.5
"""CPU time of other processes, as a share of the wait, from which they explain it."""
MIN_CPU_WAIT_S: Final = 0.5
"""Shorter waits are ignored: AccelMark's own start-up uses some CPU time too."""
_ADVICE: Final = ". Use an idle host."
_FOREIGN_PROCESS: Final = "foreign-process"
_BUSY_AT_START: Final = "busy-at-start"
_CPU_CONTENTION: Final = "cpu-contention"
_OVERSUBSCRIBED: Final = "oversubscribed"
_UNREADABLE: Final = "samples-replaced"

_WORST_FIRST: Final[tuple[JobState, ...]] = ("failed", "timed_out", "lost", "cancelled")
_FINAL: Final = frozenset({"succeeded", *_WORST_FIRST})


def read_telemetry(
    nodes: list[NodeDir], spans_by_node: Mapping[str, Spans], findings: list[Finding], before: Sequence[NodeDir] = ()
) -> tuple[HostSamples, str]:
    """Return the samples of every host, and the reason where there are none.

    ``spans_by_node`` has the measured time of each node directory in seconds of that host's monotonic clock, of every
    attempt. ``before`` has the hosts of the attempts that the last one continued; where a host was restarted since,
    its clock began again, and its earlier samples are left out. Problems of the telemetry are appended to ``findings``.
    """
    hosts: dict[str, tuple[Samples, Spans]] = {}
    missing: list[tuple[NodeDir, str]] = []
    for node in nodes:
        spans = spans_by_node.get(str(node.path), ())
        path = node.path / "telemetry.jsonl"
        if not path.is_file():
            missing.append((node, f"{node.host}: telemetry.jsonl is missing"))
            continue
        is_one_clock = all(earlier < later for (_, earlier), (later, _) in pairwise(spans))
        earlier = [old.path / path.name for old in before if old.path.name == node.path.name and is_one_clock]
        samples = read_samples(*(record for record in earlier if record.is_file()), path)
        if not len(samples.t):
            missing.append((node, f"{node.host}: telemetry.jsonl has no samples"))
        if not len(samples.t) or not spans:
            continue
        selected, num_ranks = _visible_devices(node)
        indices = None if selected is None else device_indices(selected[:num_ranks], samples.infos)
        samples.keep_devices(indices, num_ranks)
        if not samples.devices:
            unmatched = selected is not None and indices == [] and samples.infos
            why = f"none of them has the UUID {', '.join(selected or ())}" if unmatched else samples.reason("devices")
            actual = f"{node.host}: no samples of the ranks' devices: {why}"
            findings.append(finding("open", "telemetry-missing", "", actual))
        hosts[node.host] = (samples, spans)
        findings += _telemetry_findings(node.host, samples)
    lacking = [
        what
        for node, what in missing
        if not (node.exit is not None and node.exit.state != "succeeded" and (not node.rank_logs()))
    ]
    findings += [finding("error", "telemetry-missing", "samples from every host", what) for what in lacking]
    if missing:
        return {}, missing[0][1]
    return hosts, "" if hosts else "nothing was measured"


def _visible_devices(node: NodeDir) -> tuple[list[str] | None, int]:
    """Return the entries of the host's visible-devices variable (None if unknown) and the number of ranks."""
    task = read_json(node.path / "agent.json")
    num_ranks = int(task.get("nproc") or len(node.rank_logs()))
    variable = (task.get("visible_devices") or {}).get("variable")
    value = (read_json(node.path / "sys_info.json").get("environment") or {}).get(variable)
    return [entry.strip() for entry in value.split(",")] if isinstance(value, str) and value else None, num_ranks


def device_indices(entries: Iterable[str], infos: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the telemetry's indices of the devices that ``entries`` select.

    An entry is an index, or a UUID (``GPU-8932f937-...``) that may be shortened as far as it is unique. Without a match
    (a UUID of part of a device, such as ``MIG-...``) all are left out: the sum over some would be wrong.
    """
    uuids = {index: str(info.get("uuid") or "").lower() for index, info in infos.items()}
    indices: list[int] = []
    for entry in entries:
        matching = [index for index, uuid in uuids.items() if entry and uuid.startswith(entry.lower())]
        matching = [int(entry)] if entry.isdigit() else matching
        if len(matching) != 1:
            return []
        indices += matching
    return indices


def _telemetry_findings(host: str, samples: Samples) -> Iterable[Finding]:
    if samples.footer is None:
        actual = f"{host}: the recorder wrote no end: it was killed, or the host was lost"
        yield finding("open", "telemetry-missing", "samples of the whole round", actual)
    for note in samples.notes:
        if note.startswith("suspended: "):
            yield finding("open", "telemetry-missing", "samples of the whole round", f"{host}: {note}")
            continue
        rule = _FOREIGN_PROCESS if note.startswith("foreign ") else "telemetry-note"
        yield finding("warning", rule, "", f"{host}: {note}")
    if samples.malformed:
        yield finding(
            "warning", "telemetry-unreadable", "", f"{host}: {samples.malformed} malformed lines in telemetry"
        )
    for constant in filter(None, map(samples.constant_power, samples.devices)):
        yield finding("open", "constant-power", "readings of a sensor, which vary", f"{host}: {constant}")
    for index, reasons in samples.throttle.items():
        active = sorted(reasons - {"idle", "gpu_idle", "none"})
        if active:
            actual = f"{host} device {index}: clocks were throttled: {', '.join(active)}"
            yield finding("info", "throttled", "", actual)


def disturbances(findings: Iterable[Finding]) -> list[str]:
    """Return the findings that report other work on the machines, without the advice to use idle ones."""
    busy = (finding for finding in findings if finding.rule in (_FOREIGN_PROCESS, _BUSY_AT_START, _CPU_CONTENTION))
    return [finding.actual.removesuffix(_ADVICE) for finding in busy]


def contention_findings(nodes: Iterable[NodeDir], finished: Mapping[int, FinishedBase | None]) -> Iterable[Finding]:
    """Yield warnings about other work on the hosts before a round, and about ranks that waited for CPU cores.

    ``finished`` has the FINISHED event of each rank.
    """
    others: list[float] = []
    for node in nodes:
        if node.exit is not None and node.exit.others_cpu_s is not None:
            others.append(node.exit.others_cpu_s)
        reasons = read_json(node.path / "sys_info.json").get("busy_at_start")
        for reason in reasons if isinstance(reasons, list) else ():
            yield finding("warning", _BUSY_AT_START, "", f"{node.host}: {reason}{_ADVICE}")
    for rank, end in finished.items():
        if end is None or end.core_wait_s is None or end.e2e_time <= 0:
            continue
        share = end.core_wait_s / end.e2e_time
        if share > MAX_CPU_WAIT_SHARE and end.core_wait_s > MIN_CPU_WAIT_S:
            limit = f"limit {limit_percent(MAX_CPU_WAIT_SHARE)}"
            waited = f"rank {rank} waited for CPU cores {percent(share)} of the time ({limit})"
            if not others or max(others) >= MIN_OTHERS_SHARE * end.core_wait_s:
                used = f"used up to {max(others):.1f} s of CPU time" if others else "may have used them"
                yield finding("warning", _CPU_CONTENTION, "", f"{waited}: other work {used}{_ADVICE}")
            else:
                yield finding("warning", _OVERSUBSCRIBED, "", f"{waited}: the job has more threads than cores.")


def job_state(
    job: JobSpec, nodes: list[NodeDir], rank_error: str | None, has_events: bool, ledger: LedgerState | None
) -> tuple[JobState, str | None]:
    """Return the state of a round and, unless it succeeded, the reason.

    ``rank_error`` is the message of the first rank that did not complete, ``ledger`` the last state that the
    coordinator recorded.
    """
    if ledger is not None and ledger[0] in _FINAL and ledger[0] != "succeeded":
        return ledger[0], ledger[1] or rank_error or f"the coordinator recorded the state {ledger[0]}"
    exits = [(node, node.exit) for node in nodes if node.exit is not None]
    for state in _WORST_FIRST:
        for node, node_exit in exits:
            if node_exit.state == state:
                return state, _reason(node, node_exit, rank_error)
    if len(exits) < job.key.nnodes:
        if ledger is not None and ledger[0] not in _FINAL:
            return ledger[0], ledger[1] or "the job has not ended"
        if not nodes:
            return "queued", "the job was not started"
        missing = [node.problem for node in nodes if node.problem]
        return "lost", missing[0] if missing else f"{job.key.nnodes - len(exits)} hosts wrote no files"
    if not has_events:
        return "failed", "no rank wrote an event"
    return ("failed", rank_error) if rank_error else ("succeeded", None)


def _reason(node: NodeDir, node_exit: NodeExit, rank_error: str | None) -> str:
    if node_exit.reason:
        return node_exit.reason
    for rank in node_exit.ranks:
        if rank.state != "succeeded":
            return f"{node.host}, rank {rank.rank}: {rank.reason or rank.state}"
    return rank_error or f"{node.host}: the node's state is {node_exit.state}"


def round_marks(
    job: JobSpec,
    state: JobState,
    findings: Iterable[Finding],
    *,
    synthetic: bool,
    partial_evaluation: bool,
    resumed: bool = False,
) -> tuple[Mark, ...]:
    """Return the marks of a round that limit what its figures show."""
    marks: dict[Mark, bool] = {
        "open": job.open or any(setting.forced for setting in job.provenance.values()),
        "synthetic": synthetic,
        "made_up_data": isinstance(job.work, TrainingWork) and job.work.made_up_data,
        "partial": state != "succeeded",
        "partial_evaluation": partial_evaluation,
        "busy_machine": bool(disturbances(findings)),
        "resumed": resumed,
        "bad_samples": any(found.rule == _UNREADABLE for found in findings),
        "speed_only": isinstance(job.work, TrainingWork) and not job.work.checks_convergence,
    }
    return tuple(mark for mark, applies in marks.items() if applies)


def round_of(
    job: JobSpec, state: tuple[JobState, str | None], nodes: Sequence[NodeDir], findings: Iterable[Finding], **own: Any
) -> RoundResult:
    """Return the result of a round with what is the same for all tasks; ``state`` has the reason, ``own`` the rest."""
    exits = tuple(node.exit for node in nodes if node.exit)
    common = {
        "key": job.key,
        "round": job.round,
        "case_version": job.case_version,
        "unit": job.work.unit,
        "state": state[0],
        "reason": state[1],
        "converged": None,
        "vendor": job.vendor,
        "chip": job.chip,
        "precision": job.work.precision,
        "started_at": min((end.started_at for end in exits), default=""),
        "min_rounds": job.work.min_repeats,
        "role": job.role,
        "rules": None if job.rules is None else job.rules.title,
        "nodes": exits,
        "settings": job.provenance,
        "findings": tuple(findings),
    }
    return RoundResult(**(common | own))


def environment_of(nodes: Iterable[NodeDir], **events: Spec | None) -> Environment:
    """Return the hosts' descriptions, and the values of rank 0's events that were logged."""
    return Environment(
        hosts=tuple({"host": node.host} | read_json(node.path / "sys_info.json") for node in nodes),
        **{name: event.model_dump() for name, event in events.items() if event is not None},
    )
