"""The controller with workers as threads: rounds, tuning, failures, stopping, resuming, reporting."""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from accelmark.automl.config import AutomlConfig, ScheduleConfig, SearchConfig, TrainingConfig, TuningConfig
from accelmark.automl.controller import Observer, SearchController, resume_search
from accelmark.automl.journal import Journal, Proposed, Remark, SearchDirectory, SessionEnded, read_journal
from accelmark.automl.model.counting import count
from accelmark.automl.model.morphs import with_kernel
from accelmark.automl.scoring import Scoreboard, summarise, verify_search
from accelmark.automl.search import searchers
from accelmark.automl.search.tuning import STUDY_FILE
from accelmark.report.search_page import write_report
from accelmark.report.search_terminal import show_summary
from accelmark.spec.errors import RequestError, RunError
from tests.automl.images import thread_pool, tiny_dataset, tiny_network


def config(folder: Path, schedule: ScheduleConfig, **changes: object) -> AutomlConfig:
    folder.mkdir(exist_ok=True)
    plain = AutomlConfig(
        network="net.json",
        dataset=tiny_dataset(folder),
        schedule=schedule,
        training=TrainingConfig(batch_size=32, learning_rate=0.05),
        tuning=TuningConfig(kernel=(3, 5), dropout=(0.0, 0.5)),
    )
    return plain.model_copy(update=changes)


def session(run: SearchDirectory, wanted: AutomlConfig, observer: Observer | None = None) -> SessionEnded:
    workers = thread_pool(wanted.dataset, tiny_network(), wanted.schedule.concurrency)
    with run.held():
        return SearchController(run, wanted, workers, observer=observer).run()


def new_run(folder: Path, wanted: AutomlConfig) -> SearchDirectory:
    return SearchDirectory.create(folder / "runs", wanted, tiny_network())


def ran(folder: Path, schedule: ScheduleConfig, **changes: object) -> tuple[SearchDirectory, SessionEnded]:
    wanted = config(folder, schedule, **changes)
    run = new_run(folder, wanted)
    return run, session(run, wanted)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SearchDirectory:
    folder = tmp_path_factory.mktemp("finished")
    run, ended = ran(folder, ScheduleConfig(concurrency=2, max_trials=7, round_epochs=(2, 3), tuning_round=3))
    assert ended.over
    return run


def copied(run: SearchDirectory, folder: Path, *names: str) -> None:
    for name in names or ("journal.jsonl", "automl.json", "network.json"):
        (folder / name).write_text((run.path / name).read_text())


def test_a_search_runs_its_rounds_to_the_last_trial(finished: SearchDirectory) -> None:
    summary = summarise(finished)
    assert summary.trials == {"finished": 7}
    assert (summary.status, summary.ended_because) == ("over", "trials")
    assert summary.outcome == "ended: all its trials are done"
    assert summary.final.score > 0
    assert summary.final.error is not None
    trials = finished.state().trials
    assert [trials[number].epochs_planned for number in range(7)] == [2, 2, 3, 3, 3, 3, 3]
    assert [trials[number].tuned for number in range(7)] == [False] * 4 + [True] * 3
    assert all(trials[number].hyperparameters.kernel in (3, 5) for number in (4, 5, 6))
    assert "carried" in {record.weights for record in trials.values()}
    assert {record.precision for record in trials.values()} == {"fp32"}
    for record in trials.values():
        network = finished.state().individuals[record.individual].network
        assert record.flops_per_image == count(network, "accelmark").matrix
        assert record.trained_images == 256 * record.epochs_planned
    assert verify_search(finished).verdict == "VALID"


