"""A run's records: directory, event log, the source record of a wheel and of a checkout, and the drawn pairs."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from accelmark.results.read.round_dir import SavedCheckpoints
from accelmark.run.controller.evaluate import MOST_DRAWN, _replays
from accelmark.run.launchers.ssh.launcher import create
from accelmark.run.record import directory
from accelmark.run.record.directory import RunDirectory
from accelmark.run.record.registry import source_record
from accelmark.run.record.states import RunEventLog, read_events, statuses
from accelmark.spec.cluster import ClusterSpec, ContainerSpec
from accelmark.spec.errors import RunError
from accelmark.spec.log.events import CheckpointHashes
from tests.run.fakes import make_plan

ROOT = Path(__file__).parents[2]

SOURCE = """
import sys
sys.path.insert(0, sys.argv[1])
from accelmark.run.record.registry import source_record
print(source_record().model_dump_json())
"""


def record_of(site: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", SOURCE, str(site)]
    done = subprocess.run(command, cwd=site, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_an_installed_wheel_is_unmodified_until_files_are_changed_added_or_removed(tmp_path: Path) -> None:
    copy, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--no-compile", "--target", str(site), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before = record_of(site)
    assert (before["kind"], before["modified"], before["reason"]) == ("wheel", [], None)
    with (site / "accelmark" / "train" / "loop" / "ends.py").open("a") as changed:
        changed.write("\n# a change\n")
    (site / "accelmark" / "train" / "faster.py").touch()
    (site / "accelmark" / "py.typed").unlink()
    record = record_of(site)
    assert record["modified"] == ["accelmark/py.typed", "accelmark/train/faster.py", "accelmark/train/loop/ends.py"]
    assert record["sha256"] != before["sha256"]


def test_files_of_a_checkout_that_differ_from_the_commit_are_listed(tmp_path: Path) -> None:
    package = tmp_path / "src" / "accelmark"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "driver.py").write_text("steps = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
    for command in (["init"], ["add", "."], ["commit", "-m", "first"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    clean = source_record(package)
    assert (clean.kind, clean.modified) == ("checkout", ())
    assert clean.commit is not None
    (package / "driver.py").write_text("steps = 2\n")
    (package / "extra.py").write_text("")
    assert source_record(package).modified == ("src/accelmark/driver.py", "src/accelmark/extra.py")


@pytest.mark.parametrize(
    ("cluster", "mode"),
    [
        (ClusterSpec(), 0o004),
        (ClusterSpec(environment={"HF_TOKEN": "open5ame"}), 0),
        (ClusterSpec(container=ContainerSpec(engine="podman", pip_source="https://bob:hunter2@host/simple")), 0),
    ],
)
def test_only_the_owner_can_read_a_plan_with_secrets(tmp_path: Path, cluster: ClusterSpec, mode: int) -> None:
    plan = make_plan().model_copy(update={"cluster": cluster})
    RunDirectory.create(tmp_path / "run", plan)
    assert (tmp_path / "run" / "plan.json").stat().st_mode & 0o004 == mode


def test_a_run_that_was_moved_has_the_same_directory_on_its_hosts(tmp_path: Path) -> None:
    cluster = ClusterSpec.model_validate({"launcher": "ssh", "hosts": [{"address": "h1"}]})
    first = RunDirectory.create(tmp_path / "first", make_plan((), hosts=("h1",), cluster=cluster))
    before = create(first.plan, first.path).remote_run
    moved = RunDirectory.open(first.path.rename(tmp_path / "moved"))
    assert create(moved.plan, moved.path).remote_run == before
    second = RunDirectory.create(tmp_path / "first", first.plan)
    assert create(second.plan, second.path).remote_run != before


def test_a_disk_that_is_full_at_the_start_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise RunError(f"{path}: cannot be written: the disk is full")

    monkeypatch.setattr(directory, "write_atomic", full)
    with pytest.raises(RunError, match="full"):
        RunDirectory.create(tmp_path / "runs" / "first", make_plan())
    assert not (tmp_path / "runs" / "first").exists()


def test_an_incomplete_line_of_a_killed_writer_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ledger = RunEventLog(path, ["a"])
    ledger.move("a", "preparing")
    ledger.close()
    with path.open("ab") as file:
        file.write(b'{"at":"2026-01-01T00:00:00Z","kind":"sta')
    again = RunEventLog(path, ["a"])
    assert again.jobs["a"].state == "preparing"
    again.note("run_resumed")
    again.move("a", "running")
    again.close()
    assert statuses(["a"], read_events(path))["a"].state == "running"


STEPS = {f"step{step}": step for step in (8, *range(64, 705, 64))}
NAMES = list(STEPS)
PAIRS = ((None, NAMES[0]), *pairwise(NAMES))
SAVED = SavedCheckpoints(
    STEPS,
    CheckpointHashes(
        sha256=dict.fromkeys(STEPS, "00"), pairs=PAIRS, claimed="step320", final="step704", num_bytes=1, duration_s=1
    ),
    {},
)


def replayed(draw: str, most: float) -> list[tuple[str | None, str | None]]:
    return [(pair.start, pair.end) for pair in _replays(SAVED, draw, most)]


def test_a_secret_draws_pairs_in_addition_to_the_first_steps_and_those_that_end_in_evaluated_weights() -> None:
    drawn = [replayed(secret, MOST_DRAWN) for secret in ("one", "one", "two")]
    assert drawn[0] == drawn[1] != drawn[2]
    always = [(None, "step8"), ("step256", "step320"), ("step640", "step704")]
    assert [sorted(map(str, pairs[:3])) for pairs in drawn] == [sorted(map(str, always))] * 3
    assert len(drawn[0]) == 3 + MOST_DRAWN // 64


def test_all_pairs_are_replayed_on_request() -> None:
    assert sorted(map(str, replayed("a secret", math.inf))) == sorted(map(str, PAIRS))
