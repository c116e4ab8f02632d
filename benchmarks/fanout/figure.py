"""Curves and a table of what was measured, written beside the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fanout.simulated import STEP

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 240, 52, 36, 28


def write_figures(directory: Path, found: dict[str, Any]) -> None:
    """Write ``coordinator.svg`` and ``README.md``."""
    simulated = found["simulated"]
    panels = [("time (s)", "wall_s"), ("processor time (s)", "cpu_s"), ("memory (MiB)", "memory_mib")]
    parts = []
    for index, (title, name) in enumerate(panels):
        points = [(float(row["hosts"]), float(row[name])) for row in simulated]
        parts.append(f'<g transform="translate({index * _WIDTH} 0)">{_panel(title, points)}</g>')
    size = f'width="{_WIDTH * len(panels)}" height="{_HEIGHT}"'
    style = "text{font:12px sans-serif;fill:#222}"
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>\n'
    (directory / "coordinator.svg").write_text(svg)
    (directory / "README.md").write_text(_readme(found))


def _panel(title: str, points: Sequence[tuple[float, float]]) -> str:
    most_x, most_y = max(x for x, _ in points), 1.1 * max(y for _, y in points)
    width, height = _WIDTH - _LEFT - 16, _HEIGHT - _BOTTOM - _TOP

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + width * x / most_x, _TOP + height * (1 - y / most_y)

    line = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
    parts = [f'<text x="{_LEFT}" y="16">coordinator: {title}</text>']
    for share in (0.0, 0.5, 1.0):
        _, y = place(0, share * most_y)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * most_y:.3g}</text>')
    parts.append(f'<polyline points="{line}" fill="none" stroke="#2563eb" stroke-width="2"/>')
    for x, y in points:
        left, top = place(x, y)
        parts.append(f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="#2563eb"/>')
        parts.append(f'<text x="{left:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{x:.0f}</text>')
    return "".join(parts)


def _readme(found: dict[str, Any]) -> str:
    real = "\n".join(
        f"| {row['hosts']} | {row['accelmark_s']:.2f} | {row['one_by_one_s']:.1f} | {row['in_turn']} |"
        f" {row['ratio']:.1f} |"
        for row in found["real"]
    )
    phases = ("preflight", "launch", "collection")
    simulated = "\n".join(
        f"| {row['hosts']} | "
        + " | ".join(f"{row['phases'][name]['wall_s']:.2f} ({row['phases'][name]['cpu_s']:.2f})" for name in phases)
        + f" | {row['memory_mib']:.0f} | {row['descriptors']} |"
        for row in found["simulated"]
    )
    steady = "\n".join(
        f"| {row['hosts']} x {row['ranks']} | {row['seconds']} |"
        f" {row['phases']['steady']['cpu_s'] / row['seconds']:.0%} |"
        f" {row['new_bytes'] / 1e6:.1f} | {row['sent_bytes'] / row['new_bytes']:.3f} | {row['memory_mib']:.0f} |"
        for row in found["steady"]
    )
    bookkeeping = "\n".join(
        f"| {row['hosts']} | {row['plan_s']:.2f} | {row['plan_bytes'] / 1e3:.0f} | {row['status_s']:.3f} |"
        f" {row['command_s']:.2f} ({row['command_cpu_s']:.2f}) |"
        for row in found["bookkeeping"]
    )
    len_step = len(STEP)
    return f"""# Fan-out: looking at hosts, starting a job, bringing its files home

Preflight, launch of a job that does nothing, and collection of its files, on hosts that are network namespaces of one
machine ({found["date"]}, {found["cores"]} cores of an {found["cpu"]}, load {found["load1_at_start"]:.1f} from other
work at the start, {found["load1_at_end"]:.1f} with this benchmark at the end), each with a real sshd.
AccelMark keeps one connection a host and works on all hosts at the same time; beside it the same steps as
FlagPerf's scripts do them: {found["openssh_commands_a_host"]} commands of openssh's client a host, one after another.
Where fewer hosts than all were timed one by one, the rest is by rule of three: each host costs the same there. All
hosts share the machine's cores, so that on real hosts the ratio is larger.

| hosts | AccelMark (s) | one by one (s) | of which timed | ratio |
|---|---|---|---|---|
{real}

The coordinator alone, against simulated hosts: one SSH server on the same machine that answers AccelMark's programs
without running anything. Time of each phase over all hosts, with the coordinator's processor time in parentheses; a
part of the time is the server's. Memory and open descriptors are the coordinator's largest.

| hosts | preflight (s) | launch (s) | collection (s) | memory (MiB) | descriptors |
|---|---|---|---|---|---|
{simulated}

![curves](coordinator.svg)

A job in its steady state, whose ranks each log one step a second ({len_step} bytes a line), from its first byte to the
end of its collection. The share of one core is the coordinator's processor time over the job's duration. Bytes on the
wire are those of the frames before encryption, over the new bytes of the logs: the ratio does not grow with time.

| hosts x ranks | job (s) | share of one core | new bytes (MB) | sent over new | memory (MiB) |
|---|---|---|---|---|---|
{steady}

Without any connection: planning a run on all hosts, and the status of a run on them while it is running: within a
process, and as the command `accelmark status` with Python's start and imports (processor time in parentheses).

| hosts | plan (s) | plan.json (kB) | status (s) | command (s) |
|---|---|---|---|---|
{bookkeeping}

To repeat: `python -m benchmarks.fanout` as root, with what `tests/cluster/requirements.sh` installs and the package
extra `cluster`. It writes `figures.json`, `coordinator.svg` and this page.
"""
