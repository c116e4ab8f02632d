"""Which morphs a network allows, and a seeded choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from accelmark.automl.graph import Convolution, Network, ReLU, Shape, infer_shapes, main_chain
from accelmark.automl.morphs.channels import channel_group
from accelmark.automl.morphs.morph import MORPH_KINDS, Morph, MorphError, MorphKind
from accelmark.automl.morphs.structure import apply_morph, skip_stride

_TRIES: Final = 40
_DEEPEN_KERNEL: Final = 3


@dataclass(frozen=True, slots=True)
class MorphLimits:
    """How far morphs may go: beyond these a network would not fit or never finish."""

    max_filters: int = 4096
    max_kernel: int = 7
    max_nodes: int = 1000


def possible_morphs(
    network: Network, kind: MorphKind, limits: MorphLimits | None = None
) -> tuple[Morph, ...]:
    """Return all morphs of one kind that the network allows, without labels and seeds, in order."""
    bounds = limits or MorphLimits()
    if len(network.nodes) >= bounds.max_nodes and kind in ("deepen", "add-skip", "concat-skip"):
        return ()
    shapes = infer_shapes(network)
    chain = main_chain(network)
    relus = [
        name for name in chain if isinstance(network.by_name[name].layer, ReLU) and len(shapes[name]) == 3
    ]
    match kind:
        case "deepen":
            return tuple(Morph(kind=kind, at=name, size=_DEEPEN_KERNEL) for name in relus)
        case "widen":
            return tuple(_widenings(network, chain, bounds))
        case "kernel-grow":
            return tuple(_growths(network, chain, bounds))
        case "add-skip" | "concat-skip":
            return tuple(_skip_choices(kind, relus, shapes))


def _widenings(network: Network, chain: Iterable[str], limits: MorphLimits) -> Iterator[Morph]:
    for name in chain:
        layer = network.by_name[name].layer
        if isinstance(layer, Convolution) and 2 * layer.filters <= limits.max_filters:
            try:
                channel_group(network, name)
            except MorphError:
                continue
            yield Morph(kind="widen", at=name, size=2 * layer.filters)


def _growths(network: Network, chain: Iterable[str], limits: MorphLimits) -> Iterator[Morph]:
    for name in chain:
        layer = network.by_name[name].layer
        if isinstance(layer, Convolution) and layer.kernel % 2 and layer.kernel + 2 <= limits.max_kernel:
            yield Morph(kind="kernel-grow", at=name, size=layer.kernel + 2)


def _skip_choices(kind: MorphKind, relus: list[str], shapes: Mapping[str, Shape]) -> Iterator[Morph]:
    for index, start in enumerate(relus):
        for end in relus[index + 1 :]:
            if skip_stride(shapes[start], shapes[end]) is not None:
                yield Morph(kind=kind, at=start, to=end)


def fresh_label(network: Network) -> str:
    """Return the first ``m<number>`` that no inserted node is named after yet."""
    used = {name.partition("_")[0] for name in network.by_name}
    number = 1
    while f"m{number}" in used:
        number += 1
    return f"m{number}"


def random_morph(
    network: Network,
    generator: np.random.Generator,
    *,
    kinds: Iterable[MorphKind] = MORPH_KINDS,
    limits: MorphLimits | None = None,
) -> tuple[Morph, Network]:
    """Draw a kind uniformly, then a place uniformly, and return the morph with the network it makes.

    Raises MorphError when the network allows no morph of these kinds any more.
    """
    open_kinds = list(dict.fromkeys(kinds))
    for _ in range(_TRIES):
        if not open_kinds:
            break
        kind = open_kinds[int(generator.integers(len(open_kinds)))]
        choices = possible_morphs(network, kind, limits)
        if not choices:
            open_kinds.remove(kind)
            continue
        drawn = choices[int(generator.integers(len(choices)))]
        morph = drawn.model_copy(
            update={"label": fresh_label(network), "seed": int(generator.integers(2**31))}
        )
        try:
            return morph, apply_morph(network, morph)
        except MorphError:
            continue
    raise MorphError(f"{network.name!r} allows no further morph of the kinds {', '.join(kinds)}")
