"""Rules about rounds: registered, planned and complete, their workload against the case, target, duration and chip."""

from __future__ import annotations

import hashlib
import math
import operator
import re
import statistics
from collections.abc import Collection, Sequence
from typing import Any, Final

from accelmark.audit.evidence import Evidence, Findings, RoundEvidence, changed_settings, described_hardware, deviation
from accelmark.results.figures import FigureName
from accelmark.results.read.round_dir import ledger_events, planned_jobs, read_json
from accelmark.results.schema import Severity, finding
from accelmark.spec.job import ExternalJob, TrainingWork
from accelmark.spec.key import is_version
from accelmark.spec.log.records import REGISTRATION_FILE, Registration
from accelmark.spec.rules import RunRules, shipped_rules
from accelmark.spec.secret import LEFT_OUT
from accelmark.spec.settings.training import TYPE_OF_PRECISION, TrainSettings

MIN_TRAIN_S: Final = {"mini": 10.0, "standard": 60.0}
"""Raw training time from which throughput and energy are steady, by the size of a case."""

MIN_TIMED_S: Final = 1.0
"""Below this raw training time, start and end dominate, and a rate is not a measurement."""

_ONE_IN_1000: Final = {2: 318.3, 3: 22.33, 4: 10.21, 5: 7.173, 6: 5.893, 7: 5.208, 8: 4.785, 9: 4.501, 10: 4.297}
"""Number of values -> the quantile 0.999 of Student's t with one degree of freedom less."""

_EPOCHS_DIFFER: Final = 0.02
"""Largest accepted relative difference of two epochs' samples, since samples that fill no batch are left out."""

_MEASURED_TOLERANCE: Final = 1.05
"""Largest MFU against the probe's ceiling, which is a measurement too and may be slightly low."""

_SHARES_OF_PEAK: Final = {
    FigureName.MFU: "MFU", FigureName.PREFILL_MFU: "MFU of prefill", FigureName.DECODE_MFU: "MFU of decoding",
    FigureName.DECODE_MBU: "MBU of decoding",
}  # fmt: skip

_STATES: Final = {"lost": "was lost", "cancelled": "was cancelled", "timed_out": "timed out", "failed": "failed"}


def rounds_complete(evidence: Evidence) -> Findings:
    """Check that all planned rounds succeeded, and that they are as many as the case requires."""
    if not evidence.rounds:
        yield finding("error", "rounds-incomplete", "", "no round has a result")
        return
    for entry in evidence.rounds:
        state = entry.result.state
        if state != "succeeded":
            actual = f"round {entry.number} {_STATES.get(state, f'is {state}')}: {entry.result.reason}"
            yield finding("error", "rounds-incomplete", "", actual)
    num_missing = evidence.num_planned - len(evidence.rounds)
    if num_missing > 0:
        done = f"{len(evidence.succeeded)} of {evidence.num_planned} planned rounds succeeded"
        actual = f"{done}, {num_missing} {'has' if num_missing == 1 else 'have'} no result"
        yield finding("error", "rounds-incomplete", "", actual)
    required = max(entry.result.min_rounds for entry in evidence.rounds)
    if len(evidence.succeeded) < required:
        yield finding("error", "too-few-rounds", f"at least {required}", f"{len(evidence.succeeded)} rounds succeeded")


def planned_rounds(evidence: Evidence) -> Findings:
    """Check that the plan has the rounds that its key states, each with a different seed."""
    planned = planned_jobs(read_json(evidence.run_dir / "plan.json"))
    of_key = (job for name, job in planned.items() if name.split("/")[0] == evidence.slug)
    jobs = sorted(of_key, key=lambda job: int(job.get("round") or 0))
    if not jobs:
        return
    numbers = [job.get("round") for job in jobs]
    repeat = (jobs[0].get("key") or {}).get("repeat", 1)
    if numbers != list(range(1, repeat + 1)):
        actual = f"plan.json has the rounds {', '.join(map(str, numbers))}"
        yield finding("error", "rounds-not-planned", f"rounds 1 to {repeat}, as the key states", actual)
    works = [job.get("work") or {} for job in jobs]
    seeds = [(work.get("settings") or {}).get("seed") if work.get("kind") == "train" else None for work in works]
    expected = [seeds[0] + at for at in range(len(seeds))] if isinstance(seeds[0], int) else seeds
    if seeds != expected:
        yield finding("error", "rounds-not-planned", "consecutive seeds", f"seeds {', '.join(map(str, seeds))}")
    carried_out = dict.fromkeys(str(event["job"]) for event in ledger_events(evidence.run_dir) if event.get("job"))
    if others := [name for name in carried_out if name not in planned and name.split("/")[0] == evidence.slug]:
        actual = f"events.jsonl has {', '.join(others)}, which plan.json does not have"
        yield finding("error", "rounds-not-planned", "the rounds that were carried out", actual)


