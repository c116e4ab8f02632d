"""The state computed from a journal: time of failed attempts, and lines that contradict earlier ones."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from accelmark.automl.journal import EpochEvent, Event, Journal, Proposed, SearchState, TrialEvent, Valued, read_journal
from accelmark.automl.records import Individual
from accelmark.automl.scoring import Scoreboard
from accelmark.spec.errors import RunError
from tests.automl.images import tiny_network
from tests.automl.test_score import FULL, epoch, state, trial


def begun() -> list[Event]:
    return [Proposed(individual=Individual(id=0, network=tiny_network()), searcher="seed"), *state([], []).sessions]


def tried(started_s: float, ended_s: float | None, **changes: object) -> TrialEvent:
    return TrialEvent(trial=trial(0, started_s, ended_s).model_copy(update={"individual": 0} | changes))


def test_a_lost_first_attempt_counts_time_and_no_operations() -> None:
    events: list[Event] = [
        *begun(),
        tried(0.0, 13.0, status="lost"),
        EpochEvent(epoch=epoch(0, 0.0, 10.0, 0.5)),
        tried(13.0, 63.0, attempt=2),
        EpochEvent(epoch=epoch(0, 13.0, 63.0, 0.8, attempt=2)),
    ]
    board = Scoreboard(SearchState.of(events))
    final = board.final()
    assert (board.started_s, board.ended_s) == (0.0, 63.0)
    assert final.operations == FULL
    assert final.score == pytest.approx(FULL / 63)
    assert board.at(10.0).operations == 0
    assert [point.time_h * 3600 for point in board.series(30.0)] == pytest.approx([30.0, 60.0, 63.0])


def test_a_diverged_last_trial_counts_time_and_no_operations() -> None:
    events: list[Event] = [
        *begun(),
        tried(0.0, 20.0),
        EpochEvent(epoch=epoch(0, 0.0, 20.0, 0.8)),
        tried(20.0, 52.0, trial=1, status="diverged"),
        EpochEvent(epoch=epoch(1, 20.0, 50.0, 0.1)),
    ]
    board = Scoreboard(SearchState.of(events))
    assert board.ended_s == 50.0
    assert board.final().score == pytest.approx(FULL / 50)
    assert board.final().search_error == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("stray", "message"),
    [
        (EpochEvent(epoch=epoch(99, 0.0, 1.0, 0.5)), "an epoch of trial 99, attempt 1"),
        (EpochEvent(epoch=epoch(0, 0.0, 1.0, 0.5, attempt=2)), "an epoch of trial 0, attempt 2"),
        (Valued(individual=500, status="observed", value=1.0), "the value of network 500"),
        (Valued(individual=-1, status="observed", value=1.0), "the value of network -1"),
        (TrialEvent(trial=trial(1, 0.0, None)), "trial 1 of network 1"),
        (Proposed(individual=Individual(id=3, network=tiny_network()), searcher="random"), "network 3, but only 1"),
    ],
)
def test_an_event_about_an_unknown_trial_or_network_is_refused_with_its_line(stray: Event, message: str) -> None:
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
    with closing(Journal(tmp_path)) as journal:
        journal.write(tried(0.0, 2.0, held_out_accuracy=0.25))
        journal.write(EpochEvent(epoch=epoch(0, 0.0, 1.0, 0.5)))
    path = tmp_path / "journal.jsonl"
    assert len(list(read_journal(tmp_path))) == 2
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, forged))
    with pytest.raises(RunError, match=f"line [12] is not a valid event: .*{message}"):
        list(read_journal(tmp_path))
