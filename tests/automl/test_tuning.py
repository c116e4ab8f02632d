"""A study that runs can share: proposals, values, resuming, and refusal of other experiments."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from math import log10
from pathlib import Path

import pytest

from accelmark.automl.config import AutomlConfig, ScheduleConfig, TuningConfig
from accelmark.automl.search.tuning import Tuner
from accelmark.spec.errors import RequestError

SPACE = TuningConfig(kernel=(3, 5), batch_size=(16, 32), learning_rate=(1e-3, 1e-1), dropout=(0.0, 0.5))

OPEN: list[Tuner] = []


def tuner(directory: Path, space: TuningConfig = SPACE, *, run: str = "one", experiment: str = "data") -> Tuner:
    config = AutomlConfig(schedule=ScheduleConfig(max_trials=1), tuning=space)
    made = Tuner(config, run=run, experiment=experiment, directory=directory, seed=4)
    OPEN.append(made)
    return made


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def test_every_hyperparameter_is_proposed_within_its_space(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    asked = [one.ask(number) for number in range(8)]
    assert {point.kernel for point in asked} <= {3, 5}
    assert {point.batch_size for point in asked} <= {16, 32}
    assert all(1e-3 <= point.learning_rate <= 1e-1 for point in asked)
    assert all(point.dropout is not None and 0 <= point.dropout <= 0.5 for point in asked)
    assert len({point.learning_rate for point in asked}) == 8


def test_tpe_learns_from_reported_values(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    asked = []
    for number in range(40):
        point = one.ask(number)
        asked.append(point)
        one.tell(number, -abs(log10(point.learning_rate / 0.01)))
    early = sum(abs(log10(point.learning_rate / 0.01)) for point in asked[:10])
    assert sum(abs(log10(point.learning_rate / 0.01)) for point in asked[-10:]) < 0.7 * early


def test_tpe_avoids_where_trials_diverged_and_ignores_crashed_ones(tmp_path: Path) -> None:
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


def test_a_killed_run_finds_its_study_again_and_abandons_running_trials(tmp_path: Path) -> None:
    first = tuner(tmp_path)
    first.ask(0)
    first.tell(0, 0.5)
    first.ask(1)
    second = tuner(tmp_path)
    assert [trial.value for trial in second.trials] == [0.5, None]
    assert second.abandon_running() == 1
    assert [trial.state.name for trial in second.trials] == ["COMPLETE", "FAIL"]
    second.tell(99, 0.1)


def test_the_study_gets_executed_hyperparameters_where_they_differ_from_the_proposal(tmp_path: Path) -> None:
    one = tuner(tmp_path, TuningConfig(kernel=(3, 7), dropout=(0.0, 0.5)))
    executed = []
    for number, value in enumerate((0.5, 0.6, None)):
        asked = one.ask(number)
        executed.append(None if number == 1 else {3: 7, 7: 3}[asked.kernel or 0])
        one.tell(number, value, taken=asked.model_copy(update={"kernel": executed[-1]}))
    (known,) = [trial for trial in one.trials if trial.state.name != "FAIL"]
    assert (known.params["kernel"], known.value) == (executed[0], 0.5)
    assert known.params["dropout"] == one.trials[0].params["dropout"]
    assert len(one.trials) == 4


def shared(folder: Path, storage: str | None = None) -> TuningConfig:
    return SPACE.model_copy(update={"storage": storage or f"sqlite:///{folder / 'study.db'}", "study": "ours"})


def test_two_runs_share_a_study_by_url_and_name_and_abandon_only_their_own_trials(tmp_path: Path) -> None:
    one, other = tuner(tmp_path, shared(tmp_path)), tuner(tmp_path, shared(tmp_path), run="two")
    one.ask(0)
    one.tell(0, 0.7)
    assert [trial.value for trial in other.trials] == [0.7]
    one.ask(1)
    other.ask(0)
    assert tuner(tmp_path, shared(tmp_path), run="two").abandon_running() == 1
    assert [trial.state.name for trial in one.trials] == ["COMPLETE", "RUNNING", "FAIL"]
    one.tell(1, 0.8)
    assert one.trials[1].value == 0.8


def test_a_study_of_another_experiment_is_refused(tmp_path: Path) -> None:
    one = tuner(tmp_path)
    one.ask(0)
    one.tell(0, 0.1)
    with pytest.raises(RequestError, match="another experiment"):
        tuner(tmp_path, TuningConfig(kernel=(3,)))
    with pytest.raises(RequestError, match="another experiment"):
        tuner(tmp_path, experiment="other data")


def test_a_shared_study_with_another_list_of_values_is_refused_and_one_with_another_range_is_not(
    tmp_path: Path,
) -> None:
    space = shared(tmp_path)
    tuner(tmp_path, space).ask(0)
    tuner(tmp_path, space.model_copy(update={"dropout": (0.0, 0.3)}), run="two").ask(0)
    late = tuner(tmp_path, shared(tmp_path).model_copy(update={"study": "other"}), run="three")
    with pytest.raises(RequestError, match=r"searched kernel in .*\(3, 5\).*, tuning.kernel is .*\(3, 5, 7\)"):
        tuner(tmp_path, space.model_copy(update={"kernel": (3, 5, 7)}), run="two")
    tuner(tmp_path, space.model_copy(update={"kernel": (3, 5, 7), "study": "other"}), run="two").ask(0)
    with pytest.raises(RequestError, match="another run searches another space"):
        late.ask(0)


@pytest.fixture
def postgresql() -> Iterator[str]:
    """A real PostgreSQL server of our own, on a socket in a folder of its own; gives its URL."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not programs:
        pytest.skip("PostgreSQL is not installed; tests/requirements.sh does")
    programs_of = programs[-1].parent
    owner = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="acmpg-"))
    if owner:
        shutil.chown(folder, owner)
    make = [str(programs_of / "initdb"), "-D", str(folder / "data"), "-U", "accelmark", "-A", "trust", "--no-sync"]
    subprocess.run(make, check=True, user=owner, cwd="/", stdout=subprocess.DEVNULL)
    options = ["-D", str(folder / "data"), "-k", str(folder), "-c", "listen_addresses=", "-F"]
    server = subprocess.Popen([str(programs_of / "postgres"), *options], user=owner, cwd="/", stderr=subprocess.DEVNULL)
    ready = [str(programs_of / "pg_isready"), "-h", str(folder), "-U", "accelmark", "-d", "postgres", "-t", "20"]
    while subprocess.run(ready, check=False, stdout=subprocess.DEVNULL).returncode:
        assert server.poll() is None
        time.sleep(0.1)
    yield f"postgresql://accelmark@/postgres?host={folder}"
    server.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown: open connections are cut
    server.wait(20)
    shutil.rmtree(folder)


def test_a_study_can_be_stored_in_postgresql(tmp_path: Path, postgresql: str) -> None:
    one, other = tuner(tmp_path, shared(tmp_path, postgresql)), tuner(tmp_path, shared(tmp_path, postgresql), run="two")
    for number in range(6):
        one.tell(number, -abs(log10(one.ask(number).learning_rate / 0.01)))
    assert [trial.value for trial in other.trials] == [trial.value for trial in one.trials]
    one.ask(6)
    assert tuner(tmp_path, shared(tmp_path, postgresql)).abandon_running() == 1
    with pytest.raises(RequestError, match="another experiment"):
        tuner(tmp_path, shared(tmp_path, postgresql), experiment="other data")


def test_an_unreachable_server_is_reported_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be opened") as caught:
        tuner(tmp_path, shared(tmp_path, "postgresql://me:secret@127.0.0.1:1/none?connect_timeout=2"))
    assert "secret" not in str(caught.value)
    assert "me:***@127.0.0.1" in str(caught.value)
