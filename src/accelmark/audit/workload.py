"""Rules about the training workload: model, optimizer, data, precision and settings against the standard case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import ValidationError

from accelmark.audit.evidence import Evidence, Findings, RoundEvidence, Standard, deviation, for_each
from accelmark.results.schema import finding
from accelmark.spec.events import Started
from accelmark.spec.job import ExternalJob, TrainingWork
from accelmark.spec.layers import flatten, may_change
from accelmark.spec.plugins.case import TrainCaseSpec
from accelmark.spec.settings import TYPE_OF_PRECISION, TrainSettings

MAX_OUTPUT_DIFFERENCE: Final = 0.02
"""Largest relative difference of a vendor's model's outputs; rounding by TF32 and other kernels stays far below it."""
_WIDE_TYPES: Final = frozenset({"float32", "float64"})
_WIDER: Final = {"float8_e4m3fn": _WIDE_TYPES | {"bfloat16", "float16"}}
"""Types wider than a declared one where they are more than ``_WIDE_TYPES``."""
_UNRELATED: Final = 10.0
"""Relative difference from which a percentage is meaningless."""
_MAX_LISTED: Final = 3
_ALGORITHMS: Final = ("adamw", "adamax", "adafactor", "adagrad", "rmsprop", "adam", "lamb", "lars", "lion", "sgd")


def optimizer_kind(name: str) -> str:
    """Return the algorithm of an optimizer class: ``NpuFusedSGD`` and ``SGD`` are both ``sgd``."""
    lower = name.lower()
    return next((kind for kind in _ALGORITHMS if kind in lower), lower)


@for_each(Evidence.started_rounds)
def model_structure(entry: RoundEvidence, started: Started) -> Findings:
    """Check that the model has the parameters of the standard case."""
    standard = started.standard_parameter_hash
    if standard is not None and standard != started.parameter_hash:
        expected = f"the case's {started.standard_num_parameters:,} parameters, hash {standard[:12]}"
        actual = (
            f"hooks changed names, shapes or types of parameters: {started.num_parameters:,} parameters, "
            f"hash {started.parameter_hash[:12]}"
        )
        yield deviation(entry, "model-structure", expected, actual)


def one_model(evidence: Evidence) -> Findings:
    """Check that all rounds started from the same model."""
    for field in ("standard_parameter_hash", "standard_module_hash"):
        hashes = {getattr(started, field) for _, started in evidence.started_rounds()} - {None}
        if len(hashes) > 1:
            yield finding("error", "model-structure", "one model in all rounds", f"{len(hashes)} different models")


@for_each(Evidence.started_rounds)
def model_computation(entry: RoundEvidence, started: Started) -> Findings:
    """Check that the modules are the case's own, and that the outputs and the framework's functions are unchanged.

    A replaced module makes a run OPEN even where its outputs are equal: outputs in evaluation do not show what it
    computes in training.
    """
    difference = started.output_difference
    if started.num_replaced_modules:
        listed = _listed(started.replaced_modules, started.num_replaced_modules)
        actual = f"{started.num_replaced_modules} modules were replaced: {listed}"
        if difference is None:
            actual += "; their outputs were not compared"
        yield finding("open", "modules-replaced", "the case's modules", actual)
    if difference is not None and difference > MAX_OUTPUT_DIFFERENCE:
        by = "completely" if difference > _UNRELATED else f"by {difference:.1%}"
        actual = f"the model's outputs differ {by} from those of the case's model for the same samples"
        yield deviation(entry, "model-outputs", f"at most {MAX_OUTPUT_DIFFERENCE:.0%}", actual)
    after_training = entry.inspected.replaced_functions if entry.inspected is not None else ()
    if replaced := tuple(dict.fromkeys([*started.replaced_functions, *after_training])):
        actual = f"the vendor's code replaced functions: {_listed(replaced, len(replaced))}"
        yield deviation(entry, "framework-functions", "the framework's and AccelMark's functions", actual)
    if started.num_module_functions and entry.job is not None:
        module = entry.job.framework_module
        listed = _listed(started.module_functions, started.num_module_functions)
        actual = f"{module} replaced {started.num_module_functions} of the framework's functions: {listed}"
        if module is not None and entry.reference.module(entry.job.framework) == module:
            yield finding("info", "framework-module", "", actual)
        else:
            yield deviation(entry, "framework-functions", "the framework's functions", actual)


def _listed(names: Sequence[str], count: int) -> str:
    listed = names[:_MAX_LISTED]
    return "; ".join(listed) + (f" and {count - len(listed)} more" if count > len(listed) else "")


@for_each(Evidence.started_rounds)
def initial_weights(entry: RoundEvidence, started: Started) -> Findings:
    """Check that training started from the weights of the case."""
    standard, trained = started.checkpoint_hash, started.trained_checkpoint_hash
    if standard is not None and trained is not None and standard != trained:
        actual = f"hooks changed the initial weights: hash {trained[:12]}"
        yield deviation(entry, "initial-weights", f"hash {standard[:12]}", actual)


@for_each(Evidence.started_rounds)
def optimizer_type(entry: RoundEvidence, started: Started) -> Findings:
    """Check that the optimizer has the case's algorithm and hyperparameters."""
    standard, actual = started.standard_optimizer_class, started.optimizer_class
    if standard is None:
        return
    if optimizer_kind(standard) != optimizer_kind(actual):
        yield deviation(entry, "optimizer-type", standard, f"the optimizer is {actual}")
    elif standard != actual:
        yield finding("warning", "optimizer-type", standard, f"another implementation of the optimizer: {actual}")
    if started.optimizer_changes:
        what = f"hyperparameters of the optimizer were changed: {'; '.join(started.optimizer_changes)}"
        yield deviation(entry, "optimizer-numbers", "those of the settings", what)


