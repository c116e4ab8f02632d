"""Verifying runs and bundles: what follows from the records passes, and an edited byte is found."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from accelmark.audit.verify import verify_run
from accelmark.cli.main import app
from accelmark.results.store.bundle import check_manifest, unpack, write_bundle, write_manifest
from accelmark.run.record.directory import measure_run
from accelmark.spec.errors import AccelmarkError, RequestError, RunError
from tests.audit.adversary.attack import add_event
from tests.audit.test_rules import LOG
from tests.made_run import Made, make_run

pytestmark = pytest.mark.adversary


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Made(rounds=2, windows=3, eval_ms=1000.0, eval_windows=(3,), metrics=(0.95,))
    run = make_run(tmp_path_factory.mktemp("runs") / "run", made)
    measure_run(run)
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_an_unmodified_run_is_intact(run: Path) -> None:
    seen = verify_run(run)
    assert (seen.changed, seen.differences, seen.summary.cases[0].verdict) == ((), (), "VALID")
    assert seen.num_figures > 50


def test_data_of_directories_is_compared_with_the_readers(run: Path, tmp_path: Path) -> None:
    (tmp_path / "images" / "train").mkdir(parents=True)
    (tmp_path / "images" / "train" / "1.jpg").write_bytes(b"jpeg")
    command = ["verify", str(run), "--data", str(tmp_path), "--json"]
    (nothing,) = json.loads(CliRunner().invoke(app, command).output)["differences"]
    assert nothing.startswith("no round recorded contents of its data")
    add_event(run / LOG, "DATA_READ", {"sample": {"images": {"train/1.jpg@0": hashlib.sha256(b"jpeg").hexdigest()}}})
    write_manifest(run)
    assert json.loads(CliRunner().invoke(app, command).output)["differences"] == []
    (tmp_path / "images" / "train" / "1.jpg").write_bytes(b"jpeG")
    (difference,) = json.loads(CliRunner().invoke(app, command).output)["differences"]
    assert "train/1.jpg@0" in difference


@pytest.mark.parametrize("file", ["toy-pytorch-X1x1x1/round1/result.json", "summary.json"])
def test_an_edited_figure_is_found_with_a_regenerated_manifest(run: Path, file: str) -> None:
    values = json.loads((run / file).read_text())
    figures = values["figures"] if "figures" in values else values["cases"][0]["figures"]
    name = next(name for name in figures if name.startswith("throughput_train"))
    figures[name]["value" if "value" in figures[name] else "mean"] *= 1.001
    (run / file).write_text(json.dumps(values))
    write_manifest(run)
    seen = verify_run(run)
    assert seen.changed == ()
    assert len(seen.differences) == 1
    assert name in seen.differences[0]


def test_an_edited_verdict_is_found(run: Path) -> None:
    (run / "toy-pytorch-X1x1x1/round1/node00_noderank0/telemetry.jsonl").unlink()
    write_manifest(run)
    assert any("recomputed INVALID" in what for what in verify_run(run).differences)


def test_an_event_that_was_edited_is_found_in_the_manifest_and_in_the_figures(run: Path) -> None:
    log = run / LOG
    log.write_text(log.read_text().replace('"wall_ms": 100.0', '"wall_ms": 90.0', 1).replace("9.0, 9.0", "8.0, 8.0", 1))
    seen = verify_run(run)
    assert any("rank0.out.log: was changed" in what for what in seen.changed)
    assert seen.differences


def test_a_file_that_was_added_or_removed_is_found(run: Path) -> None:
    (run / "extra.json").write_text("{}")
    (run / "events.jsonl").unlink()
    changed = " ".join(verify_run(run).changed)
    assert "extra.json: was added" in changed
    assert "events.jsonl: is missing" in changed


def test_a_bundle_is_the_same_each_time_and_verifies_elsewhere(run: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.tar", tmp_path / "b.tar"
    write_bundle(run, first)
    (run / "plan.json").touch()
    write_bundle(run, second)
    assert first.read_bytes() == second.read_bytes()
    unpacked, problems = unpack(first, tmp_path / "there")
    assert problems == []
    assert verify_run(unpacked).is_intact


def test_a_run_that_was_changed_is_not_bundled(run: Path, tmp_path: Path) -> None:
    inside = run / "own.tar"
    write_bundle(run, inside)
    write_bundle(run, inside)
    inside.unlink()
    with (run / LOG).open("a") as log:
        log.write("more\n")
    (run / "events.jsonl").unlink()
    with pytest.raises(RunError, match="is not bundled") as caught:
        write_bundle(run, tmp_path / "a.tar")
    assert "rank0.out.log: was changed" in str(caught.value)
    assert "events.jsonl: is missing" in str(caught.value)
    assert not (tmp_path / "a.tar").exists()


def test_secrets_do_not_leave_the_machine(run: Path, tmp_path: Path) -> None:
    plan = json.loads((run / "plan.json").read_text())
    plan["cluster"] = {
        "environment": {"HF_TOKEN": "hunter2hunter2", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        "container": {"pip_source": "https://bob:hunter2@host/simple", "options": ["--env=A_KEY=hunter2too"]},
    }
    (run / "plan.json").write_text(json.dumps(plan))
    with (run / LOG).open("a") as log:
        log.write("a print of hunter2hunter2, hunter2 and https://token2hunter2@host\n")
    write_manifest(run)
    write_bundle(run, tmp_path / "a.tar")
    packed = (tmp_path / "a.tar").read_bytes()
    assert b"hunter2" not in packed
    assert b"OMP_NUM_THREADS" in packed
    unpacked, problems = unpack(tmp_path / "a.tar", tmp_path / "there")
    assert (problems, verify_run(unpacked).is_intact) == ([], True)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_edited_byte_of_a_bundle_is_found(made: Path, tmp_path: Path, data: st.DataObject) -> None:
    bundle = tmp_path / "bundle.tar"
    write_bundle(made, bundle)
    raw = bytearray(bundle.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= data.draw(st.integers(1, 255))
    bundle.write_bytes(raw)
    try:
        unpacked, problems = unpack(bundle, tmp_path / "there" / str(place))
        problems += check_manifest(unpacked)
    except AccelmarkError as error:
        problems = [str(error)]
    assert problems


OUTSIDE = ("run/../../evil", "/etc/evil", "../evil", "evil", "run\\..\\evil")


@pytest.mark.parametrize(("name", "link"), [*((name, "") for name in OUTSIDE), ("run/link", "/etc/passwd")])
def test_an_entry_that_leads_elsewhere_and_a_link_are_refused(tmp_path: Path, name: str, link: str) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        entry = tarfile.TarInfo(name)
        entry.size, entry.linkname = 0 if link else 1, link
        entry.type = tarfile.SYMTYPE if link else tarfile.REGTYPE
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(RequestError, match="not a plain file" if link else "is a path outside of the run"):
        unpack(tmp_path / "bad.tar", tmp_path / "there")
    assert not (tmp_path / "there").exists()
