"""Detect contention with other work: on the host before a round, on its devices, and for CPU cores during it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from accelmark.results.read.round_dir import NodeDir, read_json
from accelmark.results.schema import Finding, finding
from accelmark.spec.events import Finished, InferFinished

MAX_CPU_WAIT_SHARE: Final = 0.02
"""Share of a rank's time that a thread may wait for a core."""
MIN_OTHERS_SHARE: Final = 0.5
"""CPU time of other processes, as a share of the wait, from which they explain it."""
MIN_CPU_WAIT_S: Final = 0.5
"""Shorter waits are ignored: AccelMark's own start-up uses some CPU time too."""
FOREIGN_PROCESS: Final = "foreign-process"
_BUSY_AT_START: Final = "quiet-start"
_CPU_CONTENTION: Final = "cores-at-hand"
_OVERSUBSCRIBED: Final = "threads-fit"


def is_busy(findings: Iterable[Finding]) -> bool:
    """Return whether any finding reports other work on the machine."""
    return any(found.rule in (FOREIGN_PROCESS, _BUSY_AT_START, _CPU_CONTENTION) for found in findings)


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