@for_each(Evidence.succeeded_rounds)
def dataset(entry: RoundEvidence) -> Findings:
    """Check that the data has the case's fingerprint."""
    names = entry.job.data_dirs if entry.job is not None else ()
    if names and entry.data is None:
        yield finding("error", "dataset", "", "data.json is missing: the data was not recorded")
        return
    for name in names:
        record = (entry.data or {}).get(name)
        declared = _declared(entry.reference.case, name) or (record.declared if record is not None else None)
        if record is None:
            yield finding("error", "dataset", "", f"data.json does not list {name}")
        elif declared is not None and record.fingerprint != declared:
            yield deviation(entry, "dataset", declared[:12], f"{name} has fingerprint {record.fingerprint[:12]}")


def same_dataset(evidence: Evidence) -> Findings:
    """Check that the data is the same in all rounds."""
    first: dict[str, str] = {}
    for entry in evidence.succeeded:
        for name, record in (entry.data or {}).items():
            if first.setdefault(name, record.fingerprint) != record.fingerprint:
                yield finding("error", "dataset", "", f"{name} differs from an earlier round", entry.number)


def _declared(standard: Standard | None, name: str) -> str | None:
    """Return the fingerprint that the case states for a data set, if any."""
    entries = [entry for entry in standard.spec.data if isinstance(entry, dict)] if standard is not None else []
    stated = (entry.get("fingerprint") for entry in entries if entry.get("name") == name)
    return next((str(fingerprint) for fingerprint in stated if isinstance(fingerprint, str)), None)


@for_each(Evidence.started_rounds)
def precision(entry: RoundEvidence, started: Started) -> Findings:
    """Check that the forward pass computed in the declared precision."""
    if entry.job is None or not isinstance(entry.job.work, TrainingWork):
        return
    declared, required = entry.job.work.settings.precision, TYPE_OF_PRECISION[started.precision]
    if started.precision != declared:
        actual = f"the device does not support it: trained in {started.precision}"
        yield finding("warning", "precision", declared, actual)
    if started.compute_type is not None and required not in started.compute_type.split("+"):
        actual = f"the forward pass computed in {started.compute_type}"
        yield deviation(entry, "precision", f"{declared} ({TYPE_OF_PRECISION[declared]})", actual)
        return
    after_training = entry.inspected.reduced_modes if entry.inspected is not None else ()
    if modes := tuple(dict.fromkeys([*started.reduced_modes, *after_training])):
        actual = f"a switch of the framework was set: {_listed(modes, len(modes))}"
        yield deviation(entry, "numeric-switches", f"{declared} ({required})", actual)
    found = set(entry.inspected.compute_types or ()) if entry.inspected is not None else set()
    # A case may keep layers in a wider type, which costs the vendor time and is no advantage.
    if found and (required not in found or found - _WIDER.get(required, _WIDE_TYPES) - {required}):
        actual = f"in the inspected steps, layers computed in {', '.join(sorted(found))}"
        yield deviation(entry, "precision", f"{declared} ({required})", actual)


