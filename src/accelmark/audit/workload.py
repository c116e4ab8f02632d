"""Rules about the work that was done: the standard case's model, optimizer, data, precision and settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic import ValidationError

from accelmark.audit.evidence import Evidence, RoundEvidence, Standard, breach, finding
from accelmark.results.schema import Finding
from accelmark.spec.case import TrainCaseSpec
from accelmark.spec.events import Started
from accelmark.spec.layers import flatten, may_change
from accelmark.spec.settings import TYPE_OF_PRECISION, TrainSettings
from accelmark.spec.work import TrainingWork

MOST_APART: Final = 0.02
"""Largest relative difference of a vendor's model's outputs: TF32's and other kernels' rounding stay far below it."""
_WIDE: Final = frozenset({"float32", "float64"})
_WHOLLY: Final = 10.0
_SHOWN: Final = 3
_KINDS: Final = ("adamw", "adamax", "adafactor", "adagrad", "rmsprop", "adam", "lamb", "lars", "lion", "sgd")


def optimizer_kind(name: str) -> str:
    """Return the algorithm behind a class name, so that ``NpuFusedSGD`` and ``SGD`` are one kind."""
    lower = name.lower()
    return next((kind for kind in _KINDS if kind in lower), lower)


def model_structure(evidence: Evidence) -> Iterator[Finding]:
    """Check that the model has the parameters of the standard case, in every round."""
    for entry in evidence.rounds:
        started = entry.started
        if started is None:
            continue
        standard = started.standard_parameter_hash
        if standard is not None and standard != started.parameter_hash:
            expected = f"{started.standard_num_parameters:,} parameters as the case builds them, hash {standard[:12]}"
            actual = (
                f"the hooks left {started.num_parameters:,} parameters with other names, shapes or types, "
                f"hash {started.parameter_hash[:12]}"
            )
            yield breach("model-structure", expected, actual, entry)
    yield from _same(evidence, "model-structure", "standard_parameter_hash", "one model in all rounds")


def model_computation(evidence: Evidence) -> Iterator[Finding]:
    """Check that the modules, those without parameters too, are the case's own and compute what they did.

    A replaced module takes a run out of comparison even where it computes the same: whether it does so in training
    cannot be seen from its outputs in evaluation.
    """
    for entry in evidence.rounds:
        started = entry.started
        if started is None:
            continue
        apart = started.output_difference
        if started.num_replaced_modules:
            shown = "; ".join(started.replaced_modules[:_SHOWN])
            more = started.num_replaced_modules - min(_SHOWN, len(started.replaced_modules))
            actual = f"{started.num_replaced_modules} modules are others: {shown}" + (
                f" and {more} more" if more else ""
            )
            if apart is None:
                actual += "; what they compute was not compared"
            yield finding("open", "modules-replaced", "the case's own modules", actual, entry)
        if apart is not None and apart > MOST_APART:
            actual = f"of the same samples it computes something {_times(apart)} apart"
            yield breach("model-outputs", f"what the case's model computes, within {MOST_APART:.0%}", actual, entry)
        yield from _functions(evidence, entry, started)
    yield from _same(evidence, "model-structure", "standard_module_hash", "one model in all rounds")


def _functions(evidence: Evidence, entry: RoundEvidence, started: Started) -> Iterator[Finding]:
    later = entry.inspected.replaced_functions if entry.inspected is not None else ()
    replaced = tuple(dict.fromkeys([*started.replaced_functions, *later]))
    if replaced:
        more = f" and {len(replaced) - _SHOWN} more" if len(replaced) > _SHOWN else ""
        actual = f"the vendor's code replaced {'; '.join(replaced[:_SHOWN])}{more}"
        yield breach("framework-functions", "PyTorch's own functions and AccelMark's", actual, entry)
    if started.num_module_functions and entry.job is not None:
        module = entry.job.framework_module
        shown = "; ".join(started.module_functions[:_SHOWN])
        actual = f"{module} replaced {started.num_module_functions} of PyTorch's functions: {shown}"
        if evidence.shipped_module(entry.job.framework) == module:
            yield finding("info", "framework-module", "how this chip joins PyTorch", actual, entry)
        else:
            yield breach("framework-functions", "PyTorch's own functions", actual, entry)


def _times(apart: float) -> str:
    return "wholly" if apart > _WHOLLY else f"{apart:.1%}"


def initial_weights(evidence: Evidence) -> Iterator[Finding]:
    """Check that training began from the weights that the case gave."""
    for entry in evidence.rounds:
        started = entry.started
        if started is None or started.checkpoint_hash is None or started.trained_checkpoint_hash is None:
            continue
        if started.checkpoint_hash != started.trained_checkpoint_hash:
            actual = f"the hooks changed the weights to hash {started.trained_checkpoint_hash[:12]}"
            yield breach("initial-weights", f"hash {started.checkpoint_hash[:12]}", actual, entry)


def optimizer_type(evidence: Evidence) -> Iterator[Finding]:
    """Check that the optimizer is of the kind that the case uses, with its numbers."""
    for entry in evidence.rounds:
        started = entry.started
        if started is None or started.standard_optimizer_class is None:
            continue
        standard, actual = started.standard_optimizer_class, started.optimizer_class
        if optimizer_kind(standard) != optimizer_kind(actual):
            yield breach("optimizer-type", standard, f"the optimizer is {actual}", entry)
        elif standard != actual:
            yield finding("warning", "optimizer-type", standard, f"another implementation, {actual}", entry)
        if started.optimizer_changes:
            actual = f"the optimizer has other numbers: {'; '.join(started.optimizer_changes)}"
            yield breach("optimizer-numbers", "those of the settings", actual, entry)


def dataset(evidence: Evidence) -> Iterator[Finding]:
    """Check that the data was what the case declares, and the same in all rounds."""
    seen: dict[str, str] = {}
    for entry in evidence.good:
        if entry.job is None or not entry.job.data_dirs:
            continue
        if entry.data is None:
            yield finding("error", "dataset", "a record of the data (data.json)", "there is none", entry)
            continue
        for name in entry.job.data_dirs:
            record = entry.data.get(name)
            if record is None:
                yield finding("error", "dataset", f"a record of {name}", "data.json does not name it", entry)
                continue
            declared = _declared(evidence.standard, name) or record.declared
            if declared is not None and record.fingerprint != declared:
                actual = f"{name} has fingerprint {record.fingerprint[:12]}"
                yield breach("dataset", f"fingerprint {declared[:12]}", actual, entry)
            if seen.setdefault(name, record.fingerprint) != record.fingerprint:
                actual = f"{name} differs from that of an earlier round"
                yield finding("error", "dataset", "the same data in all rounds", actual, entry)


def _declared(standard: Standard | None, name: str) -> str | None:
    """Return the fingerprint that the case states in its own files, where it does."""
    if standard is None:
        return None
    for entry in standard.spec.data:
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get("fingerprint"), str):
            return str(entry["fingerprint"])
    return None


def precision(evidence: Evidence) -> Iterator[Finding]:
    """Check that the forward pass computed in the precision that was declared."""
    for entry in evidence.rounds:
        started = entry.started
        if started is None or entry.job is None or not isinstance(entry.job.work, TrainingWork):
            continue
        declared = entry.job.work.settings.precision
        if started.precision != declared:
            actual = f"it computed in {started.precision}, which the device has instead"
            yield finding("warning", "precision", declared, actual, entry)
        computed = started.compute_type.split("+") if started.compute_type is not None else None
        if computed is not None and TYPE_OF_PRECISION[started.precision] not in computed:
            actual = f"the forward pass computed in {started.compute_type}"
            yield breach("precision", f"{declared} ({TYPE_OF_PRECISION[declared]})", actual, entry)
            continue
        found = set(entry.inspected.compute_types or ()) if entry.inspected is not None else set()
        wanted = TYPE_OF_PRECISION[started.precision]
        # Layers that a case keeps in a wider type cost the vendor time, and change nothing.
        if found and (wanted not in found or found - _WIDE - {wanted}):
            actual = f"in the steps that were looked at, the model's layers computed in {', '.join(sorted(found))}"
            yield breach("precision", f"{declared} ({wanted})", actual, entry)


def work_done(evidence: Evidence) -> Iterator[Finding]:
    """Check that each step passed as many samples through the model as it is credited with, by a vendor's code too."""
    for entry in evidence.good:
        started, seen = entry.started, entry.inspected
        if started is None:
            continue
        if (
            seen is not None
            and (seen.samples_seen or 0) < (seen.samples_credited or 0)
            and seen.samples_seen is not None
        ):
            actual = f"{seen.samples_seen} went through the model in a step that was looked at"
            yield breach("samples-trained", f"{seen.samples_credited} samples a step and rank", actual, entry)
            continue
        own = sorted({"train_step", "backward"} & set(started.hooks))
        why = "the ranks told nothing of their steps" if seen is None else seen.samples_reason or seen.compute_reason
        if own and why is not None:
            actual = f"{' and '.join(own)} of the vendor's own, and what they do could not be counted: {why}"
            yield finding("open", "samples-trained", "steps whose samples and types can be seen", actual, entry)


