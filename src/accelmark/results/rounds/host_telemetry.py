"""Read the telemetry of all hosts of a round, with findings about missing or unusable samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from accelmark.results.figures.consumption import HostSamples, Spans
from accelmark.results.figures.contention import FOREIGN_PROCESS
from accelmark.results.read.round_dir import NodeDir, read_json
from accelmark.results.read.telemetry import Samples, read_samples
from accelmark.results.schema import Finding, finding


def read_telemetry(
    nodes: list[NodeDir], spans_by_node: Mapping[str, Spans], findings: list[Finding]
) -> tuple[HostSamples, str | None]:
    """Return the samples of every host, and the reason where there are none.

    Args:
        nodes: the hosts of the round.
        spans_by_node: node directory -> the measured time, in seconds of that host's monotonic clock.
        findings: extended by what is wrong with the telemetry.
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
        samples.keep_devices(*_devices_of(node))
        if not samples.devices:
            actual = f"{node.host}: no samples of the ranks' devices: {samples.reason('devices')}"
            findings.append(finding("open", "telemetry-present", "", actual))
        hosts[node.host] = (samples, spans)
        findings += _telemetry_findings(node.host, samples)
    findings += [finding("error", "telemetry-present", "samples from every host", what) for what in missing]
    if missing:
        return {}, missing[0]
    return hosts, None if hosts else "training did not start"


def _devices_of(node: NodeDir) -> tuple[list[int] | None, int]:
    """Return the device indices that the ranks of a host were given (None if unknown) and the number of ranks."""
    task = read_json(node.path / "agent.json")
    num_ranks = int(task.get("nproc") or len(node.rank_logs()))
    visible = task.get("visible_devices") or {}
    devices = (read_json(node.path / "sys_info.json").get("environment") or {}).get(visible.get("variable"))
    if isinstance(devices, str) and all(part.strip().isdigit() for part in devices.split(",")):
        return [int(part) for part in devices.split(",")][:num_ranks], num_ranks
    return None, num_ranks


def _telemetry_findings(host: str, samples: Samples) -> Iterable[Finding]:
    for note in samples.notes:
        rule = FOREIGN_PROCESS if note.startswith("foreign ") else "telemetry-note"
        yield finding("warning", rule, "", f"{host}: {note}")
    if samples.malformed:
        yield finding("warning", "telemetry-readable", "", f"{host}: {samples.malformed} malformed lines in telemetry")
    for index, reasons in samples.throttle.items():
        active = sorted(reasons - {"idle", "gpu_idle", "none"})
        if active:
            actual = f"{host} device {index}: clocks were throttled: {', '.join(active)}"
            yield finding("info", "clocks-free", "", actual)