@pytest.mark.parametrize(
    ("searchers", "message"),
    [
        ("bayesian", "its parent with its morphs applied"),
        ("hyperparameters", "its previous form with the hyperparameters of its trial"),
    ],
)
def test_an_inserted_network_is_detected_also_where_parents_were_tuned(
    finished: SearchDirectory, tmp_path: Path, searchers: str, message: str
) -> None:
    tuned = {record.individual for record in finished.state().trials.values() if record.tuned}
    copied(finished, tmp_path, "automl.json", "network.json")
    forged = 0
    with closing(Journal(tmp_path)) as journal:
        for event in read_journal(finished.path):
            if isinstance(event, Proposed) and searchers in event.searcher and event.individual.id in tuned:
                other = event.individual.model_copy(update={"network": with_kernel(event.individual.network, 7)})
                event, forged = event.model_copy(update={"individual": other}), forged + 1
            journal.write(event)
    assert forged
    assert message in " ".join(verify_search(SearchDirectory(tmp_path)).reasons)


def test_its_report_is_self_contained_and_shows_every_network(finished: SearchDirectory) -> None:
    written = write_report(finished, logs=True)
    assert [path.name for path in written] == [
        "report.html", "report.json", "report.csv", "trials.csv", "logs.tar.gz",
    ]  # fmt: skip
    before_library = written[0].read_text().split("<script>")[0]
    assert "src=" not in before_library
    assert before_library.count('class="network"') == len(finished.state().individuals)
    assert "Regulated score" in before_library
    assert "Validation accuracy per epoch of the best 7 trials" in before_library
    assert json.loads(written[1].read_text())["schema_version"] == 1
    assert len(written[3].read_text().splitlines()) == 8


def test_texts_of_a_run_cannot_break_its_page(finished: SearchDirectory, tmp_path: Path) -> None:
    copied(finished, tmp_path)
    with closing(Journal(tmp_path)) as journal:
        journal.write(Remark(clock_s=1.0, text="<script>alert(1)</script>"))
    page = write_report(SearchDirectory(tmp_path))[0].read_text()
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_diverged_trials_are_recorded_and_not_retried(tmp_path: Path) -> None:
    schedule = ScheduleConfig(concurrency=1, max_trials=2, round_epochs=(1,), max_attempts=2)
    run, _ = ran(tmp_path, schedule, training=TrainingConfig(batch_size=32, learning_rate=1e30))
    summary = summarise(run)
    assert summary.trials == {"diverged": 2}
    assert len(summary.failures) == 2
    assert {record.attempt for record in run.state().attempts.values()} == {1}
    assert not (run.path / "weights").exists()
    assert "no trial finished" in " ".join(summary.judgement.reasons)
    assert summary.final.score == 0


def test_a_search_can_be_stopped_and_resumed_until_its_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = ScheduleConfig(concurrency=2, max_duration=4.0, round_epochs=(100_000,), early_stop=False)
    wanted = config(tmp_path, schedule)
    run = new_run(tmp_path, wanted)

    def stop_after_an_epoch(state: object, scheduler: object) -> None:
        if run.state().epochs:
            run.stop_mark.touch()

    ended = session(run, wanted, stop_after_an_epoch)
    assert (ended.reason, ended.over) == ("asked", False)
    stopped = run.state()
    show_summary(summarise(run))
    assert re.match(r"stopped, INVALID by rules .* as it stands\n", capsys.readouterr().out)
    assert {record.status for record in stopped.trials.values()} == {"cut"}
    assert not all(epoch.complete for epochs in stopped.epochs.values() for epoch in epochs)
    run.stop_mark.unlink()
    assert session(run, wanted).reason == "time"
    summary = summarise(run)
    assert summary.interruptions == 1
    assert summary.duration_s >= 3.9
    (reason,) = verify_search(run).reasons
    assert reason.startswith("no trial finished")


