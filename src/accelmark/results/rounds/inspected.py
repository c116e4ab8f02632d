"""What all ranks of a round saw of a vendor's code, as one."""

from __future__ import annotations

from collections.abc import Sequence

from accelmark.results.figures.timeline import RankEnd
from accelmark.spec.events import Inspected


def inspected_by_all(ends: Sequence[RankEnd]) -> Inspected | None:
    """Return everything that any rank saw: the fewest samples, and why a rank could not count; None where none looked.

    A rank that did not come to look, though others did, is a reason too.
    """
    seen = [end.inspected for end in ends if end.inspected is not None]
    if not seen:
        return None
    counts = [one.samples_seen for one in seen if one.samples_seen is not None]
    reasons = [one.samples_reason for one in seen if one.samples_reason is not None]
    reasons += [f"rank {end.rank} told nothing of its steps" for end in ends if end.inspected is None]
    types = sorted({name for one in seen for name in one.compute_types or ()})
    without = [one.compute_reason for one in seen if one.compute_reason is not None]
    return Inspected(
        replaced_functions=tuple(dict.fromkeys(name for one in seen for name in one.replaced_functions)),
        probed_steps=seen[0].probed_steps,
        samples_credited=seen[0].samples_credited,
        samples_seen=min(counts, default=None),
        samples_reason=next(iter(reasons), None),
        compute_types=tuple(types) or None,
        compute_reason=next(iter(without), None),
    )
