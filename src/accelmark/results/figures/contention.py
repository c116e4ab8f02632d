"""Whether other work disturbed a round: before it began, on its devices, or on the cores while it ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from accelmark.results.read.round_dir import NodeDir, read_json
from accelmark.results.schema import Finding, finding
from accelmark.spec.events import Finished
from accelmark.spec.inference.events import InferFinished

MOST_WAITED: Final = 0.02
"""Share of a rank's time that a thread of it may have waited for a core before other work counts as a disturbance."""
LEAST_OTHERS: Final = 0.5
"""CPU time of others over a wait from which it is laid to them: they delay a thread no longer than they run."""
LEAST_WAIT_S: Final = 0.5
"""A wait that counts at all: what is started beside a rank takes a moment of the cores too."""
FOREIGN_PROCESS: Final = "foreign-process"
_QUIET_START: Final = "quiet-start"
_CORES_AT_HAND: Final = "cores-at-hand"
_TOO_MANY: Final = "threads-fit"


def is_busy(findings: Iterable[Finding]) -> bool:
    """Tell whether any finding of a round is of other work."""
    return any(found.rule in (FOREIGN_PROCESS, _QUIET_START, _CORES_AT_HAND) for found in findings)


def contention_findings(
    nodes: Iterable[NodeDir], finished: Mapping[int, Finished | InferFinished | None]
) -> Iterable[Finding]:
    """Tell of work that the hosts had before a round, and of ranks that waited for a core.

    Args:
        nodes: the round's hosts.
        finished: the last word of each rank.
    """
    others: list[float] = []
    for node in nodes:
        if node.exit is not None and node.exit.others_cpu_s is not None:
            others.append(node.exit.others_cpu_s)
        told = read_json(node.path / "sys_info.json").get("busy_at_start")
        for reason in told if isinstance(told, list) else ():
            yield finding("warning", _QUIET_START, "a host with nothing else to do", f"{node.host}: {reason}")
    for rank, end in finished.items():
        if end is None or end.core_wait_s is None or end.e2e_time <= 0:
            continue
        share = end.core_wait_s / end.e2e_time
        if share > MOST_WAITED and end.core_wait_s > LEAST_WAIT_S:
            expected = f"threads that wait for a core at most {MOST_WAITED:.0%} of the time"
            waited = f"rank {rank}: {share:.1%} of the time"
            if not others or max(others) >= LEAST_OTHERS * end.core_wait_s:
                taken = f"took up to {max(others):.1f} s of CPU time" if others else "may have taken them"
                yield finding("warning", _CORES_AT_HAND, expected, f"{waited}: other work {taken}")
            else:
                yield finding("warning", _TOO_MANY, expected, f"{waited}: the job has more threads than cores")