def test_a_proposed_kernel_above_the_limits_is_not_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bound = round(1.5 * count(tiny_network(), "accelmark").matrix_forward)
    schedule = ScheduleConfig(concurrency=1, max_trials=5, round_epochs=(1,), tuning_round=1)
    search = SearchConfig(method="random", max_forward_operations=bound)
    run, ended = ran(tmp_path, schedule, search=search, tuning=TuningConfig(kernel=(3, 7)))
    assert ended.reason == "trials"
    state = run.state()
    assert all(count(one.network, "accelmark").matrix_forward <= bound for one in state.individuals)
    assert {record.hyperparameters.kernel for record in state.trials.values()} == {3}
    kept = [note for note in state.notes if "kernel 7 exceeds the limits of the search; it takes 3" in note.text]
    assert kept
    storage = JournalStorage(JournalFileBackend(str(run.path / STUDY_FILE)))
    study = optuna.load_study(study_name=f"accelmark-{run.name}", storage=storage)
    assert [trial.params["kernel"] for trial in study.trials if trial.state.name == "COMPLETE"] == [3] * 5
    assert [trial.params["kernel"] for trial in study.trials if trial.state.name == "FAIL"] == [7] * len(kept)
    assert verify_search(run).verdict == "VALID"
    show_summary(summarise(run))
    assert "all its trials are done" in " ".join(capsys.readouterr().out.split())


def test_a_search_without_allowed_morphs_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = ScheduleConfig(concurrency=1, max_trials=5, round_epochs=(1,), tuning_round=None)
    run, ended = ran(tmp_path, schedule, search=SearchConfig(morphs=("deepen",), max_nodes=1))
    assert ended.reason == "exhausted"
    show_summary(summarise(run))
    lines = capsys.readouterr().out.splitlines()
    assert "no network within its limits" in " ".join(" ".join(lines).split())
    reasons = lines[1 : next(at for at, line in enumerate(lines) if line.startswith("run "))]
    assert len(reasons) > 1
    assert all(line.startswith("  ") for line in reasons)


def test_a_promoted_network_is_trained_on_for_the_epochs_of_its_round(tmp_path: Path) -> None:
    schedule = ScheduleConfig(concurrency=1, max_trials=5, round_epochs=(1, 2), tuning_round=None)
    run, _ = ran(tmp_path, schedule, search=SearchConfig(method="halving"))
    state = run.state()
    promoted = [record for record in state.trials.values() if record.round == 2]
    assert [(record.epochs_planned, record.weights, record.morphs) for record in promoted] == [(2, "carried", ())]
    assert verify_search(run).verdict == "VALID"
    assert summarise(run).method == "halving"


