"""One shared study that proposes, learns, survives and refuses strangers."""

from __future__ import annotations

from math import log10
from pathlib import Path

import pytest

from accelmark.automl.config import TrainingConfig, TuningConfig
from accelmark.automl.tuning import StudyError, Tuner

SPACE = TuningConfig(kernel=(3, 5), batch_size=(16, 32), learning_rate=(1e-3, 1e-1), dropout=(0.0, 0.5))


def tuner(directory: Path, space: TuningConfig = SPACE, experiment: str = "one") -> Tuner:
    return Tuner(space, TrainingConfig(), experiment=experiment, directory=directory, seed=4)


def test_every_hyperparameter_is_proposed_within_its_space(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    asked = [one.ask(number) for number in range(8)]
    assert {point.kernel for point in asked} <= {3, 5}
    assert {point.batch_size for point in asked} <= {16, 32}
    assert all(1e-3 <= point.learning_rate <= 1e-1 for point in asked)
    assert all(point.dropout is not None and 0 <= point.dropout <= 0.5 for point in asked)
    assert len({point.learning_rate for point in asked}) == 8


def test_tpe_learns_from_what_it_is_told(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    asked = []
    for number in range(40):
        point = one.ask(number)
        asked.append(point)
        one.tell(number, -abs(log10(point.learning_rate / 0.01)))
    early = sum(abs(log10(point.learning_rate / 0.01)) for point in asked[:10])
    late = sum(abs(log10(point.learning_rate / 0.01)) for point in asked[-10:])
    assert late < 0.7 * early


def test_tpe_keeps_away_from_where_trials_diverged_and_ignores_those_that_crashed(tmp_path: Path) -> None:
    one = tuner(tmp_path, TuningConfig(kernel=(), learning_rate=(1e-3, 1e1)))
    asked = []
    for number in range(30):
        point = one.ask(number)
        asked.append(point.learning_rate)
        diverged = point.learning_rate > 0.1
        one.tell(number, None if diverged else 0.5, diverged=diverged)
    assert sum(rate > 0.1 for rate in asked[15:]) < sum(rate > 0.1 for rate in asked[:15])
    one.ask(30)
    one.tell(30, None)
    assert {trial.state.name for trial in one.trials} == {"COMPLETE", "PRUNED", "FAIL"}


def test_what_is_not_searched_stays_as_configured(tmp_path: Path) -> None:
    point = tuner(tmp_path, TuningConfig(kernel=(3, 5))).ask(0)
    assert (point.batch_size, point.learning_rate, point.dropout) == (448, 0.1, None)


def test_a_killed_run_finds_its_study_again_and_gives_up_what_was_running(tmp_path: Path) -> None:
    first = tuner(tmp_path)
    first.ask(0)
    first.tell(0, 0.5)
    first.ask(1)
    second = tuner(tmp_path)
    assert [trial.value for trial in second.trials] == [0.5, None]
    assert second.abandon_running() == 1
    assert [trial.state.name for trial in second.trials] == ["COMPLETE", "FAIL"]
    second.tell(99, 0.1)


def test_two_runs_share_a_study_by_its_url(tmp_path: Path) -> None:
    space = SPACE.model_copy(update={"storage": f"sqlite:///{tmp_path / 'study.db'}"})
    one, other = tuner(tmp_path, space), tuner(tmp_path, space)
    one.ask(0)
    one.tell(0, 0.7)
    assert [trial.value for trial in other.trials] == [0.7]


def test_a_study_of_another_experiment_is_refused(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    one.ask(0)
    one.tell(0, 0.1)
    with pytest.raises(StudyError, match="another experiment"):
        tuner(tmp_path, TuningConfig(kernel=(3,)))


def test_a_storage_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot be opened"):
        tuner(tmp_path, TuningConfig(storage="nonsense://x"))
