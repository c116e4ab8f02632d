"""Plan a search for the best settings of an inference case: what is tried, and the jobs of its trials."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from accelmark.plan.inference import engine_words
from accelmark.plan.plan import Plan, PlannedJob
from accelmark.results.figures import FigureName
from accelmark.spec.errors import RequestError
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.layers import Provenance, flatten, setting_defaults
from accelmark.spec.plugins.catalog import EngineSpec, engine_specs, find
from accelmark.spec.plugins.requirements import Need, missing
from accelmark.spec.settings.inference import InferPrecision, InferSettings, OptimizeFor, ScenarioName
from accelmark.spec.settings.tuning import OPTIONS, TUNING_LAYER, Choice, TrialRole, TuningSpec

_FIGURES: Final[Mapping[ScenarioName, FigureName]] = {
    "offline": FigureName.OFFLINE_RATE, "server": FigureName.SERVER_RATE,
    "single_stream": FigureName.SINGLE_STREAM_LATENCY, "multi_stream": FigureName.MULTI_STREAM_LATENCY,
}  # fmt: skip
"""LoadGen scenario -> the figure that is compared where it is the only one."""
_WITHOUT_SCENARIO: Final[Mapping[OptimizeFor, FigureName]] = {
    "throughput": FigureName.INFERENCE_CORE, "latency": FigureName.LATENCY_P50,
}  # fmt: skip
_BATCHES: Final = (0.25, 0.5, 1, 2, 4)
"""Batch sizes that are tried, as multiples of the case's own."""
_DURATION: Final = "inference_duration_s"
_ROUND_S: Final = 15.0
"""Value of this setting in the rounds of a search, which are many, unless it is given."""


class Budget(NamedTuple):
    """Limits of a search and where its result is written."""

    time_s: float | None
    num_trials: int | None
    settings_file: Path | None = None


def tuned_plan(plan: Plan, capabilities: Mapping[str, str], budget: Budget) -> Plan:
    """Return the plan of a search from the only job of ``plan``, on the cores of this machine that a rank may use.

    ``capabilities`` are of the device under test. Raises RequestError: there is nothing to search.
    """
    first = plan.jobs[0]
    settings = settings_of(first)
    if first.job.provenance[_DURATION].layer == "default":
        settings = settings.model_copy(update={_DURATION: min(_ROUND_S, settings.inference_duration_s)})
        first = _with_settings(first, settings, "--tune")
    if settings.compiler is None or settings.exist_compiler_path is not None:
        reason = "compiler is null" if settings.compiler is None else "exist_compiler_path names a compiled engine"
        raise RequestError(f"--tune searches settings of an engine, and {reason}")
    if len(settings.scenarios) > 1:
        raise RequestError("--tune compares one figure: name one scenario, or none")
    choices = tuple(choice for choice in _choices(first.job, settings, capabilities) if len(choice.values) > 1)
    if not choices:
        raise RequestError("--tune has nothing to try: every setting that it searches was given")
    rounds = max(first.job.key.repeat, 3)
    scenario = next(iter(settings.scenarios), None)
    figure = _FIGURES[scenario] if scenario else _WITHOUT_SCENARIO[settings.optimized_for]
    tuning = TuningSpec(
        figure=figure.value,
        better="lower" if figure.info.better == "lower" else "higher",
        budget_s=budget.time_s,
        max_trials=budget.num_trials,
        num_rounds=rounds,
        choices=choices,
        settings_file=budget.settings_file and budget.settings_file.expanduser().absolute(),
    )
    jobs = _rounds(first, "as shipped", first.directory.rpartition("/")[0], rounds)
    limit_s = plan.timeout_s or budget.time_s
    return plan.model_copy(update={"tuning": tuning, "jobs": jobs, "timeout_s": limit_s})


def with_trial(plan: Plan, settings: InferSettings) -> Plan:
    """Return ``plan`` with a job that tries ``settings``, before the other rounds of the settings as shipped."""
    shipped, number = plan.jobs[0], 1 + sum(job.job.role == "trial" for job in plan.jobs)
    base = f"{shipped.job.key.slug}-infer-trial{number:02d}-{engine_words(settings)}"
    trial = _rounds(_with_settings(shipped, settings), "trial", base, 1)
    return plan.model_copy(update={"jobs": (*plan.jobs[:number], *trial, *plan.jobs[number:])})


def with_tuned_rounds(plan: Plan, settings: InferSettings) -> Plan:
    """Return ``plan`` with rounds with ``settings``, each before a round with the settings as shipped or at the end."""
    assert plan.tuning is not None  # noqa: S101 - it is the plan of a search
    base = f"{plan.jobs[0].job.key.slug}-infer-tuned-{engine_words(settings)}"
    tuned = _rounds(_with_settings(plan.jobs[0], settings), "tuned", base, plan.tuning.num_rounds)
    begun = [job for job in plan.jobs if job.job.role == "trial" or job is plan.jobs[0]]
    others = [job for job in plan.jobs[1:] if job.job.role == "as shipped"]
    turns = [job for pair in zip(tuned, others, strict=False) for job in pair]
    return plan.model_copy(update={"jobs": (*begun, *turns, tuned[-1])})


