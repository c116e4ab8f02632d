"""Score, errors and rules, computed by hand; and journals that contradict their data, clock or configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import pytest

from accelmark.automl import journal
from accelmark.automl.config import AutomlConfig, DatasetConfig, ScheduleConfig, SearchConfig, TrainingConfig
from accelmark.automl.journal import EpochEvent, SearchDirectory, SearchState, SessionBegan, TrialEvent
from accelmark.automl.model.counting import count
from accelmark.automl.records import EpochRecord, Hyperparameters, Individual, OperationCost, Splits, TrialRecord
from accelmark.automl.scoring import Scoreboard, regulated, utilisation, verdict, verify_search
from accelmark.report.search_page import write_report
from accelmark.results.rounds.search import SearchVerdict
from accelmark.spec.errors import RunError
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


def test_the_score_is_operations_over_the_time_and_an_unfinished_epoch_counts_by_its_fraction() -> None:
    final = BOARD.final()
    assert final.operations == 3 * FULL
    assert final.score == pytest.approx(3 * FULL / 40)
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


def test_idle_time_is_without_training_and_evaluation_but_with_waiting_for_data() -> None:
    used = utilisation(state(TRIALS, EPOCHS))
    assert used.available_s == pytest.approx(82)
    assert used.idle_share == pytest.approx(1 - 42 / 82)
    waited = utilisation(state(TRIALS, [one.model_copy(update={"data_wait_s": one.training_s / 2}) for one in EPOCHS]))
    assert waited.idle_share == pytest.approx(1 - (42 - waited.training_s / 2) / 82)
    assert utilisation(SearchState()).idle_share is None
    running = [trial(0, 100.0, None), trial(1, 105.0, None)]
    assert utilisation(state(running, [])).idle_share is None, "no epoch has ended yet"


def test_the_epoch_that_a_worker_trains_is_not_idle_time() -> None:
    trials = [trial(0, 100.0, 120.0), trial(1, 100.0, None)]
    one_ended = utilisation(state(trials, [epoch(0, 100.0, 120.0, 0.6)]))
    assert (one_ended.available_s, one_ended.idle_share) == (40.0, 0.0)
    between = [epoch(0, 100.0, 120.0, 0.6), epoch(1, 104.0, 110.0, 0.6)]
    assert utilisation(state(trials, between)).idle_share == pytest.approx(4 / 40), "its start took 4 s"


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


def test_a_run_within_the_rules_is_valid_with_disclosures_and_one_from_another_network_open() -> None:
    good = judged()
    assert (good.verdict, good.reasons) == ("VALID", ())
    text = " ".join(good.disclosures)
    assert "random weights" in text
    assert "25.0\u202f%" in text
    assert "interrupted" in text
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
    reasons = " ".join(judged(precisions=(), held_out=None, search=None).reasons)
    assert "no precision was recorded" in reasons
    assert "no held-out accuracy was measured" in reasons


def proposed(number: int, searcher: str) -> journal.Proposed:
    return journal.Proposed(individual=Individual(id=number, network=tiny_network()), searcher=searcher)


def begun() -> list[journal.Event]:
    return [proposed(0, "seed"), *state([], []).sessions]


def tried(started_s: float, ended_s: float | None, **changes: object) -> journal.TrialEvent:
    return journal.TrialEvent(trial=trial(0, started_s, ended_s).model_copy(update={"individual": 0} | changes))


def test_a_lost_first_attempt_and_a_diverged_last_trial_count_time_and_no_operations() -> None:
    events: list[journal.Event] = [
        *begun(),
        tried(0.0, 13.0, status="lost"),
        journal.EpochEvent(epoch=epoch(0, 0.0, 10.0, 0.5)),
        tried(13.0, 63.0, attempt=2),
        journal.EpochEvent(epoch=epoch(0, 13.0, 63.0, 0.8, attempt=2)),
    ]
    board = Scoreboard(SearchState.of(events))
    final = board.final()
    assert (board.started_s, board.ended_s) == (0.0, 63.0)
    assert final.operations == FULL
    assert final.score == pytest.approx(FULL / 63)
    assert board.at(10.0).operations == 0
    assert [point.time_h * 3600 for point in board.series(30.0)] == pytest.approx([30.0, 60.0, 63.0])
    events = [
        *begun(),
        tried(0.0, 20.0),
        journal.EpochEvent(epoch=epoch(0, 0.0, 20.0, 0.8)),
        tried(20.0, 52.0, trial=1, status="diverged"),
        journal.EpochEvent(epoch=epoch(1, 20.0, 50.0, 0.1)),
    ]
    board = Scoreboard(SearchState.of(events))
    assert board.ended_s == 50.0
    assert board.final().score == pytest.approx(FULL / 50)
    assert board.final().search_error == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("stray", "message"),
    [
        (journal.EpochEvent(epoch=epoch(99, 0.0, 1.0, 0.5)), "an epoch of trial 99, attempt 1"),
        (journal.EpochEvent(epoch=epoch(0, 0.0, 1.0, 0.5, attempt=2)), "an epoch of trial 0, attempt 2"),
        (journal.Valued(individual=500, status="observed", value=1.0), "the value of network 500"),
        (journal.Valued(individual=-1, status="observed", value=1.0), "the value of network -1"),
        (journal.TrialEvent(trial=trial(1, 0.0, None)), "trial 1 of network 1"),
        (proposed(3, "random"), "network 3, but only 1"),
    ],
)
def test_an_event_about_an_unknown_trial_or_network_is_refused_with_its_line(
    stray: journal.Event, message: str
) -> None:
    events = [*begun(), tried(0.0, 1.0), stray]
    with pytest.raises(RunError, match=f"line 4 .*{message}"):
        SearchState.of(events)


@pytest.mark.parametrize(
    ("was", "forged", "message"),
    [
        ('"validation_accuracy":0.5', '"validation_accuracy":1.5', "validation_accuracy: input should be less"),
        ('"validation_accuracy":0.5', '"validation_accuracy":NaN', "validation_accuracy: must be a finite"),
        ('"steps":2', '"steps":-2', "steps: input should be greater"),
        ('"ended_s":1.0', '"ended_s":Infinity', "ended_s: must be a finite"),
        ('"held_out_accuracy":0.25', '"held_out_accuracy":1.7', "held_out_accuracy: input should be less"),
        ('{"after"', 'nonsense{"after"', "invalid JSON"),
    ],
)
def test_an_impossible_figure_is_refused_with_its_line(tmp_path: Path, was: str, forged: str, message: str) -> None:
    with closing(journal.Journal(tmp_path)) as written:
        written.write(tried(0.0, 2.0, held_out_accuracy=0.25))
        written.write(journal.EpochEvent(epoch=epoch(0, 0.0, 1.0, 0.5)))
    path = tmp_path / "journal.jsonl"
    assert len(list(journal.read_journal(tmp_path))) == 2
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, forged))
    with pytest.raises(RunError, match=f"line [12] is not a valid event: .*{message}"):
        list(journal.read_journal(tmp_path))


Lines = list[dict[str, Any]]
Change = Callable[[Lines], None]
SPLITS = {"training": 256, "validation": 64, "held_out": 80, "classes": 4}


def made_config(**changes: object) -> AutomlConfig:
    plain = AutomlConfig(
        network="net.json",
        dataset=DatasetConfig(name="arrays", directory=Path("images.npz"), validation_share=0.2),
        search=SearchConfig(method="none"),
        schedule=ScheduleConfig(max_trials=2, max_duration=100.0, round_epochs=(2,), tuning_round=None),
        training=TrainingConfig(batch_size=32, learning_rate=0.05),
    )
    return plain.model_copy(update=changes)


def _trial(number: int, began_s: float) -> list[tuple[float, journal.Event]]:
    counted = count(tiny_network(), "accelmark")
    parent, hyper = number - 1 if number else None, Hyperparameters(batch_size=32, learning_rate=0.05)
    asked = {"round": number + 1, "parent": parent, "hyperparameters": hyper}
    counts = {"cost": OperationCost.of(counted), "parameters": counted.parameters}
    record = trial(number, began_s, None).model_copy(update=asked | counts)
    work = {"trained_images": 256, "evaluated_images": 64, "steps": 8, "training_s": 16.0, "evaluating_s": 2.0}
    epochs = [
        epoch(number, began_s + 18 * at - 17, began_s + 18 * at + 1, (40 + at) / 64, epoch=at, **work) for at in (1, 2)
    ]
    result = {"ended_s": began_s + 40, "status": "finished", "held_out_accuracy": 50 / 80, "held_out_s": 2.0}
    driver = {"precision": "fp32", "ranks": 1, "trained_images": 512, "computing_s": 30.0}
    done = record.model_copy(update=result | driver)
    return [
        (began_s, journal.TrialEvent(trial=record)),
        *((one.ended_s, journal.EpochEvent(epoch=one)) for one in epochs),
        (began_s + 40, journal.TrialEvent(trial=done)),
        (began_s + 40, journal.Valued(individual=number, status="observed", value=42 / 64)),
    ]


def made_run(folder: Path, config: AutomlConfig | None = None) -> SearchDirectory:
    """Write the run; it was asked for ``config``."""
    network = tiny_network()
    run = SearchDirectory.create(folder, config or made_config(), network)
    (made,) = state([], [], workers=1).sessions
    session = made.model_copy(update={"splits": Splits(**SPLITS), "experiment": run.name})
    beats: list[tuple[float, journal.Event]] = [
        (float(second), journal.Heartbeat(clock_s=second)) for second in range(86)
    ]
    timed = sorted([*_trial(0, 1.5), *_trial(1, 42.5), *beats], key=lambda one: one[0])
    with closing(journal.Journal(run.path)) as written:
        written.write(proposed(0, "seed"))
        written.write(journal.Proposed(individual=Individual(id=1, network=network, parent=0), searcher="none"))
        written.write(session)
        for _, event in timed:
            written.write(event)
        written.write(journal.SessionEnded(clock_s=86.0, reason="trials", over=True))
    return run


def forge(run: SearchDirectory, change: Change) -> None:
    """Change a journal's lines, and write it anew as if it had been so from the beginning."""
    path = run.path / journal.JOURNAL_FILE
    lines: Lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = list(journal.read_journal(run.path))
    path.unlink()
    with closing(journal.Journal(run.path)) as written:
        for event in events:
            written.write(event)