def test_the_best_network_is_trained_last_with_the_rest_of_the_operations(tmp_path: Path) -> None:
    schedule = ScheduleConfig(max_trials=1, round_epochs=(1,), tuning_round=None)
    measured, _ = ran(tmp_path / "measured", schedule, search=SearchConfig(method="none"))
    budget = 40 * int(summarise(measured).final.operations)
    schedule = ScheduleConfig(concurrency=2, max_operations=budget, final_share=0.6, round_epochs=(1,), tuning_round=1)
    search = SearchConfig(method="random", weights="from-scratch")
    tuning = TuningConfig(kernel=(), batch_size=(16, 32), learning_rate=(0.01, 0.1), seed_trials=3)
    wanted = config(tmp_path, schedule, search=search, tuning=tuning)
    run = new_run(tmp_path, wanted)
    ended = session(run, wanted)
    assert (ended.reason, ended.over) == ("spent", True)
    state = run.state()
    used = {trial: record.cost.operations(state.totals_of(record)) for trial, record in state.trials.items()}
    last = {one.id: one for one in state.individuals if one.epochs}
    finals = {trial: record for trial, record in state.trials.items() if record.individual in last}
    assert len(finals) == 2
    assert sum(used.values()) <= budget
    assert sum(used[trial] for trial in state.trials if trial not in finals) <= 0.4 * budget
    searched = {record.individual: record for trial, record in state.trials.items() if trial not in finals}
    for record in finals.values():
        before = searched[record.parent or 0]
        assert record.hyperparameters == before.hyperparameters
        assert (record.weights, record.epochs_planned) == ("carried", last[record.individual].epochs)
        assert record.cost == before.cost
    best = max((one for one in state.individuals if one.id in searched), key=lambda one: one.rank)
    assert best.id in {record.parent for record in finals.values()}
    assert [one.parent for one in state.individuals[:3]] == [None] * 3
    later = [record.hyperparameters for number, record in searched.items() if number >= 3]
    assert later
    assert all(hyper in [searched[number].hyperparameters for number in range(3)] for hyper in later)
    assert budget - sum(used.values()) < 2 * max(used[trial] // finals[trial].epochs_planned for trial in finals)
    assert verify_search(run).verdict == "VALID"

    less = wanted.schedule.model_copy(update={"max_operations": budget // 2})
    forged = SearchDirectory.create(tmp_path / "forged", wanted.model_copy(update={"schedule": less}), tiny_network())
    (forged.path / "journal.jsonl").write_bytes((run.path / "journal.jsonl").read_bytes())
    assert f"expected: at most {budget // 2:,} operations" in " ".join(verify_search(forged).reasons)


def test_the_best_network_is_trained_last_in_the_rest_of_the_time(tmp_path: Path) -> None:
    run, _ = ran(tmp_path, ScheduleConfig(max_duration=8.0, final_share=0.5, round_epochs=(1,), tuning_round=None))
    state = run.state()
    *searched, final = state.trials.values()
    assert [one.epochs is not None for one in state.individuals if one.id == final.individual] == [True]
    assert final.epochs_planned > 1
    assert all(record.started_s < 4.0 for record in searched)
    assert final.started_s >= 4.0
    assert verify_search(run).verdict == "VALID"


@pytest.mark.heavy
def test_only_weights_needed_later_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searchers, "BEST_PARENTS", 1)
    monkeypatch.setattr(searchers, "LATEST_PARENTS", 1)
    wanted = config(tmp_path, ScheduleConfig(concurrency=1, max_trials=8, round_epochs=(1,), tuning_round=None))
    run = new_run(tmp_path, wanted)
    (run.path / "weights").mkdir()
    (run.path / "weights" / "7.part.npz").write_bytes(b"left by a kill")
    held: list[int] = []
    session(run, wanted, lambda state, scheduler: held.append(len(list((run.path / "weights").glob("*.npz")))))
    state = run.state()
    trials = state.trials
    parents = {one.parent for one in state.individuals if one.status == "pending"}
    kept = {int(path.stem) for path in (run.path / "weights").iterdir()}
    possible = {one.id for one in searchers.Population(wanted.seed, state.individuals).parents}
    assert kept == (parents | possible | {state.best_individual}) - {None}
    assert max(held) <= 6 < len(trials)
    best = Scoreboard(state).best_trial_at(state.clock_s)
    assert best is not None
    assert best.individual == state.best_individual in kept
    had_weights = [record.parent is not None and trials[record.parent].ended_s for record in trials.values()]
    assert [record.weights == "carried" for record in trials.values()][2:] == [bool(each) for each in had_weights][2:]


def test_a_search_is_held_by_one_controller_at_a_time(finished: SearchDirectory) -> None:
    with finished.held():
        assert finished.is_running()
        with pytest.raises(RequestError, match=r"is in progress, .*accelmark automl stop"), finished.held():
            pass
    assert not finished.is_running()


def test_a_search_is_not_resumed_with_another_configuration(finished: SearchDirectory, tmp_path: Path) -> None:
    copied(finished, tmp_path)
    changed = (tmp_path / "automl.json").read_text().replace('"learning_rate": 0.05', '"learning_rate": 0.5')
    (tmp_path / "automl.json").write_text(changed)
    with pytest.raises(RequestError, match=r"automl\.json"):
        resume_search(SearchDirectory(tmp_path))


def test_a_full_disk_ends_the_session_with_the_file_and_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, weights = SearchDirectory(tmp_path), {"dense.weight": np.zeros((2, 2), np.float32)}
    run.save_weights(1, weights)

    def full(*arguments: object, **arrays: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(RunError, match=r"2\.npz.*No space left"):
        run.save_weights(2, weights)
    assert set(run.load_weights(1) or {}) == {"dense.weight"}
    with closing(Journal(tmp_path)) as journal:
        journal.write(Remark(clock_s=1.0, text="whole"))
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match=r"journal\.jsonl.*No space left"):
            journal.write(Remark(clock_s=2.0, text="not on disk"))
    assert [event.event for event in read_journal(tmp_path)][:1] == ["note"]