def settings_of(job: PlannedJob) -> InferSettings:
    """Return the settings of a job of a search."""
    assert isinstance(job.job.work, InferJob)  # noqa: S101 - only inference is tuned
    return job.job.work.settings


def vendor_values(shipped: JobSpec, tuned: JobSpec) -> dict[str, Any]:
    """Return the settings of a vendor's file for this scale that makes the tuned settings the shipped ones."""
    scale = f"_{shipped.key.hardware}x{shipped.key.nnodes}x{shipped.key.nproc}.yaml"
    values: dict[str, Any] = {}
    for name, provenance in tuned.provenance.items():
        if provenance.layer != TUNING_LAYER and not provenance.layer.endswith(scale):
            continue
        before = shipped.provenance.get(name)
        weaker = before.value if before is not None else None
        if before is not None and before.layer.endswith(scale):
            weaker = before.replaced[-1][1] if before.replaced else setting_defaults(InferSettings).get(name)
        if provenance.value != weaker:
            values[name] = provenance.value
    return values


def _choices(job: JobSpec, settings: InferSettings, capabilities: Mapping[str, str]) -> Iterator[Choice]:
    """Yield what is searched; settings that the user gave are not."""
    given = {
        name
        for name, provenance in job.provenance.items()
        if provenance.layer != "default" and not provenance.layer.startswith(("cases/", "vendors/"))
    }
    declared, num_cores = engine_specs(find("vendors", job.vendor).path), len(os.sched_getaffinity(0))
    engines = {name: spec for name, spec in declared.items() if name == settings.compiler}
    if "compiler" not in given:
        engines |= {name: spec for name, spec in declared.items() if _is_usable(name, spec, settings, job)}
    yield Choice(
        values=tuple(
            {"compiler": name, "precision": precision}
            for name, spec in engines.items()
            for precision in spec.precisions or (settings.precision,)
            if (precision == settings.precision if "precision" in given else _computes(precision, job, capabilities))
        ),
        once=True,
    )
    for name, spec in engines.items():
        for setting, values in spec.tunes.items():
            latency_only = setting in (f"{OPTIONS}streams", "optimize_for") and settings.optimized_for == "latency"
            if setting not in given and not latency_only:
                yield Choice(values=tuple({setting: value} for value in values), engine=name)
    batches = sorted({max(1, round(settings.batch_size * factor)) for factor in _BATCHES})
    if "batch_size" not in given and settings.optimized_for == "throughput":
        yield Choice(values=tuple({"batch_size": size} for size in batches), ordered=True)
    if "threads" not in given and job.device_type == "cpu":
        threads = dict.fromkeys((settings.threads, max(1, num_cores // 2)))
        threads.pop(num_cores, None)
        yield Choice(values=tuple({"threads": number} for number in threads))


def _is_usable(name: str, spec: EngineSpec, settings: InferSettings, job: JobSpec) -> bool:
    """Return whether an engine is installed and can do the case's task."""
    needs = [Need(requirement=text, needed_by=f"engine {name}") for text in spec.requires_on(job.device_type, {})]
    is_able = spec.uses(job.key.nproc) and (spec.generates or not settings.generate_batches)
    is_iterative = isinstance(job.work, InferJob) and job.work.iterative
    return is_able and (spec.iterates or not is_iterative) and not missing(needs)


def _computes(precision: InferPrecision, job: JobSpec, capabilities: Mapping[str, str]) -> bool:
    """Return whether the device computes in a precision, as far as its chip or its capabilities show."""
    if precision in ("fp32", "int8", job.work.precision):
        return True
    if job.chip is not None:
        return getattr(job.chip.peaks, precision, None) is not None
    if job.device_type != "cpu":
        return True  # an unknown chip: a trial shows it
    return any(name.endswith(f"_{precision}") for name in capabilities)


def _rounds(job: PlannedJob, role: TrialRole, base: str, num_rounds: int) -> tuple[PlannedJob, ...]:
    key = job.job.key.model_copy(update={"repeat": num_rounds})
    numbers = range(1, num_rounds + 1)
    specs = [job.job.model_copy(update={"key": key, "round": number, "role": role}) for number in numbers]
    return tuple(job.model_copy(update={"directory": f"{base}/round{spec.round}", "job": spec}) for spec in specs)


def _with_settings(job: PlannedJob, settings: InferSettings, layer: str = TUNING_LAYER) -> PlannedJob:
    before = flatten(settings_of(job).model_dump(mode="json"))
    provenance = {}
    for name, value in flatten(settings.model_dump(mode="json")).items():
        old = job.job.provenance.get(name)
        if name in before and before[name] == value and old is not None:
            provenance[name] = old
            continue
        replaced = (*old.replaced, (old.layer, old.value)) if old is not None else ()
        provenance[name] = Provenance(value=value, layer=layer, replaced=replaced)
    work = job.job.work.model_copy(update={"settings": settings})
    return job.model_copy(update={"job": job.job.model_copy(update={"work": work, "provenance": provenance})})
