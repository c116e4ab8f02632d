"""Check how a model is to be spread over the ranks: by the framework, the case and the number of ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from accelmark.spec.errors import Problem
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import REFINES, Provenance
from accelmark.spec.parallelism import AXES, NAMES, Mesh, fitting, has_part
from accelmark.spec.settings.training import TrainSettings

_KEY = "parallelism"
_PIECES: Final = {"cp": 2}
"""Axis -> pieces of a size that a rank has, where it is not one: two chunks of a sequence balance causal attention."""


def parallelism_problems(
    settings: TrainSettings, key: CaseKey, supported: Collection[str], splits: Mapping[str, tuple[str, ...]], where: str
) -> Iterator[Problem]:
    """Yield why the setting cannot be used.

    Args:
        settings: of the job.
        key: of the job; a rank is a device.
        supported: names and axes that the framework, or an external trainer, has.
        splits: axis -> settings under ``model`` that its degree divides, as the case declares them.
        where: layer that set the value.
    """
    mesh = settings.parallelism
    if not isinstance(mesh, Mesh):
        if mesh not in supported:
            yield _refused(where, key, mesh, supported)
        return
    for axis, degree in mesh.degrees().items():
        if degree == 1:
            continue
        if axis not in supported:
            yield _refused(where, key, f"{axis}={degree}", supported)
        elif axis != "fsdp" and axis not in splits:
            able = ", ".join(["dp", "fsdp", *splits])
            yield Problem(where, _KEY, f"the case {key.model!r} cannot be split by {axis}", f"its axes: {able}")
        else:
            yield from _indivisible(settings, key, axis, degree, splits.get(axis, ()), where)
    try:
        mesh.sized(key.world_size)
    except ValueError as error:
        fits = ", ".join(map(str, fitting(key.world_size, {})))
        yield Problem(where, _KEY, f"{mesh} {error}", f"degrees that divide {key.world_size} ranks: {fits}")


def mesh_problems(settings: TrainSettings, provenance: Mapping[str, Provenance]) -> Iterator[Problem]:
    """Yield why AccelMark's own training cannot use a mesh; an external trainer has other rules."""
    mesh = settings.parallelism
    if not isinstance(mesh, Mesh):
        return
    if mesh.ep > 1 and mesh.ep != mesh.fsdp:
        what = f"ep={mesh.ep} spreads experts over the ranks of fsdp, found fsdp={mesh.fsdp}"
        yield Problem(provenance[_KEY].layer, _KEY, what, "ep that fits: the degree of fsdp")
    if mesh.cp > 1 and (mesh.pp > 1 or mesh.ep > 1):
        what = f"{mesh}: cp goes with dp, fsdp and tp, not with pp or ep"
        yield Problem(provenance[_KEY].layer, _KEY, what, "leave out cp, or pp and ep")
    fits, given = settings.microbatches_that_fit(mesh.pp), settings.pipeline.microbatches
    if mesh.pp == 1 or (given in fits if given is not None else fits):
        return
    accumulation = settings.gradient_accumulation_steps
    what = f"a step needs at least {mesh.pp} microbatches of equal size for {mesh.pp} stages, found "
    what += "" if given is None else f"microbatches {given}, "
    what += f"batch_size {settings.batch_size}, gradient_accumulation_steps {accumulation}"
    key = _KEY if given is None else "pipeline.microbatches"
    hint = f"pipeline.microbatches that fit: {', '.join(map(str, fits)) or 'none, the step has too few samples'}"
    yield Problem(provenance[key].layer, key, what, hint)


def unused_settings(provenance: Mapping[str, Provenance], layers: Collection[str]) -> Iterator[Problem]:
    """Yield settings of ``layers`` in a section that needs another value, such as ZeRO settings without ZeRO.

    A vendor's layers may set them for the runs that use the section.
    """
    for key, origin in provenance.items():
        needed, parallelism = REFINES.get(key.partition(".")[0]), provenance[_KEY].value
        if needed is not None and not has_part(parallelism, needed) and origin.layer in layers:
            hint = f"set {_KEY}={needed}" + ("=2, for example" if needed in AXES else "")
            yield Problem(origin.layer, key, f"applies to {_KEY} {needed}, found {parallelism}", hint)


def _indivisible(
    settings: TrainSettings, key: CaseKey, axis: str, degree: int, names: tuple[str, ...], where: str
) -> Iterator[Problem]:
    sizes, pieces = {name: int(str(settings.model[name])) for name in names}, _PIECES.get(axis, 1)
    wrong = [f"model.{name} {size}" for name, size in sizes.items() if size % (degree * pieces)]
    if wrong:
        divisible = {name: size // pieces if size % pieces == 0 else 1 for name, size in sizes.items()}
        fits = ", ".join(map(str, fitting(key.world_size, divisible)))
        what = f"{axis}={degree} " if pieces == 1 else f"{axis}={degree} ({pieces} pieces a rank) "
        yield Problem(where, _KEY, f"{what}does not divide {', '.join(wrong)}", f"{axis} that fits: {fits}")


def _refused(where: str, key: CaseKey, value: str, supported: Collection[str]) -> Problem:
    names = [name for name in NAMES if name in supported]
    axes = [name for name in supported if name not in NAMES]
    able = ", ".join(names) + (f", or a mesh of {', '.join(axes)}" if axes else "")
    return Problem(where, _KEY, f"{value} is refused by {key.framework}", f"it supports {able}")
