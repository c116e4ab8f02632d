"""Plan training by AccelMark's own loop or an external trainer, and how its model is spread over the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from accelmark.plan.request import KeyRequest, PlannedWork, require_task, vendor_layers
from accelmark.spec.errors import Problem, nearest
from accelmark.spec.job import ExternalJob, TrainJob
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import REFINES, Layer, Provenance, Resolved, resolve, setting_defaults
from accelmark.spec.parallelism import AXES, NAMES, Mesh, fitting, has_part
from accelmark.spec.plugins.case import TrainCaseSpec
from accelmark.spec.plugins.catalog import folders, frameworks_of, hooks_file, load_framework, load_trainer
from accelmark.spec.plugins.programs import TrainerSpec, placeholders
from accelmark.spec.settings.training import NEEDED_NAME, TrainSettings

_KEY = "parallelism"
_PIECES: Final = {"cp": 2}
"""Axis -> pieces of a size that a rank has, where it is not one: two chunks of a sequence balance causal attention."""


def parallelism_problems(
    settings: TrainSettings, key: CaseKey, supported: Collection[str], splits: Mapping[str, tuple[str, ...]], where: str
) -> Iterator[Problem]:
    """Yield why the setting cannot be used.

    ``supported`` are the names and axes that the framework, or an external trainer, has; ``splits`` the settings under
    ``model`` that the degree of an axis divides, as the case declares them; ``where`` is the layer of the value.
    """
    mesh = settings.parallelism
    names = [name for name in NAMES if name in supported]
    axes = [name for name in supported if name not in NAMES]
    able = ", ".join(names) + (f", or a mesh of {', '.join(axes)}" if axes else "")
    if not isinstance(mesh, Mesh):
        if mesh not in supported:
            yield Problem(where, _KEY, f"{mesh} is refused by {key.framework}", f"it supports {able}")
        return
    for axis, degree in mesh.degrees().items():
        if degree == 1:
            continue
        if axis not in supported:
            yield Problem(where, _KEY, f"{axis}={degree} is refused by {key.framework}", f"it supports {able}")
        elif axis != "fsdp" and axis not in splits:
            hint = f"its axes: {', '.join(['dp', 'fsdp', *splits])}"
            yield Problem(where, _KEY, f"the case {key.model!r} cannot be split by {axis}", hint)
        else:
            pieces = _PIECES.get(axis, 1)
            sizes = {name: int(str(settings.model[name])) for name in splits.get(axis, ())}
            if wrong := [f"model.{name} {size}" for name, size in sizes.items() if size % (degree * pieces)]:
                divisible = {name: size // pieces if size % pieces == 0 else 1 for name, size in sizes.items()}
                fits = ", ".join(map(str, fitting(key.world_size, divisible)))
                what = f"{axis}={degree}" + (f" ({pieces} pieces a rank)" if pieces > 1 else "")
                yield Problem(where, _KEY, f"{what} does not divide {', '.join(wrong)}", f"{axis} that fits: {fits}")
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
    """Yield settings of ``layers`` in a section that needs another value, such as ZeRO settings without ZeRO."""
    for key, origin in provenance.items():
        needed, parallelism = REFINES.get(key.partition(".")[0]), provenance[_KEY].value
        if needed is not None and not has_part(parallelism, needed) and origin.layer in layers:
            hint = f"set {_KEY}={needed}" + ("=2, for example" if needed in AXES else "")
            yield Problem(origin.layer, key, f"applies to {_KEY} {needed}, found {parallelism}", hint)


_NOT_PASSED: Final = frozenset({"threads", "log_every_steps"})
"""Settings that need not be passed to an external trainer: AccelMark applies them, or they do not apply."""
_OF_CASE: Final = ("unit", "units_per_sample", "target", "reference_loss", "min_repeats", "made_up_data")
"""Fields of a job that are the case's."""


