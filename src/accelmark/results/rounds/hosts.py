"""Read what the hosts of a round recorded besides the ranks' logs: telemetry, and contention with other work.

Other work is detected on a host before the round, on its devices, and by waits for CPU cores during the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from accelmark.results.figures.consumption import HostSamples, Spans
from accelmark.results.read.round_dir import NodeDir, read_json
from accelmark.results.read.telemetry import Samples, read_samples
from accelmark.results.schema import Finding, finding
from accelmark.spec.events import Finished, InferFinished

MAX_CPU_WAIT_SHARE: Final = 0.02
"""Share of a rank's time that a thread may wait for a core."""
MIN_OTHERS_SHARE: Final = 0.5
"""CPU time of other processes, as a share of the wait, from which they explain it."""
MIN_CPU_WAIT_S: Final = 0.5
"""Shorter waits are ignored: AccelMark's own start-up uses some CPU time too."""
_FOREIGN_PROCESS: Final = "foreign-process"
_BUSY_AT_START: Final = "quiet-start"
_CPU_CONTENTION: Final = "cores-at-hand"
_OVERSUBSCRIBED: Final = "threads-fit"


def host_infos(nodes: Iterable[NodeDir]) -> tuple[dict[str, Any], ...]:
    """Return ``sys_info.json`` of each host."""
    return tuple({"host": node.host} | read_json(node.path / "sys_info.json") for node in nodes)


def read_telemetry(
    nodes: list[NodeDir], spans_by_node: Mapping[str, Spans], findings: list[Finding]
) -> tuple[HostSamples, str]:
    """Return the samples of every host, and the reason where there are none.

    Args:
        nodes: the hosts of the round.
        spans_by_node: node directory -> the measured time, in seconds of that host's monotonic clock.
        findings: list to which problems of the telemetry are appended.
    """
    hosts: dict[str, tuple[Samples, Spans]] = {}
    missing: list[str] = []
    for node in nodes:
        spans = spans_by_node.get(str(node.path), ())
        path = node.path / "telemetry.jsonl"
        if not path.is_file():
            missing.append(f"{node.host}: telemetry.jsonl is missing")
            continue
        samples = read_samples(path)
        if not len(samples.t):
            missing.append(f"{node.host}: telemetry.jsonl has no samples")
        if not len(samples.t) or not spans:
            continue
        selected, num_ranks = _visible_devices(node)
        indices = None if selected is None else device_indices(selected[:num_ranks], samples.infos)
        samples.keep_devices(indices, num_ranks)
        if not samples.devices:
            unmatched = selected is not None and indices == [] and samples.infos
            why = f"none of them has the UUID {', '.join(selected or ())}" if unmatched else samples.reason("devices")
            actual = f"{node.host}: no samples of the ranks' devices: {why}"
            findings.append(finding("open", "telemetry-present", "", actual))
        hosts[node.host] = (samples, spans)
        findings += _telemetry_findings(node.host, samples)
    findings += [finding("error", "telemetry-present", "samples from every host", what) for what in missing]
    if missing:
        return {}, missing[0]
    return hosts, "" if hosts else "training did not start"


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
    indices: list[int] = []
    for entry in entries:
        if entry.isdigit():
            indices.append(int(entry))
            continue
        uuids = {index: str(info.get("uuid") or "").lower() for index, info in infos.items()}
        matching = [index for index, uuid in uuids.items() if entry and uuid.startswith(entry.lower())]
        if len(matching) != 1:
            return []
        indices += matching
    return indices


def _telemetry_findings(host: str, samples: Samples) -> Iterable[Finding]:
    for note in samples.notes:
        rule = _FOREIGN_PROCESS if note.startswith("foreign ") else "telemetry-note"
        yield finding("warning", rule, "", f"{host}: {note}")
    if samples.malformed:
        yield finding("warning", "telemetry-readable", "", f"{host}: {samples.malformed} malformed lines in telemetry")
    for index, reasons in samples.throttle.items():
        active = sorted(reasons - {"idle", "gpu_idle", "none"})
        if active:
            actual = f"{host} device {index}: clocks were throttled: {', '.join(active)}"
            yield finding("info", "clocks-free", "", actual)


def is_busy(findings: Iterable[Finding]) -> bool:
    """Return whether any finding reports other work on the machine."""
    return any(found.rule in (_FOREIGN_PROCESS, _BUSY_AT_START, _CPU_CONTENTION) for found in findings)


def contention_findings(
    nodes: Iterable[NodeDir], finished: Mapping[int, Finished | InferFinished | None]
) -> Iterable[Finding]:
    """Yield warnings about other work on the hosts before a round, and about ranks that waited for CPU cores.

    Args:
        nodes: the round's hosts.
        finished: the FINISHED event of each rank.
    """
    others: list[float] = []
    for node in nodes:
        if node.exit is not None and node.exit.others_cpu_s is not None:
            others.append(node.exit.others_cpu_s)
        reasons = read_json(node.path / "sys_info.json").get("busy_at_start")
        for reason in reasons if isinstance(reasons, list) else ():
            yield finding("warning", _BUSY_AT_START, "", f"{node.host}: {reason}. Use an idle host.")
    for rank, end in finished.items():
        if end is None or end.core_wait_s is None or end.e2e_time <= 0:
            continue
        share = end.core_wait_s / end.e2e_time
        if share > MAX_CPU_WAIT_SHARE and end.core_wait_s > MIN_CPU_WAIT_S:
            waited = f"rank {rank} waited for CPU cores {share:.1%} of the time (limit {MAX_CPU_WAIT_SHARE:.0%})"
            if not others or max(others) >= MIN_OTHERS_SHARE * end.core_wait_s:
                used = f"used up to {max(others):.1f} s of CPU time" if others else "may have used them"
                yield finding("warning", _CPU_CONTENTION, "", f"{waited}: other work {used}. Use an idle host.")
            else:
                yield finding("warning", _OVERSUBSCRIBED, "", f"{waited}: the job has more threads than cores.")
