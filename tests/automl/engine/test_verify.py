"""A journal that was made up or changed contradicts its data, its clock or what was asked for, and is found out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelmark.automl.config import AutomlConfig, ScheduleConfig, TrainingConfig
from accelmark.automl.engine.journal import CONFIG, NAME, Chain, Journal, Note, SessionEnded, read_chain
from accelmark.automl.verify import verify_run
from tests.automl.engine.made_run import Lines, forge, made_config, made_run

Change = Callable[[Lines], None]


def epochs(**changes: Any) -> Change:
    """Change every epoch: a function changes the value that was there."""
    return _each("epoch", changes)


def done(**changes: Any) -> Change:
    """Change what trials came to."""
    return _each("trial", changes, only_ended=True)


def session(**changes: Any) -> Change:
    """Change what the session says of itself."""

    def change(lines: Lines) -> None:
        for line in lines:
            if line["event"] == "session-began":
                line.update(changes)

    return change


def _each(kind: str, changes: dict[str, Any], *, only_ended: bool = False) -> Change:
    def change(lines: Lines) -> None:
        for line in lines:
            if line["event"] == kind and not (only_ended and line[kind]["ended_s"] is None):
                for name, value in changes.items():
                    line[kind][name] = value(line[kind][name]) if callable(value) else value

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


def both(*changes: Change) -> Change:
    def change(lines: Lines) -> None:
        for one in changes:
            one(lines)

    return change


def after_the_last_proposal(lines: Lines) -> None:
    lines[:] = [line for line in lines if not (line["event"] == "trial" and line["trial"]["trial"] == 0)]
    lines[:] = [line for line in lines if not (line["event"] == "epoch" and line["epoch"]["trial"] == 0)]


def test_an_honest_run_is_valid(tmp_path: Path) -> None:
    verified = verify_run(made_run(tmp_path))
    assert (verified.verdict, verified.reasons) == ("VALID", ())
    assert not any("older version" in line for line in verified.disclosures)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (epochs(evaluated_images=640), "trial 0, epoch 1: evaluated 640 images, not the 64"),
        (epochs(steps=8000), "trial 0, epoch 1: 8000 steps, where an epoch has 8"),
        (
            both(epochs(trained_images=2560, steps=80), done(trained_images=5120)),
            "trained 2560 images, the training split has 256",
        ),
        (epochs(trained_images=250), "8 steps of 32 images are not the 250 trained"),
        (epochs(complete=False), "has a validation accuracy, and was not validated"),
        (epochs(validation_accuracy=0.5001), "no number of 64 pictures is 0.50010000 of them"),
        (done(held_out_accuracy=0.87654321), "no number of 80 held-out pictures is 0.87654321 of them"),
        (done(trained_images=None), "the driver's record of it is missing"),
        (session(splits={"training": 2560, "validation": 64, "held_out": 80, "classes": 4}), "not the share"),
        (session(splits={"training": 256, "validation": 64, "held_out": 80, "classes": 5}), "the data have 5"),
    ],
)
def test_work_that_the_data_do_not_bear_is_found_out(tmp_path: Path, change: Change, told: str) -> None:
    assert told in _told(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (scaled(0.5, beats=False), "trial 1, attempt 1: its start at 21.2 s is not between"),
        (scaled(0.5, beats=True), "the driver computed for 30.0 s in 16.0 s of training"),
        (scaled(60, beats=True), "its last epoch ended at 4770.0 s, where 100.0 s were asked for"),
        (epochs(ended_s=lambda value: value - 17.5, training_s=0.1, evaluating_s=0.1), "its end at 3.0 s is not"),
        (epochs(training_s=30.0), "worked longer than it lasted"),
        (epochs(begun_s=3.0), "its epochs 1 and 2 overlap"),
        (done(ended_s=2.0), "ended before its last epoch"),
        (session(clock_s=30.0), "where the run's clock stood at 0.0 s"),
    ],
)
def test_times_that_the_clock_does_not_bear_are_found_out(tmp_path: Path, change: Change, told: str) -> None:
    assert told in _told(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (done(precision="fp64"), "trial 0: computed in fp64, fp32 was asked for"),
        (session(dataset_identity="imagenet"), "worked on imagenet, where arrays was asked for"),
        (session(workers=8), "had 8 workers, 1 were asked for"),
        (done(epochs_planned=9), "the schedule gives it round 1, 2 epochs"),
        (done(tuned=True), "hyperparameters as configured"),
        (done(ranks=2), "2 ranks, 1 were asked for"),
        (epochs(epoch=1), "not numbered one after another"),
        (after_the_last_proposal, "its trials are not numbered one after another"),
        (lambda lines: lines.pop(2), "no session of this run began"),
    ],
)
def test_what_was_not_asked_for_is_found_out(tmp_path: Path, change: Change, told: str) -> None:
    assert told in _told(tmp_path, change)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            made_config(schedule=ScheduleConfig(max_trials=1, round_epochs=(2,), tuning_round=None)),
            "2 trials were started, 1 were asked for",
        ),
        (
            made_config(
                schedule=ScheduleConfig(max_trials=2, round_epochs=(3,), tuning_round=None, early_stop=False),
            ),
            "the schedule gives it round 1, 3 epochs",
        ),
        (made_config(training=TrainingConfig(batch_size=64, learning_rate=0.05)), "a batch of 32 was not asked for"),
        (made_config(training=TrainingConfig(batch_size=32, learning_rate=0.1)), "a learning rate of 0.05 was not"),
    ],
)
def test_a_configuration_that_was_changed_afterwards_is_found_out(
    tmp_path: Path, config: AutomlConfig, told: str
) -> None:
    assert told in " ".join(verify_run(made_run(tmp_path, config)).reasons)


def test_a_trial_finishes_before_its_last_epoch_only_where_the_early_stop_ends_it(tmp_path: Path) -> None:
    asked = made_config(schedule=ScheduleConfig(max_trials=2, round_epochs=(12,), tuning_round=None))
    run = made_run(tmp_path, asked)
    forge(run, _each("trial", {"epochs_planned": 12}))
    assert "finished after 2 of 12 epochs without a reason" in " ".join(verify_run(run).reasons)

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
    told = [reason for reason in verify_run(run).reasons if "finished after" in reason]
    assert told == ["trial 1, attempt 1: finished after 2 of 12 epochs without a reason"]


def test_a_failed_attempt_may_have_ended_anywhere(tmp_path: Path) -> None:
    def fail(lines: Lines) -> None:
        for line in lines:
            if line["event"] == "trial" and line["trial"]["trial"] == 1 and line["trial"]["ended_s"]:
                line["trial"].update(status="crashed", ended_s=line["trial"]["started_s"], held_out_accuracy=None)
            if line["event"] == "epoch" and line["epoch"]["trial"] == 1:
                line["epoch"].update(evaluated_images=0, trained_images=96, steps=4)

    run = made_run(tmp_path)
    forge(run, fail)
    assert verify_run(run).reasons == ()


def test_a_journal_of_an_older_version_stays_readable_and_what_could_not_be_checked_is_told(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    forge(run, session(splits=None))
    verified = verify_run(run)
    assert verified.verdict == "VALID"
    assert "could not all be held against the data" in " ".join(verified.disclosures)


def test_a_line_that_was_changed_put_in_or_taken_out_is_named(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    path = run.path / NAME
    honest = path.read_bytes()
    lines = honest.splitlines(keepends=True)
    beat = next(number for number, line in enumerate(lines) if b'"beat"' in line)
    for forged, line in (
        ([*lines[:beat], lines[beat].replace(b"0.0", b"0.1"), *lines[beat + 1 :]], beat + 2),
        ([*lines[:beat], *lines[beat + 1 :]], beat + 1),
        ([*lines[: beat + 1], *lines[beat:]], beat + 2),
        ([*lines[:beat], b'{"event":"note","clock_s":0.0,"text":"put in"}\n', *lines[beat:]], beat + 1),
        (lines[1:], 1),
    ):
        path.write_bytes(b"".join(forged))
        assert read_chain(run.path) == Chain(len(forged), 0, line)
    path.write_bytes(b"".join([*lines[:beat], lines[beat].replace(b"0.0", b"0.1"), *lines[beat + 1 :]]))
    assert f"line {beat + 2} of the journal does not follow from line {beat + 1}" in verify_run(run).reasons[0]
    path.write_bytes(honest)
    assert verify_run(run).verdict == "VALID"
    config = run.path / CONFIG
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    assert "line 1 of the journal does not follow from the configuration" in verify_run(run).reasons[0]


def test_a_chain_goes_on_over_a_line_that_a_kill_tore(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    path = run.path / NAME
    honest = path.read_bytes()
    lines = honest.splitlines(keepends=True)
    for cut in (0, 1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        path.write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        assert read_chain(run.path) == Chain(len(lines) - 1, 0, None)
        with Journal(run.path) as journal:
            journal.write(SessionEnded(clock_s=86.0, reason="trials", over=True))
        assert path.read_bytes() == honest


def test_a_journal_without_hashes_is_told_so_and_can_be_taken_up(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    path = run.path / NAME
    bare = [re.sub(rb'"after":"[0-9a-f]{64}",', b"", line) for line in path.read_bytes().splitlines(keepends=True)]
    path.write_bytes(b"".join(bare))
    verified = verify_run(run)
    assert verified.verdict == "VALID"
    assert "no line of the journal carries a hash" in " ".join(verified.disclosures)
    with Journal(run.path) as journal:
        journal.write(Note(clock_s=86.0, text="taken up"))
        journal.write(Note(clock_s=86.0, text="again"))
    assert read_chain(run.path) == Chain(len(bare) + 2, len(bare), None)
    assert f"none of the first {len(bare)} lines" in " ".join(verify_run(run).disclosures)
    path.write_bytes(path.read_bytes().replace(b"taken up", b"put down"))
    assert read_chain(run.path).broken == len(bare) + 2


def _told(folder: Path, change: Change) -> str:
    run = made_run(folder)
    forge(run, change)
    verified = verify_run(run)
    assert verified.verdict == "INVALID"
    return "; ".join(verified.reasons)
