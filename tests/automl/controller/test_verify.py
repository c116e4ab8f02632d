"""Journals: the state that they give, and changed ones, which contradict their data, clock or configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from accelmark.automl import journal
from accelmark.automl.config import AutomlConfig, DatasetConfig, ScheduleConfig, SearchConfig, TrainingConfig
from accelmark.automl.journal import SearchDirectory, SearchState
from accelmark.automl.model.counting import count
from accelmark.automl.records import Hyperparameters, Individual, OperationCost, Splits
from accelmark.automl.scoring import Scoreboard, verify_search
from accelmark.report.search_page import write_report
from accelmark.spec.errors import RunError
from accelmark.spec.rules import SearchRules, shipped_rules
from tests.automl.images import tiny_network
from tests.automl.test_score import FULL, epoch, state, trial


def proposed(number: int, searcher: str) -> journal.Proposed:
    return journal.Proposed(individual=Individual(id=number, network=tiny_network()), searcher=searcher)


def begun() -> list[journal.Event]:
    return [proposed(0, "seed"), *state([], []).sessions]


def tried(started_s: float, ended_s: float | None, **changes: object) -> journal.TrialEvent:
    return journal.TrialEvent(trial=trial(0, started_s, ended_s).model_copy(update={"individual": 0} | changes))


def test_a_lost_first_attempt_counts_time_and_no_operations() -> None:
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


def test_a_diverged_last_trial_counts_time_and_no_operations() -> None:
    events: list[journal.Event] = [
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


def forge(run: SearchDirectory, change: Callable[[Lines], None]) -> None:
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


Change = Callable[[Lines], None]


def epochs(**changes: Any) -> Change:
    """Change every epoch: a function changes the value that was there."""
    return _each("epoch", changes)


def done(**changes: Any) -> Change:
    return _each("trial", changes, only_ended=True)


def session(**changes: Any) -> Change:
    return _each("session-began", changes)


def _each(kind: str, changes: dict[str, Any], *, only_ended: bool = False) -> Change:
    def change(lines: Lines) -> None:
        for line in lines:
            record = line.get(kind, line)
            if line["event"] == kind and not (only_ended and record["ended_s"] is None):
                record |= {name: new(record[name]) if callable(new) else new for name, new in changes.items()}

    return change


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
    ],
)
def test_work_that_contradicts_the_data_is_detected(tmp_path: Path, change: Change, message: str) -> None:
    assert message in _told(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (scaled(0.5, beats=False), "trial 1, attempt 1: its start is at 21.2 s (expected: between"),
        (scaled(0.5, beats=True), "the driver computed for 30.0 s (expected: at most the 16.0 s of training)"),
        (scaled(60, beats=True), "the last epoch ended at 4770.0 s (expected: end after 100.0 s)"),
        (epochs(ended_s=lambda value: value - 17.5, training_s=0.1, evaluating_s=0.1), "its end is at 3.0 s"),
        (epochs(training_s=30.0), "worked 32.0 s (expected: at most 18.0 s of work)"),
        (epochs(begun_s=3.0), "epochs 1 and 2 overlap"),
        (done(ended_s=2.0), "ended at 2.0 s, before them"),
        (session(clock_s=30.0), "0.0 s, where the run's clock stopped"),
    ],
)
def test_times_that_contradict_the_clock_are_detected(tmp_path: Path, change: Change, message: str) -> None:
    assert message in _told(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
def test_deviations_from_the_configuration_are_detected(tmp_path: Path, change: Change, message: str) -> None:
    assert message in _told(tmp_path, change)


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
    forge(run, _each("trial", {"epochs_planned": 12}))
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


def _told(folder: Path, change: Change) -> str:
    run = made_run(folder)
    forge(run, change)
    verified = verify_search(run)
    assert verified.verdict == "INVALID"
    return "; ".join(verified.reasons)


def test_a_search_by_aiperfs_rules_has_a_page_of_aiperfs_name(tmp_path: Path) -> None:
    run = made_run(tmp_path, made_config(rules=shipped_rules(SearchRules, "searches")["aiperf-v1"]))
    written = [path.name for path in write_report(run)]
    assert written[-1] == "Report_Failed.html"
    assert "at least" in (run.path / written[-1]).read_text()
    assert "Report_Failed.html" not in [path.name for path in write_report(made_run(tmp_path / "own"))]