def _each(kind: str, *, only_ended: bool = False, **changes: Any) -> Change:
    """Change every event of a kind: a function changes the value that was there."""

    def change(lines: Lines) -> None:
        for line in lines:
            record = line.get(kind, line)
            if line["event"] == kind and not (only_ended and record["ended_s"] is None):
                record |= {name: new(record[name]) if callable(new) else new for name, new in changes.items()}

    return change


epochs, session = partial(_each, "epoch"), partial(_each, "session-began")
done = partial(_each, "trial", only_ended=True)


def scaled(factor: float, *, beats: bool) -> Change:
    """Scale all times of trials and epochs; those of beats and the session's end with them or not."""
    names = ("started_s", "begun_s", "ended_s", "training_s", "evaluating_s", "held_out_s")

    def change(lines: Lines) -> None:
        for line in lines:
            record = line.get("epoch") or line.get("trial") or {}
            record.update({name: record[name] * factor for name in names if record.get(name)})
            if beats and "clock_s" in line:
                line["clock_s"] *= factor

    return change


def too_many_images(lines: Lines) -> None:
    epochs(trained_images=2560, steps=80)(lines)
    done(trained_images=5120)(lines)


def without_the_first_trial(lines: Lines) -> None:
    lines[:] = [line for line in lines if line.get(line["event"], {}).get("trial") != 0]


