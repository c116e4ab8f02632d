"""Whether other work disturbed a round: before it began, on its devices, or on the cores while it ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from accelmark.results.consumption import HostSamples
from accelmark.results.integrate import Spans, integrate, largest_gap_s
from accelmark.results.round_state import NodeDir, read_json
from accelmark.results.samples import Samples
from accelmark.results.schema import Finding

BUSY_LOAD: Final = 0.5
"""Load per core at the start above which a host counts as busy with something else."""
MOST_WAITED_PERCENT: Final = 10.0
"""Share of a round's time in which tasks waited for a core above which something took the cores from it."""


def is_disturbed(nodes: Iterable[NodeDir], hosts: HostSamples) -> bool:
    """Tell whether any host of a round had other work."""
    return any(_was_busy(node) for node in nodes) or any(
        foreign_notes(samples) or _waited_too_long(samples, spans) for samples, spans in hosts.values()
    )


def foreign_notes(samples: Samples) -> list[str]:
    """Return what the sampler remarked of processes of others."""
    return [note for note in samples.notes if note.startswith("foreign ")]


def waited_percent(samples: Samples, spans: Spans) -> float | None:
    """Return the mean share of time in which a task waited for a core (pressure); None if unknown."""
    column = samples.host.get("psi_cpu")
    return integrate(samples.t, column, spans, largest_gap_s(samples.interval_s)).mean if column else None


def pressure_finding(host: str, samples: Samples, spans: Spans) -> Iterable[Finding]:
    """Say so where the cores of a host were too few for all that wanted them."""
    if _waited_too_long(samples, spans):
        yield Finding(
            severity="warning",
            rule="cpu-pressure",
            expected=f"tasks wait for a core at most {MOST_WAITED_PERCENT:.0f} % of the time",
            actual=f"{host}: {waited_percent(samples, spans):.0f} %: other work ran there, or more threads than cores",
        )


def _waited_too_long(samples: Samples, spans: Spans) -> bool:
    waited = waited_percent(samples, spans)
    return waited is not None and waited > MOST_WAITED_PERCENT


def _was_busy(node: NodeDir) -> bool:
    info = read_json(node.path / "sys_info.json")
    load, cpu = info.get("load1_at_start"), info.get("cpu")
    cores = cpu.get("usable_cores") if isinstance(cpu, dict) else None
    return isinstance(load, int | float) and isinstance(cores, int) and cores > 0 and load / cores > BUSY_LOAD
