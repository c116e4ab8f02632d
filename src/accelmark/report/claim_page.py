"""The page of a run that is compared with a claim."""

from __future__ import annotations

from accelmark.report.templating import page
from accelmark.results.claims import Reproduction
from accelmark.spec.number_format import quantity, signed_percent

_CLASSES = {"REPRODUCED": "valid", "BETTER": "valid", "SHORT": "invalid", "NOT COMPARABLE": "open"}


def render_reproduction(found: Reproduction) -> str:
    """Return the self-contained page of a comparison with a claim."""
    return page(
        "claims/claim.html",
        title=found.title,
        found=found,
        css_class=_CLASSES[found.verdict],
        figures=figures_text(found),
    )


def figures_text(found: Reproduction) -> list[tuple[str, str]]:
    """Return the figures of a comparison with their titles."""
    advantage = "not measured" if found.advantage is None else signed_percent(found.advantage)
    if found.interval is not None:
        advantage += f" (95\u202f%: {' to '.join(map(signed_percent, found.interval))})"
    elif found.advantage is not None:
        advantage += f" (no interval: {found.interval_reason})"
    return [
        ("Claimed", quantity(found.claimed, found.unit)),
        ("Measured", quantity(found.measured, found.unit)),
        ("Advantage of the run", advantage),
        ("Tolerance", f"\u00b1 {100 * found.tolerance.ratio:g}\u202f%: {found.tolerance.why}"),
    ]