def registered(evidence: Evidence) -> Findings:
    """Check that the plan is the one that was registered, and list earlier runs of the same work."""
    file, entry = evidence.run_dir / "plan.json", Registration.stored(evidence.run_dir / REGISTRATION_FILE)
    if entry is None or not file.is_file():
        return
    plan = file.read_bytes()
    sha256 = hashlib.sha256(plan).hexdigest()
    if sha256 != entry.plan_sha256 and LEFT_OUT.encode() not in plan:  # bundling removes secrets from the plan
        expected = f"the plan that was registered before the start, hash {entry.plan_sha256[:12]}"
        yield finding("error", "plan-not-registered", expected, f"plan.json has hash {sha256[:12]}")
    if entry.number is None:
        yield finding("info", "run-registered", "", f"the run is in no registry: {entry.reason}")
    elif entry.earlier:
        listed = ", ".join(f"number {run.number} ({run.ended or 'no end'})" for run in entry.earlier[-5:])
        count = len(entry.earlier)
        actual = f"number {entry.number} in the registry; {count} earlier of the same work, the last: {listed}"
        yield finding("info", "run-registered", "", actual)


def target_reached(entry: RoundEvidence) -> Findings:
    """Check that each round reached the case's target; the rule ``reference-loss`` covers reference curves."""
    result, target, converged = entry.result, entry.result.target, entry.result.converged
    if target is None or "synthetic" in result.marks or result.value_of(FigureName.TIME_TO_TARGET) is not None:
        return
    goal = f"{target.metric} {target.direction.replace('_', ' ')} {target.value:g}"
    if converged is None:
        yield finding("error", "target-missed", goal, "not known: the weights were not evaluated after training")
    elif not converged:
        metric = result.figures[FigureName.FINAL_METRIC]
        why = f": {metric.reason}" if metric.value is None else ""
        yield finding("error", "target-missed", goal, f"the target was not reached{why}")


def plausible_convergence(entry: RoundEvidence) -> Findings:
    """Report rounds that end better, or reach the target earlier, than the case's reference training can."""
    train = entry.standard.spec.train if entry.standard is not None else None
    target, metric = entry.result.target, entry.result.value_of(FigureName.FINAL_METRIC)
    if train is None or target is None:
        return
    if metric is not None and len(train.calibration) > 1:
        mean, margin = statistics.fmean(train.calibration), _margin(train.calibration)
        if (metric - mean if target.direction == "at_least" else mean - metric) > margin:
            expected = f"{mean:.4g} within {margin:.2g}, as over {len(train.calibration)} seeds of the reference"
            actual = f"{target.metric} {metric:.4g} is better than the reference training allows"
            yield finding("open", "implausible-convergence", expected, f"{actual}: review how it was reached")
    # Evaluations are far apart: the reference may have passed the target right after the evaluation before. Epochs
    # differ by the samples that fill no batch.
    result, reference = entry.result, train.samples_to_target
    points = result.curves.get(target.metric, ())
    first = next((point.step for point in points if point.value is not None and target.reached(point.value)), None)
    if first is None or len(reference) < 2 or not result.num_steps:
        return
    steps = [0, *(point.step for point in points)]
    per_step, distance = result.num_samples / result.num_steps, max(map(operator.sub, steps[1:], steps))
    least = (1 - _EPOCHS_DIFFER) * statistics.fmean(reference) - _margin(reference) - distance * per_step
    if first * per_step < least:
        expected = f"more than {least:,.0f} samples, from {len(reference)} seeds of the reference"
        actual = f"{target.metric} {target.value:g} was reached after {first * per_step:,.0f} samples"
        why = "faster than the reference training allows: review how it was reached"
        yield finding("open", "implausible-convergence", expected, f"{actual}, {why}")


