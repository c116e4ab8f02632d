"""Check a finished run against itself: its journal, its networks, its counts, its clock."""

from __future__ import annotations

from collections.abc import Iterable

from accelmark.automl.counting import count
from accelmark.automl.engine.journal import Chain, Event, Proposed, read_chain, read_journal
from accelmark.automl.engine.rundir import RunDirectory
from accelmark.automl.engine.state import RunState
from accelmark.automl.evidence import against_clock, against_data, against_request
from accelmark.automl.graph import Network, find_problems
from accelmark.automl.morphs import Morph, MorphError, apply_morph
from accelmark.automl.records import FAILURES, Hyperparameters, TrialRecord
from accelmark.automl.rules import judge, preset
from accelmark.automl.summary import JudgementRecord, facts_of
from accelmark.automl.trial.order import executed_network


class Verified(JudgementRecord):
    """A judgement with what was checked again."""

    checked: tuple[str, ...]


def verify_run(run: RunDirectory) -> Verified:
    """Recompute what can be recomputed and judge the run; a contradiction makes it INVALID.

    Raises RunError or JournalError when the run cannot be read.
    """
    config, events, chain = run.config(), read_journal(run.path), read_chain(run.path)
    state = RunState.folded(events)
    judged = judge(preset(config.rules), facts_of(config, state))
    broken = _broken_chain(chain)
    for record in state.attempts.values():
        network = state.individuals[record.individual].network
        broken.extend(_contradictions(record, network, state))
        counted = count(network, config.counting)
        latest = state.trials[record.trial].attempt == record.attempt
        stated = (record.cost.forward, record.cost.backward, record.cost.evaluation, record.cost.update)
        if latest and stated != (counted.forward, counted.backward, counted.evaluation, counted.update):
            broken.append(f"trial {record.trial}: its operations are not those of its network")
        if latest and record.flops_per_image not in (None, counted.matrix):
            broken.append(f"trial {record.trial}: the driver saw another matrix work than is counted")
    broken.extend(broken_lineage(events, state))
    broken.extend(against_data(config, state))
    broken.extend(against_clock(config, events, state))
    broken.extend(against_request(config, state))
    epochs = state.useful_epochs()
    total = sum(state.trials[epoch.trial].cost.of(epoch) for epoch in epochs)
    return Verified(
        rules=judged.rules,
        version=judged.version,
        verdict="INVALID" if broken or judged.reasons else "VALID",
        reasons=(*judged.reasons, *broken),
        disclosures=(*judged.disclosures, *_not_checked(state, chain)),
        checked=(
            f"{len(state.trials)} trials and {len(epochs)} epochs read; {total} operations counted again",
            f"{len(state.individuals)} networks rebuilt from their parents",
            f"{chain.lines - chain.unhashed} of {chain.lines} lines of the journal carry the hash of the one before",
        ),
    )


def _broken_chain(chain: Chain) -> list[str]:
    match chain.broken:
        case None:
            return []
        case 1:
            return ["line 1 of the journal does not follow from the configuration and the network: they were changed"]
        case line:
            return [
                f"line {line} of the journal does not follow from line {line - 1}: one of them was changed, or lines"
                " were put in or taken out between them"
            ]


def _not_checked(state: RunState, chain: Chain) -> list[str]:
    told: list[str] = []
    if any(session.splits is None for session in state.sessions):
        told.append(
            "an older version wrote the journal and did not say how the data are split: images, steps and accuracies"
            " could not all be held against the data"
        )
    if chain.unhashed:
        what = "no line" if chain.unhashed == chain.lines else f"none of the first {chain.unhashed} lines"
        told.append(f"{what} of the journal carries a hash of the one before: a change there leaves no trace")
    return told


def _contradictions(record: TrialRecord, network: Network, state: RunState) -> list[str]:
    found: list[str] = []
    if find_problems(network):
        found.append(f"trial {record.trial}: its network cannot be built")
    epochs = [epoch for epoch in state.epochs if (epoch.trial, epoch.attempt) == (record.trial, record.attempt)]
    recorded = sum(epoch.trained_images for epoch in epochs)
    if record.status not in FAILURES and record.trained_images not in (None, recorded):
        found.append(
            f"trial {record.trial}: its epochs hold {recorded} images, the driver trained {record.trained_images}"
        )
    found.extend(
        f"trial {record.trial}, epoch {epoch.epoch}: more images than its steps hold"
        for epoch in epochs
        if epoch.steps * record.hyperparameters.batch_size < epoch.trained_images
    )
    return found


def broken_lineage(events: Iterable[Event], state: RunState) -> list[str]:
    """Follow every network from its parent's morphs, and through the hyperparameters that were written into it.

    A child is proposed while its parent may be given its hyperparameters, so it may come of any form that the parent
    had by then; each form must come of the one before by hyperparameters that a trial of it records.
    """
    found: list[str] = []
    forms: dict[int, list[Network]] = {}
    tuned: dict[int, list[Hyperparameters]] = {}
    for record in state.attempts.values():
        tuned.setdefault(record.individual, []).append(record.hyperparameters)
    for event in events:
        if not isinstance(event, Proposed):
            continue
        one = event.individual
        if one.id in forms:
            last = forms[one.id][-1]
            if all(executed_network(last, hyper) != one.network for hyper in tuned.get(one.id, [])):
                found.append(f"network {one.id} is not what its trial's hyperparameters make")
        elif one.parent is not None and all(
            _morphed(parent, one.morphs) != one.network for parent in forms.get(one.parent, [])
        ):
            found.append(f"network {one.id} is not what its parent's morphs make")
        forms.setdefault(one.id, []).append(one.network)
    return found


def _morphed(network: Network, morphs: Iterable[Morph]) -> Network | None:
    try:
        for morph in morphs:
            network = apply_morph(network, morph)
    except MorphError:
        return None
    return network
