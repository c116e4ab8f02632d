"""Geometry of a search's drawings: networks, family tree, work of each worker (``search/search_drawing.html``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from accelmark.automl.controller.journal import SearchState
from accelmark.automl.model.layers import BatchNorm, Convolution, Dense, Layer, ReLU
from accelmark.automl.model.network import Network, infer_shapes, main_chain, skips
from accelmark.automl.records import Individual
from accelmark.spec.number_format import quantity


class Arc(NamedTuple):
    """A skip from below row ``top`` to the middle of row ``bottom``, in a lane beside the layers."""

    lane: int
    top: int
    bottom: int
    is_concat: bool


@dataclass(frozen=True, slots=True)
class NetworkDrawing:
    """A network top to bottom: one row (text, shape) per layer of the main chain, and the skips."""

    rows: list[tuple[str, str]]
    arcs: list[Arc]


def draw_network(network: Network) -> NetworkDrawing:
    """Return the drawing of a network."""
    shapes, layers = infer_shapes(network), _layers(network)
    row_of = [0, *(row for row, (_, names) in enumerate(layers, start=1) for _ in names)]
    lanes: list[int] = []
    arcs: list[Arc] = []
    for skip in sorted(skips(network), key=lambda skip: skip.end - skip.start):
        top, bottom = row_of[skip.start], row_of[skip.end]
        lane = next((index for index, used in enumerate(lanes) if used <= top), len(lanes))
        lanes[lane : lane + 1] = [bottom]
        arcs.append(Arc(lane, top, bottom, skip.merge == "concat"))
    rows = [("image", network.input_shape), *((text, shapes[names[-1]]) for text, names in layers)]
    return NetworkDrawing([(text, "×".join(map(str, shape))) for text, shape in rows], arcs)


def _layers(network: Network) -> list[tuple[str, list[str]]]:
    """Return the layers of the main chain; batch norms and ReLUs are appended to the layer before."""
    rows: list[tuple[str, list[str]]] = []
    for name in main_chain(network):
        layer = network.by_name[name].layer
        if isinstance(layer, BatchNorm | ReLU) and rows:
            text, names = rows[-1]
            rows[-1] = (f"{text} + {'bn' if isinstance(layer, BatchNorm) else 'relu'}", [*names, name])
        else:
            rows.append((_layer_text(layer), [name]))
    return rows


def _layer_text(layer: Layer) -> str:
    match layer:
        case Convolution():
            stride = f" /{layer.stride}" if layer.stride > 1 else ""
            return f"conv {layer.kernel}×{layer.kernel} · {layer.filters}{stride}"
        case Dense():
            return f"dense · {layer.units}"
        case _:
            return layer.kind.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Relative:
    """A network in the family tree; ``share`` is its accuracy between the lowest (0) and the highest (1)."""

    id: int
    parent: int | None
    morphs: str
    column: float
    generation: int
    accuracy: float | None
    share: float
    is_best: bool


def draw_family(individuals: Sequence[Individual], values: Mapping[int, float]) -> list[Relative]:
    """Return the family tree: leaves are in consecutive columns, a parent is above the middle of its children."""
    lines: dict[int | None, tuple[int, ...]] = {None: ()}
    children: dict[int | None, list[int]] = defaultdict(list)
    for one in individuals:
        lines[one.id] = (*lines[one.parent], one.id)
        children[one.parent].append(one.id)
    leaves = sorted(line for line in lines.values() if line and line[-1] not in children)
    columns = {line[-1]: float(column) for column, line in enumerate(leaves)}
    for one in reversed(individuals):
        if one.id in children:
            below = [columns[child] for child in children[one.id]]
            columns[one.id] = (min(below) + max(below)) / 2
    lowest, highest = min(values.values(), default=0.0), max(values.values(), default=1.0)
    span = highest - lowest
    return [
        Relative(
            id=one.id,
            parent=one.parent,
            morphs=", ".join(map(str, one.morphs)) or "seed",
            column=columns[one.id],
            generation=len(lines[one.id]) - 1,
            accuracy=(accuracy := values.get(one.id)),
            share=(accuracy - lowest) / span if accuracy is not None and span > 0 else 0.0,
            is_best=accuracy == highest,
        )
        for one in individuals
    ]


class Bar(NamedTuple):
    """Work of one kind on a worker."""

    kind: str
    worker: int
    begun_s: float
    seconds: float
    label: str


def draw_workers(state: SearchState) -> Iterator[Bar]:
    """Yield the training and evaluation of every worker; the rest is idle time."""
    for epoch in state.epochs:
        worker = state.attempts[epoch.trial, epoch.attempt].worker
        label, trained_s, evaluated_s = (
            f"trial {epoch.trial}, epoch {epoch.epoch}",
            epoch.training_s,
            epoch.evaluating_s,
        )
        yield Bar("training", worker, epoch.begun_s, trained_s, f"{label}: {quantity(trained_s, 's')} training")
        evaluated = f"{label}: {quantity(evaluated_s, 's')} evaluating"
        yield Bar("evaluating", worker, epoch.begun_s + trained_s, evaluated_s, evaluated)
    for record in state.attempts.values():
        if record.ended_s is not None and record.held_out_s:
            begun_s, label = record.ended_s - record.held_out_s, f"trial {record.trial}: held-out split"
            yield Bar("evaluating", record.worker, begun_s, record.held_out_s, label)