def test_a_consistent_run_is_valid(tmp_path: Path) -> None:
    verified = verify_search(made_run(tmp_path))
    assert (verified.verdict, verified.reasons) == ("VALID", ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The work contradicts the data.
        (epochs(trained_images=9256), "trained 9256 images, more than its steps hold (expected: at most 256 images"),
        (done(trained_images=500), "the driver trained 500 images (expected: 512 images, the sum of its epochs)"),
        (epochs(evaluated_images=640), "trial 0, epoch 1: evaluated 640 images (expected: 64 validation images)"),
        (epochs(steps=8000), "trial 0, epoch 1: 8000 steps (expected: 8 steps per epoch)"),
        (too_many_images, "trained 2560 images (expected: at most 256 images, the training split)"),
        (epochs(trained_images=250), "trained 250 images (expected: 8 steps of 32 images)"),
        (epochs(complete=False), "has a validation accuracy, but was cut"),
        (epochs(validation_accuracy=0.5001), "validation accuracy 0.50010000 (expected: a multiple of 1/64)"),
        (done(held_out_accuracy=0.87654321), "held-out accuracy 0.87654321 (expected: a multiple of 1/80)"),
        (done(trained_images=None), "finished without the driver's record"),
        (session(splits=SPLITS | {"training": 2560}), "the configured share"),
        (session(splits=SPLITS | {"classes": 5}), "has 4 classes (expected: 5"),
        # The times contradict the clock.
        (scaled(0.5, beats=False), "trial 1, attempt 1: its start is at 21.2 s (expected: between"),
        (scaled(0.5, beats=True), "the driver computed for 30.0 s (expected: at most the 16.0 s of training)"),
        (scaled(60, beats=True), "the last epoch ended at 4770.0 s (expected: end after 100.0 s)"),
        (epochs(ended_s=lambda value: value - 17.5, training_s=0.1, evaluating_s=0.1), "its end is at 3.0 s"),
        (epochs(training_s=30.0), "worked 32.0 s (expected: at most 18.0 s of work)"),
        (epochs(begun_s=3.0), "epochs 1 and 2 overlap"),
        (done(ended_s=2.0), "ended at 2.0 s, before them"),
        (session(clock_s=30.0), "0.0 s, where the run's clock stopped"),
        # The run deviates from its configuration.
        (done(precision="fp64"), "trial 0: precision fp64 (expected: precision fp32)"),
        (session(dataset_identity="imagenet"), "used imagenet (expected: data set arrays)"),
        (session(workers=8), "had 8 workers (expected: 1 workers)"),
        (done(epochs_planned=9), "planned epochs 9 (expected: planned epochs 2)"),
        (done(tuned=True), "tuned True (expected: tuned False)"),
        (done(ranks=2), "ranks 2 (expected: ranks 1)"),
        (epochs(epoch=1), "not numbered consecutively"),
        (without_the_first_trial, "trials are not numbered consecutively"),
        (lambda lines: lines.pop(2), "no session of this run began"),
    ],
)
def test_what_contradicts_data_clock_or_configuration_is_detected(tmp_path: Path, change: Change, message: str) -> None:
    run = made_run(tmp_path)
    forge(run, change)
    verified = verify_search(run)
    assert verified.verdict == "INVALID"
    assert message in "; ".join(verified.reasons)