def _margin(values: Sequence[float]) -> float:
    """Return the distance from the mean that one further value of a normal distribution in 1,000 exceeds on a side."""
    reach = _ONE_IN_1000.get(len(values), _ONE_IN_1000[max(_ONE_IN_1000)])
    return reach * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))


def real_data(entry: RoundEvidence) -> Findings:
    """Check that real data was used, and that the evaluation used all of it."""
    if "synthetic" in entry.result.marks:
        actual = "synthetic data or weights: the result shows speed only"
        yield finding("error", "synthetic-data", "the case's data", actual)
    if "partial_evaluation" in entry.result.marks:
        yield finding("error", "partial-evaluation", "all evaluation data", "only part of the data was evaluated")


def enough_duration(entry: RoundEvidence) -> Findings:
    """Check that training took long enough for its rates to be meaningful."""
    took_s, least_s = entry.result.value_of(FigureName.RAW_TRAIN_TIME), MIN_TRAIN_S[entry.size]
    if took_s is None:
        return
    if took_s < MIN_TIMED_S:
        actual = f"training took {took_s:.2f} s, too short to be timed"
        yield finding("open", "too-short", f"at least {MIN_TIMED_S:g} s", actual)
    elif took_s < least_s:
        expected = f"at least {least_s:g} s for a {entry.size} case"
        yield finding("warning", "too-short", expected, f"training took {took_s:.1f} s")


def plausible_utilisation(entry: RoundEvidence) -> Findings:
    """Check that no round exceeds the chip's peak, or the ceiling that the probe measured."""
    for name, what in _SHARES_OF_PEAK.items():
        share = entry.result.value_of(name)
        if share is not None and share > 1:
            actual = f"{what} {share:.2f} exceeds the chip's peak: wrong chip or precision, or work was skipped"
            yield finding("error", "implausible-utilisation", "at most 1", actual)
    measured = entry.result.value_of(FigureName.MFU_MEASURED)
    if measured is not None and measured > _MEASURED_TOLERANCE:
        actual = f"MFU {measured:.2f} against the probe's ceiling: the probe was disturbed, probe again"
        yield finding("warning", "above-measured-ceiling", "at most 1", actual)


def not_resumed(entry: RoundEvidence) -> Findings:
    """Report rounds that were resumed from a checkpoint; the round itself reports that it was started again."""
    if "resumed" in entry.result.marks:
        actual = "the round was resumed: steps repeated after the checkpoint count as time"
        yield finding("warning", "resumed", "", actual)


def framework_version(entry: RoundEvidence) -> Findings:
    """Check that the framework has the version that the key names."""
    named, installed = entry.result.key.framework_version, entry.result.environment.started.get("framework_version")
    if named is not None and isinstance(installed, str) and not is_version(installed, named):
        yield deviation(entry, "framework-mismatch", f"version {named}, as in the key", f"ranks ran with {installed}")


def chip_identity(entry: RoundEvidence) -> Findings:
    """Check that the devices are the chip that the key names and whose peaks are used."""
    vendor, chip, started = entry.shipped_vendor, entry.result.chip, entry.started
    if vendor is None and chip is not None:
        is_known = bool(chip.key_names & described_hardware())
        actual = f"only the vendor {entry.result.vendor}, which AccelMark does not ship, describes this {chip.title}"
        expected = f"{chip.title} of AccelMark's own vendor" if is_known else "a chip whose peaks were reviewed"
        yield finding("error" if is_known else "open", "chip-mismatch", expected, actual)
    if vendor is not None and vendor.uses_host_cpu:
        models = ((host.get("cpu") or {}).get("model") for host in entry.result.environment.hosts)
        yield from _named_otherwise(entry, {vendor.name}, sorted({f"{model} (CPU)" for model in models if model}))
        return
    device = started.device_name if started is not None and started.device_type != "cpu" else None
    if device is None:
        return  # frameworks report no chip name for CPUs
    if chip is not None:
        if not chip.matches_name(device):
            yield finding("error", "chip-mismatch", chip.title, f"the device is {device!r}")
        return
    described = [known.key_names for known in vendor.chips if known.matches_name(device)] if vendor is not None else []
    if described:
        yield from _named_otherwise(entry, frozenset[str]().union(*described), [device])
    else:
        actual = f"vendor {entry.result.vendor} describes no chip {device!r}: its peaks are unknown"
        yield finding("warning", "chip-mismatch", "", actual)


