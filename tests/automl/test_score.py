"""Score, errors and rules, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from accelmark.automl.config import AutomlConfig, DatasetConfig, ScheduleConfig, SearchConfig
from accelmark.automl.journal import EpochEvent, SearchState, SessionBegan, TrialEvent
from accelmark.automl.records import EpochRecord, Hyperparameters, Individual, OperationCost, Splits, TrialRecord
from accelmark.automl.scoring import Scoreboard, regulated, utilisation, verdict
from accelmark.results.rounds.search import SearchVerdict
from accelmark.spec.rules import SearchRules, shipped_rules
from tests.automl.images import tiny_network

COST = OperationCost(forward=10, backward=20, evaluation=5, update=100)


def trial(number: int, started_s: float, ended_s: float | None, held_out: float | None = None) -> TrialRecord:
    return TrialRecord(
        trial=number,
        individual=number,
        round=1,
        attempt=1,
        worker=0,
        parent=None,
        morphs=(),
        hyperparameters=Hyperparameters(batch_size=8, learning_rate=0.1),
        tuned=False,
        weights="from-scratch",
        epochs_planned=2,
        cost=COST,
        parameters=25,
        started_s=started_s,
        ended_s=ended_s,
        status="finished" if ended_s is not None else "running",
        held_out_accuracy=held_out,
        held_out_s=1.0 if held_out is not None else 0.0,
    )


def epoch(number: int, begun_s: float, ended_s: float, accuracy: float | None, **changes: object) -> EpochRecord:
    fields: dict[str, object] = {
        "trial": number, "epoch": 1, "begun_s": begun_s, "ended_s": ended_s,
        "trained_images": 100, "evaluated_images": 20, "steps": 2,
        "training_s": (ended_s - begun_s) * 0.75, "evaluating_s": (ended_s - begun_s) * 0.25,
        "train_loss": 1.0, "validation_loss": 1.0, "validation_accuracy": accuracy, "complete": True,
    }  # fmt: skip
    return EpochRecord.model_validate(fields | changes)


def state(trials: list[TrialRecord], epochs: list[EpochRecord], workers: int = 2) -> SearchState:
    session = SessionBegan(
        at="2026-11-21T00:00:00+00:00",
        clock_s=0.0,
        monotonic_s=0.0,
        host="h",
        pid=1,
        experiment="e",
        dataset_fingerprint="f",
        dataset_identity="arrays",
        workers=workers,
        splits=Splits(training=100, validation=20, held_out=20, classes=4),
    )
    known = SearchState(sessions=[session], individuals=[Individual(id=0, network=tiny_network())] * 2)
    for one in trials:
        known.apply(TrialEvent(trial=one))
    for each in epochs:
        known.apply(EpochEvent(epoch=each))
    return known


FULL = 30 * 100 + 5 * 20 + 100 * 2
TRIALS = [trial(0, 100.0, 120.0, 0.7), trial(1, 105.0, 141.0, 0.6)]
EPOCHS = [epoch(0, 100.0, 110.0, 0.6), epoch(0, 110.0, 120.0, 0.8), epoch(1, 120.0, 140.0, 0.9)]
BOARD = Scoreboard(state(TRIALS, EPOCHS))


def test_the_score_is_operations_over_the_time_from_first_start_to_last_epoch() -> None:
    final = BOARD.final()
    assert final.operations == 3 * FULL
    assert final.score == pytest.approx(3 * FULL / 40)


def test_an_unfinished_epoch_counts_by_its_fraction() -> None:
    assert BOARD.at(115.0).operations == pytest.approx(1.5 * FULL)
    assert BOARD.at(130.0).operations == pytest.approx(2.5 * FULL)


def test_a_part_of_an_epoch_counts_the_images_really_processed() -> None:
    part = epoch(0, 0.0, 5.0, None, trained_images=7, evaluated_images=0, steps=1, complete=False)
    assert Scoreboard(state([trial(0, 0.0, 5.0)], [part])).final().operations == 30 * 7 + 100


def test_the_error_is_the_held_out_error_of_the_best_network_by_validation() -> None:
    final = BOARD.final()
    assert final.error == pytest.approx(0.4)
    assert final.search_error == pytest.approx(0.1)
    early = BOARD.at(125.0)
    assert early.error == pytest.approx(0.3)
    assert early.search_error == pytest.approx(0.2)
    assert final.regulated_score == pytest.approx(-log(0.4) * final.score)
    assert final.regulated_search_score == pytest.approx(-log(0.1) * final.score)


def test_without_an_error_there_is_no_regulated_score() -> None:
    assert regulated(5.0, None) is None
    assert regulated(5.0, 0.0) is None
    assert BOARD.at(105.0).regulated_score is None


def test_the_series_is_sampled_and_ends_with_the_final_figures() -> None:
    points = BOARD.series(15.0)
    assert [point.time_h * 3600 for point in points] == pytest.approx([15.0, 30.0, 40.0])
    assert points[-1] == BOARD.final()
    assert Scoreboard(SearchState()).series(15.0) == ()


def test_idle_time_is_without_training_and_evaluation() -> None:
    used = utilisation(state(TRIALS, EPOCHS))
    assert used.available_s == pytest.approx(82)
    assert used.idle_share == pytest.approx(1 - 42 / 82)
    assert utilisation(SearchState()).idle_share is None
    running = [trial(0, 100.0, None), trial(1, 105.0, None)]
    assert utilisation(state(running, [])).idle_share is None, "no epoch has ended yet"


def test_the_epoch_that_a_worker_trains_is_not_idle_time() -> None:
    trials = [trial(0, 100.0, 120.0), trial(1, 100.0, None)]
    one_ended = utilisation(state(trials, [epoch(0, 100.0, 120.0, 0.6)]))
    assert (one_ended.available_s, one_ended.idle_share) == (40.0, 0.0)
    between = [epoch(0, 100.0, 120.0, 0.6), epoch(1, 104.0, 110.0, 0.6)]
    assert utilisation(state(trials, between)).idle_share == pytest.approx(4 / 40), "its start took 4 s"


def test_waiting_for_data_is_idle_time() -> None:
    used = utilisation(state(TRIALS, [one.model_copy(update={"data_wait_s": one.training_s / 2}) for one in EPOCHS]))
    assert used.idle_share == pytest.approx(1 - (42 - used.training_s / 2) / 82)


def judged(
    rules: str | SearchRules = "aiperf-v1",
    *,
    duration_s: float = 3600.0,
    precisions: tuple[str, ...] = ("bf16",),
    held_out: float | None = 0.71,
    search: float | None = 0.75,
    dataset: str = "imagenet",
    pretrained: bool = False,
    finished: bool = True,
    network: str = "resnet50",
    **changes: object,
) -> SearchVerdict:
    """The verdict on a search that was resumed once, with a trial for each precision."""
    status = "finished" if finished else "cut"
    trials = [
        trial(number, 0.0, duration_s, held_out).model_copy(update={"status": status, "precision": name})
        for number, name in enumerate(precisions or (None,))
    ]
    recorded = state(trials, [epoch(0, 0.0, duration_s, search)])
    session = recorded.sessions[0].model_copy(update={"dataset_identity": dataset})
    config = AutomlConfig(
        rules=rules,
        network=network,
        counting="aiperf-v1",
        schedule=ScheduleConfig(max_trials=3),
        search=SearchConfig(
            initial_weights=Path("weights.npz") if pretrained else None, morphs=("deepen", "widen", "add-skip")
        ),
        dataset=DatasetConfig.model_validate(changes),
    )
    return verdict(config, replace(recorded, sessions=[session, session]))


def test_a_run_within_the_rules_is_valid_with_disclosures() -> None:
    good = judged()
    assert (good.verdict, good.reasons) == ("VALID", ())
    text = " ".join(good.disclosures)
    assert "random weights" in text
    assert "25.0\u202f%" in text
    assert "interrupted" in text


def test_a_search_from_another_network_is_not_comparable_by_the_rules_of_aiperf() -> None:
    other = judged(network="small28")
    assert other.verdict == "OPEN"
    assert other.reasons == ("network is small28 (expected: network resnet50) [search-altered]",)


@pytest.mark.parametrize(
    ("broken", "kept", "message"),
    [
        ({"duration_s": 3599.9}, {"duration_s": 3600.0}, "at least 3600 s"),
        ({"precisions": ("fp8",)}, {"precisions": ("fp16",)}, "at least 16 bits"),
        ({"precisions": ("bf16", "int8")}, {"precisions": ("bf16", "tf32")}, "int8"),
        ({"held_out": 0.70}, {"held_out": 0.7001}, "held-out accuracy above 0.70"),
        ({"held_out": 0.60, "search": 0.9}, {"search": 0.6}, "held-out accuracy is 0.6000"),
        ({"dataset": "a part of imagenet (5 training and 2 held-out images)"}, {}, "a part of imagenet"),
        ({"limit": 10}, {"pretrained": True}, "'imagenet (a part of it)' (expected: data set imagenet"),
        ({"finished": False}, {"finished": True}, "no trial finished"),
    ],
)
def test_each_rule_of_aiperf_v1_fires_alone_and_not_at_its_edge(
    broken: dict[str, Any], kept: dict[str, Any], message: str
) -> None:
    reasons = judged(**broken).reasons
    assert len(reasons) == 1
    assert message in reasons[0]
    assert judged(**kept).verdict == "VALID"


def test_smoke_asks_for_a_finished_trial_and_a_real_precision_only() -> None:
    little: dict[str, Any] = {"duration_s": 1.0, "held_out": 0.1, "dataset": "arrays", "pretrained": True}
    assert judged("smoke", **little).verdict == "VALID"
    assert judged("smoke", **little, finished=False).verdict == "INVALID"
    assert judged("smoke", **little, precisions=("fp8",)).verdict == "INVALID"
    shipped = shipped_rules(SearchRules, "searches")
    versions = {name: (rules.name, rules.version) for name, rules in shipped.items()}
    assert versions == {"aiperf-v1": ("aiperf-v1", 3), "smoke": ("smoke", 1)}


def test_a_search_is_judged_by_a_users_rules_and_names_them_with_their_hash() -> None:
    own = SearchRules(name="own", min_accuracy=0.8, pinned={"search.morphs": ["deepen", "widen", "add-skip"]})
    judged_by = judged(own)
    (reason,) = judged_by.reasons
    assert reason == "the held-out accuracy is 0.7100 (expected: held-out accuracy above 0.80) [search-accuracy]"
    assert judged_by.by_rules == f"rules own (version 1, SHA-256 {own.sha256[:12]})"
    assert judged(own, held_out=0.81).verdict == "VALID"


def test_an_unmeasured_figure_is_not_valid() -> None:
    reasons = judged(precisions=(), held_out=None, search=None).reasons
    assert "no precision was recorded" in " ".join(reasons)
    assert "no held-out accuracy was measured" in " ".join(reasons)
