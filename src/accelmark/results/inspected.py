"""What all ranks of a round saw of a vendor's code, as one."""

from __future__ import annotations

from collections.abc import Sequence

from accelmark.results.timeline import RankEnd
from accelmark.spec.events import Inspected


def inspected_by_all(ends: Sequence[RankEnd]) -> Inspected | None:
    """Return everything that any rank saw; None where none looked."""
    seen = [end.inspected for end in ends if end.inspected is not None]
    if not seen:
        return None
    return Inspected(replaced_functions=tuple(dict.fromkeys(name for one in seen for name in one.replaced_functions)))
