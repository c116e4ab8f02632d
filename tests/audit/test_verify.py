"""Verifying runs and bundles: what follows from the records passes, an edited byte and contradictions are found.

Signatures and the registry of runs, too.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from accelmark.audit.verify import verify_run
from accelmark.cli.main import app
from accelmark.results.schema import CaseResult
from accelmark.results.store.bundle import Trust, check_manifest, unpack, write_bundle, write_manifest
from accelmark.run.record.directory import measure_run
from accelmark.run.record.registry import register, register_end
from accelmark.spec.errors import AccelmarkError, RequestError, RunError
from accelmark.spec.log.records import ClockReading
from tests.audit.adversary.attack import add_event, edit_events
from tests.audit.test_rules import LOG, judged
from tests.made_run import BOOT_MS, WALL_MS, Made, change_json, change_lines, make_run
from tests.run.fakes import make_plan

pytestmark = pytest.mark.adversary
runner = CliRunner()


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
    (nothing,) = json.loads(runner.invoke(app, command).output)["differences"]
    assert nothing.startswith("no round recorded contents of its data")
    add_event(run / LOG, "DATA_READ", {"sample": {"images": {"train/1.jpg@0": hashlib.sha256(b"jpeg").hexdigest()}}})
    write_manifest(run)
    assert json.loads(runner.invoke(app, command).output)["differences"] == []
    (tmp_path / "images" / "train" / "1.jpg").write_bytes(b"jpeG")
    (difference,) = json.loads(runner.invoke(app, command).output)["differences"]
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
    cluster = {
        "environment": {"HF_TOKEN": "hunter2hunter2", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        "container": {"pip_source": "https://bob:hunter2@host/simple", "options": ["--env=A_KEY=hunter2too"]},
    }
    change_json(run / "plan.json", cluster=cluster)
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


def rules(case: CaseResult) -> set[str]:
    return {found.rule for found in case.findings if found.severity == "error"}


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", Made(rounds=2))


def test_swapped_directories_of_an_honest_run_of_two_hosts_are_found(tmp_path: Path) -> None:
    wide = make_run(tmp_path / "wide", Made(nnodes=2, rounds=1))
    contradictions = {"records-disagree", "rounds-not-planned", "clocks-disagree", "plan-not-registered"}
    assert not rules(judged(wide)) & contradictions
    first, second = sorted(wide.glob("*/round1/*_noderank*"))
    first.rename(wide / "kept")
    second.rename(first)
    (wide / "kept").rename(second)
    assert "records-disagree" in rules(judged(wide))


def test_a_round_that_was_dropped_and_the_rest_renumbered_is_found(fresh: Path) -> None:
    slug = next(fresh.glob("*/round2")).parent
    shutil.rmtree(slug / "round1")
    (slug / "round2").rename(slug / "round1")
    change_json(fresh / "plan.json", jobs=json.loads((fresh / "plan.json").read_text())["jobs"][:-1])
    case = judged(fresh)
    assert {"records-disagree", "rounds-not-planned"} <= rules(case)
    assert case.verdict == "INVALID"


def test_an_edited_metric_in_finished_is_found(fresh: Path) -> None:
    edit_events(fresh / LOG, "FINISHED", lambda value: value.update(final_metrics={"accuracy": 0.99}))
    assert "records-disagree" in rules(judged(fresh))


def test_telemetry_of_another_run_is_found(fresh: Path) -> None:
    path, times = next(fresh.glob("*/round1/*/telemetry.jsonl")), {"t": BOOT_MS / 1e3, "wall": WALL_MS / 1e3 + 86_400}
    change_lines(path, lambda line: {"header": line["header"] | times} if "header" in line else line)
    assert "records-disagree" in rules(judged(fresh))


@pytest.mark.parametrize("clock", ["wall", "uptime", "rank"])
def test_clocks_that_run_apart_are_found_with_their_figures(fresh: Path, clock: str) -> None:
    log = fresh / LOG
    events = [json.loads(line.removeprefix("[PerfLog] ")) for line in log.read_text().splitlines()]
    times = {event["event"]: event["metadata"] for event in events}

    def reading(event: str, factor: float = 1.0) -> dict[str, Any]:
        mono_s = times["INIT_START"]["mono_ms"] / 1e3
        passed_s = times[event]["mono_ms"] / 1e3 - mono_s
        wall, uptime = (factor if clock == name else 1.0 for name in ("wall", "uptime"))
        seen = factor if clock == "rank" else 1.0
        return ClockReading(
            wall_s=1e9 + passed_s * wall * seen, mono_s=mono_s + passed_s * seen, uptime_s=50 + passed_s * uptime * seen
        ).model_dump()

    def state(factor: float) -> None:
        clocks = {
            "began": reading("INIT_START", factor),
            "ended": reading("FINISHED", factor),
            "seen": {event: [reading(event, factor)] * 2 for event in ("TRAIN_START", "TRAIN_END")},
        }
        change_json(log.parent / "exit.json", clocks=clocks)

    state(1.0)
    assert "clocks-disagree" not in rules(judged(fresh))
    state(3.0)
    (found,) = {str(one) for one in judged(fresh).findings if one.rule == "clocks-disagree"}
    assert " s by " in found
    if clock == "rank":  # by more than a busy machine explains, and by less than its wall clock may differ
        trained_s = (times["TRAIN_END"]["mono_ms"] - times["TRAIN_START"]["mono_ms"]) / 1e3
        state(1 + 0.5 / trained_s)
        assert {one.severity for one in judged(fresh).findings if one.rule == "clocks-disagree"} == {"open"}


def test_a_recomputation_of_an_edited_run_is_refused(fresh: Path) -> None:
    measure_run(fresh)
    log = next(fresh.glob("*/round1/*/rank0.out.log"))
    log.write_text(log.read_text().replace('"wall_ms": 1', '"wall_ms": 0'))
    done = runner.invoke(app, ["report", str(fresh), "--recompute"])
    assert "is not recomputed" in str(done.exception)
    assert log.name in str(done.exception)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    monkeypatch.setenv("ACCELMARK_SIGNING_KEY", str(key))
    return key


def test_a_signature_is_checked_against_the_keys_that_the_reader_trusts(
    fresh: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_run(fresh)
    assert verify_run(fresh).signature.status == "signed"
    assert verify_run(fresh, Trust(key=Path(f"{key}.pub"))).signature.status == "trusted"
    signers = tmp_path / "signers"
    signers.write_text(f"lab@example.com {Path(f'{key}.pub').read_text()}")
    assert verify_run(fresh, Trust(allowed_signers=signers)).signature.text == "signed by lab@example.com"
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    found = verify_run(fresh, Trust(key=Path(f"{other}.pub")))
    assert (found.signature.status, found.is_intact) == ("untrusted", True)
    done = runner.invoke(app, ["verify", str(fresh), "--key", f"{other}.pub"])
    assert done.exit_code == 1
    assert "is not a key that you named" in " ".join(done.stdout.split())
    assert "no file was changed" in " ".join(done.stdout.split())
    bundle = tmp_path / "run.accelmark.tar"
    monkeypatch.delenv("ACCELMARK_SIGNING_KEY")
    write_bundle(fresh, bundle)
    unpacked, problems = unpack(bundle, tmp_path / "unpacked")
    found = verify_run(unpacked, Trust(key=Path(f"{key}.pub")))
    assert (problems, found.signature.status, found.signature.changed, found.changed) == ([], "trusted", (), ())


def test_a_bundle_of_an_edited_signed_run_is_found(
    fresh: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_run(fresh)
    signature = (fresh / "MANIFEST.sha256.sig").read_bytes()
    monkeypatch.delenv("ACCELMARK_SIGNING_KEY")
    assert "is signed" in str(runner.invoke(app, ["report", str(fresh), "--recompute"]).exception)
    log = next(fresh.glob("*/round1/*/rank0.out.log"))
    log.write_text(log.read_text().replace("0", "1"))
    measure_run(fresh, recompute=True)  # a new manifest over the edited files
    assert verify_run(fresh).signature.status == "unsigned"
    (fresh / "MANIFEST.sha256.sig").write_bytes(signature)
    assert verify_run(fresh).signature.status == "broken"
    bundle = tmp_path / "run.accelmark.tar"
    write_bundle(fresh, bundle)
    done = runner.invoke(app, ["verify", str(bundle)])
    assert done.exit_code == 1
    assert "The signature is not of these files" in done.stdout


def test_an_unsigned_run_says_so_and_is_refused_where_a_key_is_required(fresh: Path, key: Path) -> None:
    os.environ.pop("ACCELMARK_SIGNING_KEY")
    measure_run(fresh)
    assert "Unsigned." in runner.invoke(app, ["verify", str(fresh)]).stdout
    refused = runner.invoke(app, ["verify", str(fresh), "--key", f"{key}.pub"])
    assert refused.exit_code == 1
    assert f"error: the run is not signed as --key {key}.pub requires" in refused.stderr


def test_each_run_is_registered_with_its_number_and_the_earlier_ones_of_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELMARK_STATE", str(tmp_path / "state"))
    plan = make_plan(())
    for number in (1, 2, 3):
        fresh = make_run(tmp_path / f"run{number}", Made(rounds=1))
        register(plan, fresh)
        summary = measure_run(fresh)
        if number != 2:  # the second run was ended before it had results
            register_end(fresh, summary)
    case = judged(fresh)
    (found,) = [one for one in case.findings if one.rule == "run-registered"]
    earlier = f"number 1 ({case.verdict}), number 2 (no end)"
    assert found.actual == f"number 3 in the registry; 2 earlier of the same work, the last: {earlier}"
    for before, line in itertools.pairwise((tmp_path / "state" / "runs.jsonl").read_bytes().splitlines()):
        assert json.loads(line)["previous"] == hashlib.sha256(before).hexdigest()
    change_json(fresh / "plan.json", name="another")
    assert "plan-not-registered" in rules(judged(fresh))