def plan_training(request: KeyRequest) -> PlannedWork:
    """Merge the training settings of a key, and find its data."""
    key, run, case = request.key, request.run, require_task(request, "train", request.case.train)
    trainer = load_trainer(key.framework) if key.framework in folders("trainers") else None
    is_known = trainer is not None or key.framework in frameworks_of(request.case)
    if not is_known:
        what = f"the case {key.model!r} has no framework {key.framework!r}, and no trainer has that name"
        hint = nearest(key.framework, [*frameworks_of(request.case), *folders("trainers")])
        request.problems.append(Problem(request.where, str(key), what, hint))
    layers, files = vendor_layers(request.adaptations, run.vendor.name, key, request.capabilities, "config")
    base = Layer.of(request.case_file, case.settings_of(key.framework))
    rules = run.options.rules
    mutable, fixed_by = (case.mutable, "") if rules is None else (rules.mutable, f"rules {rules.name}")
    over = [*layers, *request.user_layers(run.command_line, {})]
    resolved = resolve(TrainSettings, base, over, mutable=mutable, is_open=run.options.open, fixed_by=fixed_by)
    settings, warnings = resolved.settings, []
    requires: dict[str, tuple[str, ...]] = {}
    if trainer is not None:
        request.problems.extend(_trainer_problems(request, case, trainer, resolved))
        fixed = [name for name, origin in resolved.provenance.items() if origin.layer == request.case_file]
        if ignored := [name for name in fixed if not trainer.passes(name) and name not in _NOT_PASSED]:
            warnings.append(f"{trainer.name} is not given {', '.join(ignored)}: its own values apply")
        requires = {f"trainer {trainer.name}": trainer.requires}
    elif is_known:
        request.problems.extend(_setting_problems(request, case, resolved))
        requires = load_framework(key.framework).needs_of(lambda name: resolved.provenance[name].value)
    common: dict[str, Any] = {name: getattr(case, name) for name in _OF_CASE} | {"settings": settings}
    if case.units_per_sample_key is not None:
        common["units_per_sample"] = int(str(settings.model[case.units_per_sample_key]))
    if rules is not None:
        common["target"] = rules.target_of(case.target)
    can_differ = not settings.loader.synthetic or (request.adaptation / "extern").is_dir()
    return PlannedWork(
        work=TrainJob(**common, is_checked=can_differ) if trainer is None else ExternalJob(**common, trainer=trainer),
        directory=key.slug,
        data_dirs={} if settings.loader.synthetic else dict(request.data_dirs(request.case, request.request.data)),
        provenance=resolved.provenance,
        layer_files=files,
        requires=requires,
        warnings=tuple(warnings),
    )


def _setting_problems(request: KeyRequest, case: TrainCaseSpec, resolved: Resolved[TrainSettings]) -> Iterator[Problem]:
    """Yield the combinations of settings that the framework, the device or the case does not support."""
    settings, provenance, framework = resolved.settings, resolved.provenance, request.key.framework
    spec, capabilities = load_framework(framework), request.capabilities
    for refused in spec.refused_settings:
        if refused.applies(lambda key: provenance[key].value, capabilities):
            for key in refused.when:
                if provenance[key].layer != "default":
                    what = f"{provenance[key].value} is refused by {framework}"
                    yield Problem(provenance[key].layer, key, what, refused.reason)
    yield from parallelism_problems(settings, request.key, spec.parallelism, case.mesh, provenance[_KEY].layer)
    yield from mesh_problems(settings, provenance)
    user = (request.where, "command line")
    yield from unused_settings(provenance, user)
    yield from without_effect(provenance, (request.case_file, *user))
    if (request.adaptation / "extern").is_dir() and hooks_file(framework) is None:
        what = f"{request.adaptation / 'extern'}: framework {framework} has no hooks to replace"
        yield Problem(request.where, str(request.key), what, "remove the folder")


def without_effect(provenance: Mapping[str, Provenance], layers: Sequence[str]) -> Iterator[Problem]:
    """Yield the settings of optimizer and schedule in ``layers``, weakest first, that the chosen one does not use."""
    for key, names in NEEDED_NAME.items():
        section, origin = key.partition(".")[0], provenance[key]
        chosen = provenance[f"{section}.name"]
        above = layers[layers.index(chosen.layer) :] if chosen.layer in layers else layers
        if origin.layer in above and chosen.value not in names:
            what = f"has no effect with the {section} {chosen.value}"
            yield Problem(origin.layer, key, what, f"it applies to {', '.join(names)}")


def _trainer_problems(
    request: KeyRequest, case: TrainCaseSpec, trainer: TrainerSpec, resolved: Resolved[TrainSettings]
) -> Iterator[Problem]:
    """Yield why the trainer cannot run the request."""
    key, where, provenance = request.key, f"trainer {trainer.name}", resolved.provenance
    if key.model not in trainer.cases:
        what = f"the trainer {trainer.name} has no arguments for the case {key.model!r}"
        yield Problem(request.where, str(key), what, f"it trains: {', '.join(trainer.cases)}")
    known = setting_defaults(TrainSettings)
    for name in trainer.settings:
        if name not in known and not name.startswith("model."):
            yield Problem(where, f"settings.{name}", "unknown setting", nearest(name, known))
    for setting, origin in provenance.items():
        is_changed = origin.layer not in (request.case_file, "default")
        if is_changed and not trainer.passes(setting) and setting not in _NOT_PASSED:
            hint = f"it is given: {', '.join(trainer.settings) or 'no setting'}"
            yield Problem(origin.layer, setting, f"the trainer {trainer.name} has no argument for it", hint)
    if trainer.passes("parallelism"):
        layer = provenance[_KEY].layer
        yield from parallelism_problems(resolved.settings, key, trainer.parallelism, case.mesh, layer)
    if not {"samples", "tokens"} & trainer.log.step_groups() and not trainer.passes("batch_size"):
        what = "is not passed on, and log.step has neither samples nor tokens: throughput would be unknown"
        yield Problem(where, "batch_size", what)
    known_names = {"setting": provenance, "data": request.case.data_names}
    for part in (trainer.command, trainer.resume, trainer.cases.get(key.model, ())):
        for name in placeholders(part):
            kind, _, named = name.partition(":")
            if named not in known_names.get(kind, (named,)):
                yield Problem(where, f"{{{name}}}", f"the case has no {kind} {named!r}")
