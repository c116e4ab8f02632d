"""Apply a morph to a network: the structure alone, no weights."""

from __future__ import annotations

from accelmark.automl.graph import (
    Add,
    BatchNorm,
    Concat,
    Convolution,
    Network,
    NetworkError,
    Node,
    ReLU,
    Shape,
    find_problems,
    infer_shapes,
)
from accelmark.automl.morphs.channels import channel_group
from accelmark.automl.morphs.morph import Morph, MorphError


def apply_morph(network: Network, morph: Morph) -> Network:
    """Return the morphed network; raises MorphError when this network does not allow it."""
    if morph.at not in network.by_name:
        raise MorphError(f"{morph}: there is no node {morph.at!r}")
    match morph.kind:
        case "deepen":
            child = _deepened(network, morph)
        case "widen":
            child = _widened(network, morph)
        case "kernel-grow":
            child = _grown(network, morph)
        case "add-skip":
            child = _with_add_skip(network, morph)
        case "concat-skip":
            child = _with_concat_skip(network, morph)
    problems = find_problems(child)
    if problems:
        raise MorphError(f"{morph} does not fit: {NetworkError(problems)}")
    return child


def _convolution_at(network: Network, morph: Morph) -> Convolution:
    layer = network.by_name[morph.at].layer
    if not isinstance(layer, Convolution):
        raise MorphError(f"{morph}: {morph.at!r} is a {layer.kind}, not a convolution")
    return layer


def _deepened(network: Network, morph: Morph) -> Network:
    if not isinstance(network.by_name[morph.at].layer, ReLU) or morph.size % 2 == 0:
        raise MorphError(f"{morph}: deepening needs a ReLU and an odd kernel")
    channels = infer_shapes(network)[morph.at][0]
    convolution = Convolution(filters=channels, kernel=morph.size, padding=morph.size // 2)
    added = (
        Node(name=f"{morph.label}_conv", layer=convolution, inputs=(morph.at,)),
        Node(name=f"{morph.label}_bn", layer=BatchNorm(), inputs=(f"{morph.label}_conv",)),
        Node(name=f"{morph.label}_relu", layer=ReLU(), inputs=(f"{morph.label}_bn",)),
    )
    return network.inserted_after(morph.at, added, reads=f"{morph.label}_relu")


def _widened(network: Network, morph: Morph) -> Network:
    layer = _convolution_at(network, morph)
    if morph.size <= layer.filters:
        raise MorphError(f"{morph}: {layer.filters} filters are not fewer than {morph.size}")
    changes = {}
    for name in channel_group(network, morph.at):
        member = network.by_name[name].layer
        if isinstance(member, Convolution):
            changes[name] = member.model_copy(update={"filters": morph.size})
    return network.replaced(changes)


def _grown(network: Network, morph: Morph) -> Network:
    layer = _convolution_at(network, morph)
    extra = morph.size - layer.kernel
    if extra <= 0 or extra % 2:
        raise MorphError(f"{morph}: a kernel of {layer.kernel} grows by even steps")
    changed = layer.model_copy(update={"kernel": morph.size, "padding": layer.padding + extra // 2})
    return network.replaced({morph.at: changed})


def skip_stride(start: Shape, end: Shape) -> int | None:
    """Return the stride with which a 1x1 convolution takes ``start``'s picture to ``end``'s size, or None."""
    if len(start) != 3 or len(end) != 3:
        return None
    stride = -(-start[1] // end[1])
    fits = all((side - 1) // stride + 1 == wanted for side, wanted in zip(start[1:], end[1:], strict=True))
    return stride if fits else None


def _skip_ends(network: Network, morph: Morph) -> tuple[str, Shape, Shape, int]:
    if morph.to is None or morph.to not in network.by_name:
        raise MorphError(f"{morph}: there is no node {morph.to!r} to skip to")
    if network.position[morph.at] >= network.position[morph.to]:
        raise MorphError(f"{morph}: a skip goes forward")
    shapes = infer_shapes(network)
    start, end = shapes[morph.at], shapes[morph.to]
    stride = skip_stride(start, end)
    if stride is None:
        raise MorphError(f"{morph}: {start} cannot be brought to {end}")
    return morph.to, start, end, stride


def _with_add_skip(network: Network, morph: Morph) -> Network:
    to, start, end, stride = _skip_ends(network, morph)
    added: list[Node] = []
    last = morph.at
    if start != end:
        convolution = Convolution(filters=end[0], kernel=1, stride=stride)
        added.append(Node(name=f"{morph.label}_conv", layer=convolution, inputs=(last,)))
        last = added[-1].name
    added.append(Node(name=f"{morph.label}_bn", layer=BatchNorm(), inputs=(last,)))
    added.append(Node(name=f"{morph.label}_add", layer=Add(), inputs=(to, f"{morph.label}_bn")))
    return network.inserted_after(to, added, reads=f"{morph.label}_add")


def _with_concat_skip(network: Network, morph: Morph) -> Network:
    to, start, end, stride = _skip_ends(network, morph)
    if not isinstance(network.by_name[to].layer, ReLU):
        raise MorphError(f"{morph}: a concat skip joins after a ReLU")
    added: list[Node] = []
    last = morph.at
    if stride > 1:
        convolution = Convolution(filters=start[0], kernel=1, stride=stride)
        added.append(Node(name=f"{morph.label}_conv", layer=convolution, inputs=(last,)))
        last = added[-1].name
    added.append(Node(name=f"{morph.label}_concat", layer=Concat(), inputs=(to, last)))
    fuse = Convolution(filters=end[0], kernel=1, bias=True)
    added.append(Node(name=f"{morph.label}_fuse", layer=fuse, inputs=(f"{morph.label}_concat",)))
    added.append(Node(name=f"{morph.label}_relu", layer=ReLU(), inputs=(f"{morph.label}_fuse",)))
    return network.inserted_after(to, added, reads=f"{morph.label}_relu")
