"""The rows of the tables of a comparison, and its self-contained page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple

from accelmark.report.charts import Chart, LoadCurve, LoadPoint, tradeoff_chart
from accelmark.report.run_page import limits_of, scale_text
from accelmark.report.templating import page
from accelmark.results.claims import Reproduction
from accelmark.results.comparison import Area, FigureDifference, Pair, RunComparison, Side
from accelmark.results.figures import RATES, FigureName, in_groups
from accelmark.results.prices import Prices, costs_of
from accelmark.spec.number_format import NOTHING, THIN, digits, quantity, scale_of, signed_percent

_AREA_TITLES: Final[dict[Area, str]] = {
    "hardware": "Hardware", "software": "Software", "settings": "Settings", "source": "Source and model",
    "audit": "Audit findings",
}  # fmt: skip


class Line(NamedTuple):
    """One figure of a pair."""

    title: str
    explanation: str
    baseline: str
    other: str
    change: str
    interval: str
    css_class: str
    effect: str


class BuyerLine(NamedTuple):
    """A buyer's questions about one case in two runs."""

    case: str
    chips: str
    faster: str
    """By how much the compared chip is faster, with its interval; what is not comparable otherwise."""
    energy: str
    cost: str
    costs: tuple[tuple[str, str, str], ...]
    """(title, baseline, compared)."""
    changed: str
    """What the vendors changed of the standard case."""


def buyer_lines(comparison: RunComparison, prices: Prices | None = None) -> list[BuyerLine]:
    """Return a line for each pair of different chips, or at the reader's ``prices`` for each pair."""
    lines = []
    for pair in comparison.pairs:
        sides = (pair.baseline, pair.other)
        names = [pair.other.key.hardware, pair.baseline.key.hardware]
        if names[0] == names[1]:
            if prices is None:
                continue
            names = [pair.other.run, pair.baseline.run]
        by_name = {difference.figure: difference for difference in pair.differences}
        costs = []
        for side, place in zip(sides, ("baseline", "other"), strict=True):
            values, key = {name: getattr(figure, place) for name, figure in by_name.items()}, side.key
            epoch = side.units_per_epoch
            costs.append(costs_of(prices, side.task, side.unit, key.hardware, key.world_size, values.get, epoch))
        both = [(one, two) for one in costs[0] for two in costs[1] if one.title == two.title]
        rate, energy = by_name.get(RATES[pair.baseline.task]), by_name.get(FigureName.ENERGY_PER_UNIT)
        faster = "not measured"
        if pair.not_comparable:
            faster = f"not comparable: {'; '.join(pair.not_comparable)}"
        elif rate is not None:
            interval = _interval(rate)
            faster = f"{_change(rate)} ({interval if interval != NOTHING else 'one round: no interval'})"
        changed = [f"{side.key.hardware}: {'; '.join(side.changed)}" for side in sides if side.changed]
        lines.append(
            BuyerLine(
                case=pair.baseline.key.model,
                chips=" against ".join(names),
                faster=faster,
                energy=_change(energy) if energy is not None and not pair.not_comparable else NOTHING,
                cost=signed_percent(both[0][1].value / both[0][0].value - 1) if both and both[0][0].value else NOTHING,
                costs=tuple((one.title, one.text, two.text) for one, two in both),
                changed="; ".join(dict.fromkeys(changed)) or "nothing",
            )
        )
    return lines


def render_comparison(comparison: RunComparison, *, served: bool = False, prices: Prices | None = None) -> str:
    """Return the page of a comparison: self-contained, or ``served`` with the server's style sheets and navigation."""
    load = [(model, charts) for model, charts in _load_charts(comparison) if charts]
    pairs = []
    for pair in comparison.pairs:
        areas = {title: [fact for fact in pair.differing if fact.area == area] for area, title in _AREA_TITLES.items()}
        pairs.append(
            {
                "pair": pair,
                "scales": (
                    scale_text(pair.baseline.key, pair.baseline.variant),
                    scale_text(pair.other.key, pair.other.variant),
                ),
                "summary": summary_line(pair),
                "groups": list(_groups(pair)),
                "areas": [(title, facts) for title, facts in areas.items() if facts],
            }
        )
    return page(
        "runs/compare.html", charts=bool(load), served=served, title="Comparison", comparison=comparison,
        buyer=buyer_lines(comparison, prices), pairs=pairs, load=load,
    )  # fmt: skip


