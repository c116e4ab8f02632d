"""Plan training by AccelMark's own loop or an external trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from accelmark.plan.adaptation import vendor_layers
from accelmark.plan.parallelism import own_mesh_problems, parallelism_problems, unused_settings
from accelmark.plan.request import KeyRequest, PlannedWork, require_task
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.job import ExternalJob, TrainJob
from accelmark.spec.layers import Layer, Provenance, Resolved, resolve, setting_defaults
from accelmark.spec.plugins.catalog import folders, hooks_file, load_framework, load_trainer
from accelmark.spec.plugins.trainer import TrainerSpec, placeholders
from accelmark.spec.settings.training import NEEDED_NAME, TrainSettings

_NOT_PASSED: Final = frozenset({"threads", "log_every_steps"})
"""Settings that need not be passed to an external trainer: AccelMark applies them, or they do not apply."""
_COMMAND_LINE: Final = "command line"


def plan_training(request: KeyRequest) -> PlannedWork:
    """Merge the training settings of a key, and find its data."""
    key, run, train = request.key, request.run, require_task(request, "train", request.case.train)
    trainer = load_trainer(key.framework) if key.framework in folders("trainers") else None
    problems: list[Problem] = []
    if trainer is None and not (request.folder.path / f"{key.framework}.py").is_file():
        if key.framework in folders("frameworks"):
            load_framework(key.framework)  # what is wrong in its file is the first thing to correct
        present = [
            file.stem for file in request.folder.path.glob("*.py") if not file.stem.startswith(("_", "infer", "serve"))
        ]
        what = f"the case {key.model!r} has no framework {key.framework!r}, and no trainer has that name"
        problems.append(Problem(run.where, str(key), what, nearest(key.framework, [*present, *folders("trainers")])))
    layers, files = vendor_layers(request.adaptation, run.vendor.name, key, request.capabilities, "config")
    over = [*layers, Layer.of(run.where, request.request.settings), Layer(_COMMAND_LINE, run.command_line)]
    base = Layer.of(request.case_file, train.settings)
    try:
        resolved = resolve(base, over, mutable=train.mutable, is_open=run.options.open)
    except SpecError as error:
        raise SpecError([*problems, *error.problems]) from error
    if problems:
        raise SpecError(problems)
    settings = resolved.settings
    if trainer is None:
        _check_settings(request, resolved)
    units = train.units_per_sample
    if train.units_per_sample_key is not None:
        units = int(str(settings.model[train.units_per_sample_key]))
    common: dict[str, Any] = {"units_per_sample": units, "settings": settings}
    copied = "unit", "target", "reference_loss", "min_repeats", "made_up_data"
    common |= {name: getattr(train, name) for name in copied}
    can_differ = not settings.loader.synthetic or (request.adaptation / "extern").is_dir()
    return PlannedWork(
        work=TrainJob(**common, is_checked=can_differ) if trainer is None else ExternalJob(**common, trainer=trainer),
        directory=key.slug,
        data_dirs={} if settings.loader.synthetic else dict(request.data_dirs(request.case, request.request.data)),
        provenance=resolved.provenance,
        layer_files=files,
        requires=_requires(key.framework, settings, trainer),
        warnings=() if trainer is None else _check_trainer(request, trainer, resolved),
    )


def _check_settings(request: KeyRequest, resolved: Resolved[TrainSettings]) -> None:
    """Raise SpecError with all combinations of settings that the framework or the device does not support."""
    provenance, framework = resolved.provenance, request.key.framework
    spec, capabilities = load_framework(framework), request.capabilities.sources
    problems = [
        Problem(provenance[key].layer, key, f"{provenance[key].value} is refused by {framework}", refused.reason)
        for refused in spec.refused_settings
        if refused.applies(lambda key: provenance[key].value, capabilities)
        for key in refused.when
        if provenance[key].layer != "default"
    ]
    splits, where = require_task(request, "train", request.case.train).mesh, provenance["parallelism"].layer
    problems += parallelism_problems(resolved.settings, request.key, spec.parallelism, splits, where)
    problems += own_mesh_problems(resolved.settings, provenance)
    own = (request.run.where, _COMMAND_LINE)
    problems += (*unused_settings(provenance, own), *without_effect(provenance, (request.case_file, *own)))
    if (request.adaptation / "extern").is_dir() and hooks_file(framework) is None:
        what = f"{request.adaptation / 'extern'}: framework {framework} has no hooks to replace"
        problems.append(Problem(request.run.where, str(request.key), what, "remove the folder"))
    if problems:
        raise SpecError(problems)


def without_effect(provenance: Mapping[str, Provenance], layers: Sequence[str]) -> Iterator[Problem]:
    """Yield the settings of optimizer and schedule in ``layers``, weakest first, that the chosen one does not use.

    Those beneath the layer that chose it were meant for another one.
    """
    for key, names in NEEDED_NAME.items():
        section, origin = key.partition(".")[0], provenance[key]
        chosen = provenance[f"{section}.name"]
        above = layers[layers.index(chosen.layer) :] if chosen.layer in layers else layers
        if origin.layer in above and chosen.value not in names:
            what = f"has no effect with the {section} {chosen.value}"
            yield Problem(origin.layer, key, what, f"it applies to {', '.join(names)}")


def _requires(framework: str, settings: TrainSettings, trainer: TrainerSpec | None) -> dict[str, tuple[str, ...]]:
    if trainer is not None:
        return {f"trainer {trainer.name}": trainer.requires}
    name = str(settings.parallelism)
    return {f"parallelism {name}": load_framework(framework).parallelism_requires.get(name, ())}


def _check_trainer(request: KeyRequest, trainer: TrainerSpec, resolved: Resolved[TrainSettings]) -> tuple[str, ...]:
    """Return warnings about settings that the trainer is not given; raise SpecError if it cannot run the request."""
    problems = list(_trainer_problems(request, trainer, resolved))
    if problems:
        raise SpecError(problems)
    stated = [key for key, origin in resolved.provenance.items() if origin.layer == request.case_file]
    ignored = [key for key in stated if not trainer.passes(key) and key not in _NOT_PASSED]
    return (f"{trainer.name} is not given {', '.join(ignored)}: its own values apply",) if ignored else ()


def _trainer_problems(
    request: KeyRequest, trainer: TrainerSpec, resolved: Resolved[TrainSettings]
) -> Iterator[Problem]:
    key = request.key
    if key.model not in trainer.cases:
        what = f"the trainer {trainer.name} has no arguments for the case {key.model!r}"
        yield Problem(request.run.where, str(key), what, f"it trains: {', '.join(trainer.cases)}")
    known = setting_defaults(TrainSettings)
    for name in trainer.settings:
        if name not in known and not name.startswith("model."):
            yield Problem(f"trainer {trainer.name}", f"settings.{name}", "unknown setting", nearest(name, known))
    for setting, origin in resolved.provenance.items():
        changed = origin.layer not in (request.case_file, "default")
        if changed and not trainer.passes(setting) and setting not in _NOT_PASSED:
            hint = f"it is given: {', '.join(trainer.settings) or 'no setting'}"
            yield Problem(origin.layer, setting, f"the trainer {trainer.name} has no argument for it", hint)
    if trainer.passes("parallelism"):
        splits = require_task(request, "train", request.case.train).mesh
        where = resolved.provenance["parallelism"].layer
        yield from parallelism_problems(resolved.settings, key, trainer.parallelism, splits, where)
    if not {"samples", "tokens"} & trainer.log.step_groups() and not trainer.passes("batch_size"):
        what = "is not passed on, and log.step has neither samples nor tokens: throughput would be unknown"
        yield Problem(f"trainer {trainer.name}", "batch_size", what)
    for part in (trainer.command, trainer.resume, trainer.cases.get(key.model, ())):
        for name in placeholders(part):
            kind, _, named = name.partition(":")
            if kind == "setting" and named not in resolved.provenance:
                yield Problem(f"trainer {trainer.name}", f"{{{name}}}", "is no setting of this case")
            if kind == "data" and named not in request.case.data_names:
                yield Problem(f"trainer {trainer.name}", f"{{{name}}}", "is no data set of this case")
