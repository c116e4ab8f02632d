"""Which morphs a network allows, and a seeded choice among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from accelmark.automl.counting import count
from accelmark.automl.graph import Convolution, Network, ReLU, Shape, infer_shapes, main_chain
from accelmark.automl.morphs.channels import channel_group, channel_leaders
from accelmark.automl.morphs.morph import MORPH_KINDS, Morph, MorphError, MorphKind
from accelmark.automl.morphs.structure import apply_morph, skip_stride

_TRIES: Final = 60
_DEEPEN_KERNEL: Final = 3


@dataclass(frozen=True, slots=True)
class MorphLimits:
    """How far morphs may go: beyond these a network would not fit or never finish.

    ``max_parameters`` and ``max_forward_operations`` (multiply-accumulates of one image, two operations
    each) bound the whole network; None leaves them open.
    """

    max_filters: int = 4096
    max_kernel: int = 7
    max_nodes: int = 1000
    max_parameters: int | None = None
    max_forward_operations: int | None = None

    def allow(self, network: Network) -> bool:
        """Tell whether the whole network keeps within the bounds."""
        if self.max_parameters is None and self.max_forward_operations is None:
            return True
        counted = count(network, "accelmark")
        return (self.max_parameters is None or counted.parameters <= self.max_parameters) and (
            self.max_forward_operations is None or counted.matrix_forward <= self.max_forward_operations
        )


@dataclass(frozen=True, slots=True)
class _Place:
    at: str
    to: str | None = None
    size: int = 0


class MorphChoices:
    """The morphs that one network allows, worked out once a kind and only when asked for."""

    def __init__(self, network: Network, limits: MorphLimits | None = None) -> None:
        self.network: Final = network
        self.limits: Final = limits or MorphLimits()
        self._shapes = infer_shapes(network)
        self._chain = main_chain(network)
        self._places: dict[MorphKind, tuple[_Place, ...]] = {}

    def places(self, kind: MorphKind) -> tuple[_Place, ...]:
        """Return where a morph of this kind can be made."""
        if kind not in self._places:
            self._places[kind] = tuple(self._found(kind))
        return self._places[kind]

    def draw(self, generator: np.random.Generator, kinds: Iterable[MorphKind]) -> tuple[Morph, Network]:
        """Draw a kind uniformly, then a place uniformly, and return the morph with the network it makes.

        Raises MorphError when the network allows no morph of these kinds.
        """
        open_kinds = list(dict.fromkeys(kinds))
        for _ in range(_TRIES):
            if not open_kinds:
                break
            kind = open_kinds[int(generator.integers(len(open_kinds)))]
            places = self.places(kind)
            if not places:
                open_kinds.remove(kind)
                continue
            place = places[int(generator.integers(len(places)))]
            morph = Morph(
                kind=kind,
                at=place.at,
                to=place.to,
                size=place.size,
                label=fresh_label(self.network),
                seed=int(generator.integers(2**31)),
            )
            try:
                child = apply_morph(self.network, morph)
            except MorphError:
                continue
            if self.limits.allow(child):
                return morph, child
        raise MorphError(f"{self.network.name!r} allows no further morph within the limits")

    def _found(self, kind: MorphKind) -> Iterator[_Place]:
        full = len(self.network.nodes) >= self.limits.max_nodes
        match kind:
            case "widen":
                return self._widenings()
            case "kernel-grow":
                return self._growths()
            case "deepen":
                return (_Place(name, size=_DEEPEN_KERNEL) for name in self._relus() if not full)
            case "add-skip" | "concat-skip":
                return iter(()) if full else self._skips()

    def _relus(self) -> list[str]:
        nodes = self.network.by_name
        return [name for name in self._chain if isinstance(nodes[name].layer, ReLU) and len(self._shapes[name]) == 3]

    def _widenings(self) -> Iterator[_Place]:
        leaders = channel_leaders(self.network)
        for name in self._chain:
            layer = self.network.by_name[name].layer
            if isinstance(layer, Convolution) and 2 * layer.filters <= self.limits.max_filters:
                try:
                    channel_group(self.network, name, leaders)
                except MorphError:
                    continue
                yield _Place(name, size=2 * layer.filters)

    def _growths(self) -> Iterator[_Place]:
        for name in self._chain:
            layer = self.network.by_name[name].layer
            if isinstance(layer, Convolution) and layer.kernel % 2 and layer.kernel + 2 <= self.limits.max_kernel:
                yield _Place(name, size=layer.kernel + 2)

    def _skips(self) -> Iterator[_Place]:
        relus, shapes = self._relus(), self._shapes
        fits: dict[tuple[Shape, Shape], bool] = {}
        for index, start in enumerate(relus):
            for end in relus[index + 1 :]:
                pair = (shapes[start], shapes[end])
                if pair not in fits:
                    fits[pair] = skip_stride(*pair) is not None
                if fits[pair]:
                    yield _Place(start, end)


def possible_morphs(network: Network, kind: MorphKind, limits: MorphLimits | None = None) -> tuple[Morph, ...]:
    """Return all morphs of one kind that the network allows, without labels and seeds, in order."""
    places = MorphChoices(network, limits).places(kind)
    return tuple(Morph(kind=kind, at=place.at, to=place.to, size=place.size) for place in places)


def random_morph(
    network: Network,
    generator: np.random.Generator,
    *,
    kinds: Iterable[MorphKind] = MORPH_KINDS,
    limits: MorphLimits | None = None,
) -> tuple[Morph, Network]:
    """Draw one morph (see ``MorphChoices.draw``) and return it with the network it makes."""
    return MorphChoices(network, limits).draw(generator, kinds)


def fresh_label(network: Network) -> str:
    """Return the first ``m<number>`` that no inserted node is named after yet."""
    used = {name.partition("_")[0] for name in network.by_name}
    number = 1
    while f"m{number}" in used:
        number += 1
    return f"m{number}"