def _load_charts(comparison: RunComparison) -> Iterator[tuple[str, list[Chart]]]:
    """Yield the model and the curves of all runs of each serving case of the baseline."""
    sides: dict[str, list[Side]] = {}
    for pair in comparison.pairs:
        if pair.baseline.load_curve:
            sides.setdefault(f"{pair.baseline.key} {pair.baseline.variant}", [pair.baseline]).append(pair.other)
    for compared in sides.values():
        latencies: list[LoadCurve] = []
        rates: list[LoadCurve] = []
        for number, side in enumerate(compared):
            by_latency: list[LoadPoint] = []
            by_user: list[LoadPoint] = []
            for point in side.load_curve:
                ttft, rate, end = point.ttft_p50_ms, point.output_token_rate, (point.is_open, point.lengths)
                load = f"{side.run}, {point.load}" + (f" ({point.lengths} tokens)" if point.lengths else "")
                if ttft is not None and ttft.value is not None:
                    text = f"{load}: {digits(ttft.value)} ms at {digits(rate)} tokens/s"
                    by_latency.append(LoadPoint(rate, ttft.value, limits_of(ttft), point.load, text, *end))
                per_user, per_device = point.token_rate_per_user, point.token_rate_per_device
                if per_user is not None and per_device is not None:
                    text = f"{load}: {digits(per_user)} tokens/s per user, {digits(per_device)} per device"
                    by_user.append(LoadPoint(per_user, per_device, None, point.load, text, *end))
            label = f"{side.run}: {scale_text(side.key, side.variant)}"
            latencies.append(LoadCurve(label, number, "solid", by_latency))
            rates.append(LoadCurve(label, number, "solid", by_user))
        charts = (
            tradeoff_chart(latencies, "output tokens/s", "Median TTFT", is_latency=True),
            tradeoff_chart(rates, "output tokens/s per user", "Output tokens/s per device", is_latency=False),
        )
        yield compared[0].key.model, [chart for chart in charts if chart is not None]


def lines_of(pair: Pair) -> list[Line]:
    """Return all figures of a pair in the order of the page."""
    return [line for _, lines in _groups(pair) for line in lines]


def summary_line(pair: Pair) -> str:
    """Return how many figures differ by more than noise."""
    counts = Counter(difference.effect for difference in pair.differences)
    num_compared = counts.total() - counts["unknown"]
    if not pair.differences:
        return "No figure is compared: both runs need a round with a result."
    if pair.is_same_run:
        return "Both are the same run. Name another one to compare with."
    means = "Percentages compare geometric means over rounds."
    if not num_compared:
        single = "A single round has no spread, so no difference can be distinguished from noise. Repeat the case."
        return f"{single} {means}" if max(pair.baseline.num_rounds, pair.other.num_rounds) > 1 else single
    parts = [f"{counts[word]} {word}" for word in ("better", "worse", "different") if counts[word]]
    listed = ", ".join([*parts, f"{counts['within noise'] + counts['equal']} within noise or equal"])
    chance = "By chance alone, about 1 figure in 20 is outside its interval."
    return f"Of {num_compared} figures: {listed}. {chance} {means}"


def _groups(pair: Pair) -> Iterator[tuple[str, list[Line]]]:
    differences = {difference.figure: difference for difference in pair.differences}
    for title, names in in_groups(differences).items():
        yield title, [_line(differences[name]) for name in names]


def _line(found: FigureDifference) -> Line:
    scale = scale_of(found.baseline, found.unit)
    unit = f"\u202f{scale.unit}" if scale.unit else ""
    baseline, other = (f"{scale.number(value)}{unit}" for value in (found.baseline, found.other))
    css_class = found.effect.replace(" ", "-")
    effect = "unknown (one round)" if found.effect == "unknown" else found.effect
    texts = (baseline, other, _change(found), _interval(found), css_class, effect)
    return Line(found.title, found.figure.info.explanation, *texts)


def _change(found: FigureDifference) -> str:
    return _absolute(found, found.difference) if found.relative is None else signed_percent(found.relative)


def _interval(found: FigureDifference) -> str:
    if found.relative_interval is not None:
        return " to ".join(map(signed_percent, found.relative_interval))
    return NOTHING if found.interval is None else _absolute(found, *found.interval)


def _absolute(found: FigureDifference, *differences: float) -> str:
    """Return absolute differences with their unit, which of shares is the percentage point."""
    scale = scale_of(max(differences, key=abs), found.unit, 3)
    text = " to ".join(f"{'+' if value > 0 else ''}{scale.number(value)}" for value in differences)
    unit = "points" if scale.unit == "%" else scale.unit
    return f"{text}{THIN}{unit}" if unit else text


_CLASSES: Final = {"REPRODUCED": "valid", "BETTER": "valid", "SHORT": "invalid", "NOT COMPARABLE": "open"}


def render_reproduction(found: Reproduction) -> str:
    """Return the self-contained page of a comparison with a claim."""
    css_class = _CLASSES[found.verdict]
    return page("claims/claim.html", title=found.title, found=found, css_class=css_class, figures=figures_text(found))


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
