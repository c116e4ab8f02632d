"""Plan training, by AccelMark's own loop or by another project's trainer."""

from __future__ import annotations

from accelmark.plan.request import KeyRequest, PlannedWork
from accelmark.spec.catalog import folders, load_case, load_trainer
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.layers import Layer, resolve
from accelmark.spec.work import ExternalJob, TrainingWork, TrainJob


def plan_training(request: KeyRequest) -> PlannedWork:
    """Merge the training settings of a key, and find its data."""
    key, case, train = request.key, request.case, request.case.train
    if train is None:
        trainable = [name for name in folders("cases") if load_case(name).train is not None]
        what = f"the case {key.model!r} has no training side; those that have: {', '.join(trainable)}"
        raise SpecError([Problem(request.where, str(key), what)])
    trainer = load_trainer(key.framework) if key.framework in folders("trainers") else None
    if trainer is None and not (request.folder.path / f"{key.framework}.py").is_file():
        present = [file.stem for file in request.folder.path.glob("*.py") if not file.stem.startswith(("_", "infer"))]
        what = f"the case {key.model!r} has no framework {key.framework!r}, and no external trainer has that name"
        raise SpecError([Problem(request.where, str(key), what, nearest(key.framework, [*present, *folders("trainers")]))])
    layers, files = request.vendor_layers("config")
    over = [*layers, Layer.of(request.where, request.request.settings), Layer("command line", request.command_line)]
    base = Layer.of(request.case_file, train.settings)
    resolved = resolve(base, over, mutable=train.mutable, is_open=request.is_open)
    settings = resolved.settings
    units = train.units_per_sample
    if train.units_per_sample_key is not None:
        units = int(str(settings.model[train.units_per_sample_key]))
    common = {
        "unit": train.unit,
        "units_per_sample": units,
        "target": train.target,
        "reference_loss": train.reference_loss,
        "min_repeats": train.min_repeats,
        "settings": settings,
    }
    work: TrainingWork
    if trainer is None:
        work = TrainJob(**common)
    else:
        work = ExternalJob(**common, trainer=trainer)
    return PlannedWork(
        work=work,
        directory=key.slug,
        data_dirs={} if settings.loader.synthetic else dict(request.data_dirs(case, request.request.data)),
        provenance=resolved.provenance,
        layer_files=files,
    )
