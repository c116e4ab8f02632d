"""Drawings as SVG: a network, the family tree of a search, and the timeline of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from accelmark.automl.model.layers import Add, BatchNorm, Concat, Convolution, Dense, Layer, ReLU, Shape
from accelmark.automl.model.network import Network, infer_shapes, main_chain, skips
from accelmark.automl.records import EpochRecord, TrialRecord
from accelmark.automl.search.population import Individual
from accelmark.spec.number_format import quantity

_ROW: Final = 20
_LANE: Final = 9
_TEXT_X: Final = 12
_WIDTH: Final = 330
_TREE_X: Final = 46
_TREE_Y: Final = 54
_BAR: Final = 18


def _layer_text(layer: Layer) -> str:
    match layer:
        case Convolution():
            return f"conv {layer.kernel}×{layer.kernel} · {layer.filters}" + (
                f" /{layer.stride}" if layer.stride > 1 else ""
            )
        case Dense():
            return f"dense · {layer.units}"
        case Add():
            return "add"
        case Concat():
            return "concat"
        case _:
            return layer.kind.replace("_", " ")


def _rows(network: Network) -> list[tuple[str, tuple[str, ...]]]:
    """Return the layers of the main chain; batch norms and ReLUs are appended to the layer before."""
    rows: list[tuple[str, tuple[str, ...]]] = []
    for name in main_chain(network):
        layer = network.by_name[name].layer
        if isinstance(layer, BatchNorm | ReLU) and rows:
            text, names = rows[-1]
            rows[-1] = (f"{text} + {'bn' if isinstance(layer, BatchNorm) else 'relu'}", (*names, name))
        else:
            rows.append((_layer_text(layer), (name,)))
    return rows


def _shape_layer_text(shape: Shape) -> str:
    return "×".join(map(str, shape))


def draw_network(network: Network, title: str) -> str:
    """Draw a network top to bottom: one line per layer of the main chain, an arc per skip."""
    shapes, rows = infer_shapes(network), _rows(network)
    place = {0: 0}
    position = 0
    for row, (_, names) in enumerate(rows, start=1):
        for _ in names:
            position += 1
            place[position] = row
    arcs = sorted(skips(network), key=lambda skip: skip.end - skip.start)
    lanes: list[int] = []
    parts: list[str] = []
    for skip in arcs:
        top, bottom = place[skip.start], place[skip.end]
        lane = next((index for index, used in enumerate(lanes) if used <= top), len(lanes))
        lanes[lane : lane + 1] = [bottom]
        x = _WIDTH + _LANE * (1 + lane % 12)
        y1, y2 = (top + 1) * _ROW, (bottom + 0.5) * _ROW
        dash = ' stroke-dasharray="3 2"' if skip.merge == "concat" else ""
        parts.append(f'<path class="skip-arc" d="M{_WIDTH} {y1:.0f}H{x}V{y2:.0f}H{_WIDTH}"{dash}/>')
    picture = _shape_layer_text(network.input_shape)
    lines = [("image", picture), *((text, _shape_layer_text(shapes[names[-1]])) for text, names in rows)]
    for row, (text, shape) in enumerate(lines):
        y = row * _ROW
        parts.append(f'<rect class="layer" x="2" y="{y + 2}" width="{_WIDTH - 4}" height="{_ROW - 4}" rx="3"/>')
        parts.append(f'<text x="{_TEXT_X}" y="{y + 14}">{escape(text)}</text>')
        parts.append(f'<text class="dim" x="{_WIDTH - 8}" y="{y + 14}" text-anchor="end">{escape(shape)}</text>')
    width, height = _WIDTH + 13 * _LANE, (len(rows) + 1) * _ROW
    return _svg(width, height, title, parts)


def draw_family(individuals: Sequence[Individual], values: Mapping[int, float], title: str) -> str:
    """Draw the family tree, generations downwards; the color intensity grows with the accuracy."""
    generation: dict[int, int] = {}
    for one in individuals:
        generation[one.id] = 0 if one.parent is None else generation[one.parent] + 1
    column: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for one in individuals:
        if one.parent is not None:
            children.setdefault(one.parent, []).append(one.id)
    used = 0.0
    # Leaves take the next free column; a parent is above the middle of its children.
    for one in sorted(individuals, key=lambda each: _leaf_order(each.id, individuals), reverse=False):
        if one.id not in children:
            column[one.id] = used
            used += 1
    for one in reversed(individuals):
        if one.id in children:
            places = [column[child] for child in children[one.id]]
            column[one.id] = (min(places) + max(places)) / 2
    lowest, highest = min(values.values(), default=0.0), max(values.values(), default=1.0)
    parts: list[str] = []
    for one in individuals:
        x, y = _spot(column[one.id], generation[one.id])
        if one.parent is not None:
            px, py = _spot(column[one.parent], generation[one.parent])
            bow = f"C{px:.0f} {y - 14:.0f} {x:.0f} {py + 14:.0f} {x:.0f} {y - 11:.0f}"
            parts.append(f'<path class="kin" d="M{px:.0f} {py + 11:.0f}{bow}"/>')
    for one in individuals:
        x, y = _spot(column[one.id], generation[one.id])
        known = values.get(one.id)
        share = 0.0 if known is None or highest <= lowest else (known - lowest) / (highest - lowest)
        text = f"network {one.id}: {', '.join(map(str, one.morphs)) or 'seed'}"
        accuracy = "no value" if known is None else f"validation accuracy {known:.4f}"
        kind = "unknown" if known is None else ("best" if known == highest else "known")
        fill = "none" if known is None else f"color-mix(in srgb, var(--accent) {15 + 85 * share:.0f}%, var(--paper))"
        ink = "var(--paper)" if share > 0.5 else "var(--ink)"
        parts.append(
            f'<a href="#network-{one.id}"><title>{escape(text)}; {accuracy}</title>'
            f'<circle class="{kind}" cx="{x:.0f}" cy="{y:.0f}" r="11" style="fill:{fill}"/>'
            f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" style="fill:{ink}">{one.id}</text></a>'
        )
    height = (max(generation.values(), default=0) + 1) * _TREE_Y
    return _svg(max(used, 1) * _TREE_X, height, title, parts)


def _leaf_order(identity: int, individuals: Sequence[Individual]) -> tuple[int, ...]:
    line = [identity]
    while (parent := individuals[line[-1]].parent) is not None:
        line.append(parent)
    return tuple(reversed(line))


def _spot(column: float, generation: int) -> tuple[float, float]:
    return (column + 0.5) * _TREE_X, (generation + 0.5) * _TREE_Y


def draw_workers(
    trials: Sequence[TrialRecord], epochs: Sequence[EpochRecord], workers: int, until_s: float, title: str
) -> str:
    """Draw one line per worker: training, evaluating, and idle time."""
    if until_s <= 0:
        return ""
    width = 920
    scale = (width - 70) / until_s
    where = {(record.trial, record.attempt): record.worker for record in trials}
    parts = [
        f'<text class="dim" x="0" y="{worker * (_BAR + 8) + 14}">worker {worker}</text>'
        f'<rect class="idle" x="70" y="{worker * (_BAR + 8)}" width="{width - 70}" height="{_BAR}"/>'
        for worker in range(workers)
    ]

    def bar(kind: str, worker: int, begun_s: float, seconds: float, label: str) -> None:
        parts.append(
            f'<rect class="{kind}" x="{70 + begun_s * scale:.2f}" y="{worker * (_BAR + 8)}"'
            f' width="{max(seconds * scale, 0.2):.2f}" height="{_BAR}"><title>{escape(label)}</title></rect>'
        )

    for epoch in epochs:
        worker = where[epoch.trial, epoch.attempt]
        label = f"trial {epoch.trial}, epoch {epoch.epoch}"
        bar("training", worker, epoch.begun_s, epoch.training_s, f"{label}: {quantity(epoch.training_s, 's')} training")
        begun = epoch.begun_s + epoch.training_s
        bar("evaluating", worker, begun, epoch.evaluating_s, f"{label}: {quantity(epoch.evaluating_s, 's')} evaluating")
    for record in trials:
        if record.ended_s is not None and record.held_out_s:
            begun = record.ended_s - record.held_out_s
            bar("evaluating", record.worker, begun, record.held_out_s, f"trial {record.trial}: held-out split")
    return _svg(width, workers * (_BAR + 8), title, parts)


def _svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img"'
        f' aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