TWO_TRIALS: dict[str, Any] = {"max_trials": 2, "round_epochs": (2,), "tuning_round": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": ScheduleConfig(**TWO_TRIALS | {"max_trials": 1})}, "2 trials were started (expected: at most 1 "),
        (
            {"schedule": ScheduleConfig(**TWO_TRIALS | {"round_epochs": (3,), "early_stop": False})},
            "planned epochs 2 (expected: planned epochs 3)",
        ),
        ({"training": TrainingConfig(batch_size=64, learning_rate=0.05)}, "batch 32 (expected: batch 64)"),
        ({"training": TrainingConfig(batch_size=32, learning_rate=0.1)}, "learning rate 0.05 (expected"),
    ],
)
def test_a_configuration_changed_afterwards_is_detected(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    assert message in " ".join(verify_search(made_run(tmp_path, made_config(**changes))).reasons)


def test_a_trial_finishes_before_its_last_epoch_only_where_the_early_stop_ends_it(tmp_path: Path) -> None:
    run = made_run(tmp_path, made_config(schedule=ScheduleConfig(max_trials=2, round_epochs=(12,), tuning_round=None)))
    forge(run, _each("trial", epochs_planned=12))
    assert "finished after 2 epochs (expected: 12 epochs or an early stop)" in " ".join(verify_search(run).reasons)

    def more_epochs(lines: Lines) -> None:
        """The first trial's first epoch, then as many without progress as its patience of 8 bears."""
        at = next(index for index, line in enumerate(lines) if line["event"] == "epoch")
        one = lines[at]["epoch"]
        lines[:] = [line for line in lines if line["event"] != "epoch" or line["epoch"]["trial"] == 1]
        length = (one["ended_s"] - one["begun_s"]) / 9
        for number in range(9):
            begun_s = one["begun_s"] + length * number
            times = {"begun_s": begun_s, "ended_s": begun_s + length, "training_s": 0.0, "evaluating_s": 0.0}
            lines.insert(at + number, {"event": "epoch", "epoch": one | times | {"epoch": number + 1}})

    forge(run, more_epochs)
    message = [reason for reason in verify_search(run).reasons if "finished after" in reason]
    assert [reason.split(":")[0] for reason in message] == ["trial 1, attempt 1"]


def test_a_failed_attempt_may_end_at_any_step(tmp_path: Path) -> None:
    def fail(lines: Lines) -> None:
        for line in lines:
            if line["event"] == "trial" and line["trial"]["trial"] == 1 and line["trial"]["ended_s"]:
                line["trial"].update(status="crashed", ended_s=line["trial"]["started_s"], held_out_accuracy=None)
            if line["event"] == "epoch" and line["epoch"]["trial"] == 1:
                line["epoch"].update(evaluated_images=0, trained_images=96, steps=4)

    run = made_run(tmp_path)
    forge(run, fail)
    assert verify_search(run).reasons == ()


def test_a_changed_inserted_or_removed_line_is_named(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    path = run.path / journal.JOURNAL_FILE
    original = path.read_bytes()
    lines = original.splitlines(keepends=True)
    beat = next(number for number, line in enumerate(lines) if b'"beat"' in line)
    for forged, line in (
        ([*lines[:beat], lines[beat].replace(b"0.0", b"0.1"), *lines[beat + 1 :]], beat + 2),
        ([*lines[:beat], *lines[beat + 1 :]], beat + 1),
        ([*lines[: beat + 1], *lines[beat:]], beat + 2),
        ([*lines[:beat], b'{"event":"note","clock_s":0.0,"text":"inserted"}\n', *lines[beat:]], beat + 1),
        (lines[1:], 1),
    ):
        path.write_bytes(b"".join(forged))
        assert _chain(run) == (len(forged), line)
    path.write_bytes(b"".join([*lines[:beat], lines[beat].replace(b"0.0", b"0.1"), *lines[beat + 1 :]]))
    assert f"line {beat + 2} of the journal does not follow from line {beat + 1}" in verify_search(run).reasons[0]
    path.write_bytes(original)
    assert verify_search(run).verdict == "VALID"
    config = run.path / "automl.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    assert "line 1 of the journal does not follow from configuration" in verify_search(run).reasons[0]


def test_the_hash_chain_continues_after_an_incomplete_line(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    path = run.path / journal.JOURNAL_FILE
    original = path.read_bytes()
    lines = original.splitlines(keepends=True)
    for cut in (0, 1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        assert _chain(run) == (len(lines) - 1, None)
        with closing(journal.Journal(run.path)) as written:
            written.write(journal.SessionEnded(clock_s=86.0, reason="trials", over=True))
        assert path.read_bytes() == original


def _chain(run: SearchDirectory) -> tuple[int, int | None]:
    """Number of lines, and the first one that does not follow."""
    events = list(journal.read_journal(run.path))
    return len(events), journal.first_broken_line(run.path, events)


def test_a_search_by_aiperfs_rules_has_a_page_of_aiperfs_name(tmp_path: Path) -> None:
    run = made_run(tmp_path, made_config(rules=shipped_rules(SearchRules, "searches")["aiperf-v1"]))
    written = [path.name for path in write_report(run)]
    assert written[-1] == "Report_Failed.html"
    assert "at least" in (run.path / written[-1]).read_text()
    assert "Report_Failed.html" not in [path.name for path in write_report(made_run(tmp_path / "own"))]