def _named_otherwise(entry: RoundEvidence, names: Collection[str], devices: Sequence[str]) -> Findings:
    """Check that the key has one of ``names``, or words of a device's name (``EPYC``)."""
    hardware = entry.result.key.hardware
    if hardware.lower() in names or any(_words(hardware) <= _words(device) for device in devices):
        return
    severity: Severity = "error" if hardware.lower() in described_hardware() else "open"
    actual = f"the devices are {', '.join(devices) or 'CPUs'}"
    yield finding(severity, "chip-mismatch", f"{hardware}, as in the key", actual)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+|[0-9]+", name.lower()))


def one_model(evidence: Evidence) -> Findings:
    """Check that all rounds started from the same model."""
    for field in ("standard_parameter_hash", "standard_module_hash"):
        hashes = {getattr(entry.started, field, None) for entry in evidence.rounds} - {None}
        if len(hashes) > 1:
            yield finding("error", "model-mismatch", "one model in all rounds", f"{len(hashes)} different models")


def dataset(entry: RoundEvidence) -> Findings:
    """Check that the data has the case's fingerprint."""
    names = entry.job.data_dirs if entry.job is not None else ()
    if names and entry.data is None:
        yield finding("error", "dataset", "", "data.json is missing: the data was not recorded")
        return
    case = entry.standard
    of_case = case.spec.data if case else ()
    stated = {one.get("name"): one.get("fingerprint") for one in of_case if isinstance(one, dict)}
    for name in names:
        record = (entry.data or {}).get(name)
        declared = stated.get(name) or (record.declared if record is not None else None)
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


def precision(entry: RoundEvidence) -> Findings:
    """Check that the forward pass computed in the declared precision."""
    started = entry.started
    if started is None or entry.job is None or not isinstance(entry.job.work, TrainingWork):
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


def external_trainer(entry: RoundEvidence) -> Findings:
    """Check whether AccelMark evaluated the weights of an external trainer again; without that a result is OPEN."""
    work = entry.job.work if entry.job is not None else None
    again = entry.reevaluation is not None and entry.reevaluation.metrics is not None
    if isinstance(work, ExternalJob) and not again:
        actual = f"trained by {work.trainer.title}; its weights were not evaluated again"
        yield finding("open", "external-trainer", "weights evaluated again by AccelMark", actual)


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
    case, train = entry.standard, entry.job.work if entry.job is not None else None
    if case is None or case.spec.train is None or not isinstance(train, TrainingWork):
        return
    has_same_files = entry.job is not None and entry.job.case.sha256 == case.sha256
    for name in ("target", "reference_loss", "min_repeats", "made_up_data"):
        expected, actual = getattr(case.spec.train, name), getattr(train, name)
        if name == "target" and rules is not None:
            expected = rules.target_of(expected)
        if name == "reference_loss" and actual is None and not has_same_files:
            continue  # measured after the run; the rule case-changed reports that the case has changed
        if expected != actual:
            change = "" if name == "reference_loss" else f" from {expected} to {actual}"
            yield finding("error", "target", f"{name} of case.yaml", f"{name} was changed{change}")
    of_case = case.spec.train.settings_of(entry.result.key.framework)
    standard = {"seed": TrainSettings.model_fields["seed"].default} | of_case
    if isinstance(standard["seed"], int):
        standard["seed"] += entry.number - 1
    mutable = case.spec.train.mutable if rules is None else rules.mutable
    yield from changed_settings(entry, standard, train.settings, mutable)


def case_known(evidence: Evidence) -> Findings:
    """Report that the settings were not compared because this machine does not have the case."""
    if evidence.rounds and evidence.rounds[0].standard is None:
        result = evidence.rounds[0].result
        case = f"{result.key.model!r} of version {result.case_version}"
        yield finding("warning", "case-unknown", "", f"not compared with its case: this machine has no case {case}")
