"""Rules about the training workload: data, precision, seeds and settings against the standard case."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from accelmark.audit.evidence import Evidence, Findings, RoundEvidence, Standard, deviation, for_each
from accelmark.results.schema import finding
from accelmark.spec.job import ExternalJob, TrainingWork
from accelmark.spec.layers import flatten, may_change
from accelmark.spec.log.events import Started
from accelmark.spec.plugins.case import TrainCaseSpec
from accelmark.spec.rules import RunRules, shipped_rules
from accelmark.spec.settings.training import TYPE_OF_PRECISION, TrainSettings


def one_model(evidence: Evidence) -> Findings:
    """Check that all rounds started from the same model."""
    for field in ("standard_parameter_hash", "standard_module_hash"):
        hashes = {getattr(started, field) for _, started in evidence.started_rounds()} - {None}
        if len(hashes) > 1:
            yield finding("error", "model-mismatch", "one model in all rounds", f"{len(hashes)} different models")


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
    if started.reduced_modes:
        actual = f"a switch of the framework was set: {'; '.join(started.reduced_modes)}"
        yield deviation(entry, "numeric-switches", f"{declared} ({required})", actual)


def seeds(evidence: Evidence) -> Findings:
    """Check that no two rounds have the same seed or the same losses, and that a vendor could not know the seed."""
    first_seeds: dict[int, int] = {}
    first_losses: dict[tuple[Any, ...], int] = {}
    for entry in evidence.succeeded:
        if entry.started is None:
            continue
        earlier = first_seeds.setdefault(entry.started.seed, entry.number)
        if earlier != entry.number:
            actual = f"the seed is that of round {earlier}"
            yield finding("error", "seeds", "a new seed in each round", actual, entry.number)
        if entry.job is not None and entry.job.has_vendors_code and entry.job.seed is None:
            expected = "a seed that is drawn when the round starts, where a vendor's code takes part"
            yield finding("open", "seeds", expected, "the run sets the seed", entry.number)
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
        verb = "was" if len(forced) == 1 else "were"
        what = f"{', '.join(forced)} {verb} overridden with --open" if forced else "started with --open"
        yield finding("open", "declared-open", "", f"{what}; not a closed result")
    elif forced:
        yield deviation(entry, "settings-changed", "changes of mutable settings only", f"changed: {', '.join(forced)}")
    rules = entry.job.rules if entry.job is not None else None
    if rules is not None and rules not in shipped_rules(RunRules, "runs").values():
        yield finding("open", "declared-open", "", f"by the user's rules {rules.title}; not a closed result")
    case = entry.reference.case
    if case is not None and case.spec.train is not None:
        yield from _against_case(entry, case.spec.train)


def case_known(evidence: Evidence) -> Findings:
    """Report that the settings were not compared because this machine does not have the case."""
    if evidence.rounds and evidence.reference.case is None:
        result = evidence.rounds[0].result
        case = f"{result.key.model!r} of version {result.case_version}"
        actual = f"not compared with its case: this machine has no case {case}"
        yield finding("warning", "case-unknown", "", actual)


def _against_case(entry: RoundEvidence, case: TrainCaseSpec) -> Findings:
    train = entry.job.work if entry.job is not None else None
    if not isinstance(train, TrainingWork):
        return
    rules = entry.job.rules if entry.job is not None else None
    for name in ("target", "reference_loss", "min_repeats", "made_up_data"):
        expected, actual = getattr(case, name), getattr(train, name)
        if name == "target" and rules is not None:
            expected = rules.target_of(expected)
        if name == "reference_loss" and actual is None and not entry.has_same_case:
            continue  # measured after the run; the rule case-changed reports that the case has changed
        if expected != actual:
            change = "" if name == "reference_loss" else f" from {expected} to {actual}"
            yield finding("error", "target", f"{name} of case.yaml", f"{name} was changed{change}")
    try:
        fixed = flatten(
            TrainSettings.model_validate(case.settings_of(entry.result.key.framework)).model_dump(mode="json")
        )
    except ValidationError:
        return
    forced = {name for name, setting in entry.result.settings.items() if setting.forced}
    mutable, changed = case.mutable if rules is None else rules.mutable, []
    for name, value in flatten(train.settings.model_dump(mode="json")).items():
        standard = fixed.get(name)
        if name == "seed" and isinstance(standard, int):
            standard += entry.number - 1
        if value != standard and not may_change(name, mutable) and name not in forced:
            changed.append(f"{name} is {value} instead of {standard}")
    if changed:
        yield deviation(entry, "settings-changed", "the settings of case.yaml", "; ".join(changed))