def seeds(evidence: Evidence) -> Iterator[Finding]:
    """Check that no two rounds began from one seed, or with the same losses."""
    seen: dict[int, int] = {}
    curves: dict[tuple[Any, ...], int] = {}
    for entry in evidence.good:
        if entry.started is not None:
            earlier = seen.setdefault(entry.started.seed, entry.number)
            if earlier != entry.number:
                yield finding("error", "seeds", "a new seed each round", f"the seed of round {earlier} again", entry)
        losses = tuple(point.value for point in entry.result.curves.get("loss", ()))
        if len(losses) > 1 and entry.started is not None and entry.started.checkpoint_hash is not None:
            first = curves.setdefault((entry.started.checkpoint_hash, losses), entry.number)
            if first != entry.number:
                actual = f"the weights and every loss of round {first} again"
                yield finding("error", "seeds", "rounds that differ", actual, entry)


def settings(evidence: Evidence) -> Iterator[Finding]:
    """Check that what the case fixes is as it says, its target too."""
    standard = evidence.standard
    for entry in evidence.rounds:
        forced = sorted(name for name, setting in entry.result.settings.items() if setting.forced)
        if entry.is_open:
            changed = f": {', '.join(forced)}" if forced else ""
            yield finding(
                "open", "declared-open", "a run under the case's rules", f"the run was declared open{changed}", entry
            )
        elif forced:
            yield breach("settings-fixed", "only mutable settings changed", f"changed: {', '.join(forced)}", entry)
        if standard is not None and standard.spec.train is not None and entry.job is not None:
            yield from _against_case(entry, standard.spec.train)
    if evidence.rounds and standard is None:
        key = evidence.rounds[0].result
        actual = f"this machine has no case {key.key.model!r} of version {key.case_version}: not compared"
        yield finding("warning", "case-known", "the case, to compare the run with", actual)


def _against_case(entry: RoundEvidence, case: TrainCaseSpec) -> Iterator[Finding]:
    train = entry.job.work if entry.job is not None else None
    if not isinstance(train, TrainingWork):
        return
    if train.target != case.target:
        yield finding("error", "target", f"{case.target}", f"the job had {train.target}", entry)
    if train.reference_loss != case.reference_loss:
        yield finding("error", "target", "the reference loss of the case", "the job had another", entry)
    if train.min_repeats != case.min_repeats:
        yield finding("error", "target", f"{case.min_repeats} rounds", f"the job wanted {train.min_repeats}", entry)
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
        yield breach("settings-fixed", "what case.yaml fixes", "; ".join(changed), entry)


def _same(evidence: Evidence, rule: str, field: str, expected: str) -> Iterator[Finding]:
    values = {getattr(entry.started, field) for entry in evidence.rounds if entry.started is not None}
    if len(values - {None}) > 1:
        yield finding("error", rule, expected, f"{len(values - {None})} different ones")