@for_each(Evidence.started_rounds)
def samples_trained(entry: RoundEvidence, started: Started) -> Findings:
    """Check that each inspected step passed as many samples through the model as it reported."""
    inspected = entry.inspected
    if entry.result.state != "succeeded":
        return
    seen = inspected.samples_seen if inspected is not None else None
    if inspected is not None and seen is not None and seen < (inspected.samples_credited or 0):
        actual = f"{seen} samples passed through the model in an inspected step"
        yield deviation(entry, "samples-trained", f"{inspected.samples_credited} per step and rank", actual)
        return
    replaced = sorted({"train_step", "backward"} & set(started.hooks))
    reason = "the ranks did not report it"
    if inspected is not None:
        reason = inspected.samples_reason or inspected.compute_reason or ""
    if replaced and reason:
        actual = f"the vendor replaced {' and '.join(replaced)}, and their samples could not be counted: {reason}"
        yield finding("open", "samples-trained", "", actual)


def seeds(evidence: Evidence) -> Findings:
    """Check that no two rounds have the same seed or the same losses."""
    first_seeds: dict[int, int] = {}
    first_losses: dict[tuple[Any, ...], int] = {}
    for entry in evidence.succeeded:
        if entry.started is None:
            continue
        earlier = first_seeds.setdefault(entry.started.seed, entry.number)
        if earlier != entry.number:
            actual = f"the seed is that of round {earlier}"
            yield finding("error", "seeds", "a new seed in each round", actual, entry.number)
        losses = tuple(point.value for point in entry.result.curves.get("loss", ()))
        if len(losses) > 1 and entry.started.checkpoint_hash is not None:
            earlier = first_losses.setdefault((entry.started.checkpoint_hash, losses), entry.number)
            if earlier != entry.number:
                actual = f"initial weights and all losses equal those of round {earlier}"
                yield finding("error", "seeds", "different rounds", actual, entry.number)


@for_each(Evidence.all_rounds)
def external_trainer(entry: RoundEvidence) -> Findings:
    """Check whether AccelMark evaluated the weights of an external trainer again; without that a result is OPEN."""
    work = entry.job.work if entry.job is not None else None
    again = entry.reevaluation is not None and entry.reevaluation.metrics is not None
    if isinstance(work, ExternalJob) and not again:
        actual = f"trained by {work.trainer.title}; its weights were not evaluated again"
        yield finding("open", "external-trainer", "weights evaluated again by AccelMark", actual)


@for_each(Evidence.all_rounds)
def settings(entry: RoundEvidence) -> Findings:
    """Check that the settings and the target that the case fixes are unchanged."""
    forced = sorted(name for name, setting in entry.result.settings.items() if setting.forced)
    if "open" in entry.result.marks:
        names = ", ".join(f"`{name}`" for name in forced)
        verb = "was" if len(forced) == 1 else "were"
        what = f"{names} {verb} overridden with --open" if forced else "started with --open"
        yield finding("open", "declared-open", "", f"{what}; not a closed result")
    elif forced:
        yield deviation(entry, "settings-fixed", "changes of mutable settings only", f"changed: {', '.join(forced)}")
    case = entry.reference.case
    if case is not None and case.spec.train is not None:
        yield from _against_case(entry, case.spec.train)


def case_known(evidence: Evidence) -> Findings:
    """Report that the settings were not compared because this machine does not have the case."""
    if evidence.rounds and evidence.reference.case is None:
        result = evidence.rounds[0].result
        case = f"{result.key.model!r} of version {result.case_version}"
        actual = f"not compared with its case: this machine has no case {case}"
        yield finding("warning", "case-known", "", actual)


def _against_case(entry: RoundEvidence, case: TrainCaseSpec) -> Findings:
    train = entry.job.work if entry.job is not None else None
    if not isinstance(train, TrainingWork):
        return
    for name in ("target", "reference_loss", "min_repeats"):
        expected, actual = getattr(case, name), getattr(train, name)
        if expected != actual:
            change = "" if name == "reference_loss" else f" from {expected} to {actual}"
            yield finding("error", "target", f"{name} of case.yaml", f"{name} was changed{change}")
    try:
        fixed = flatten(TrainSettings.model_validate(case.settings).model_dump(mode="json"))
    except ValidationError:
        return
    forced = {name for name, setting in entry.result.settings.items() if setting.forced}
    changed = []
    for name, value in flatten(train.settings.model_dump(mode="json")).items():
        standard = fixed.get(name)
        if name == "seed" and isinstance(standard, int):
            standard += entry.number - 1
        if value != standard and not may_change(name, case.mutable) and name not in forced:
            changed.append(f"{name} is {value} instead of {standard}")
    if changed:
        yield deviation(entry, "settings-fixed", "the settings of case.yaml", "; ".join(changed))
