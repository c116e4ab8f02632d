"""Records that contradict each other, edited runs, signatures and the registry of runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accelmark.audit.verify import verify_run
from accelmark.cli.main import app
from accelmark.results.schema import CaseResult
from accelmark.results.store.bundle import Trust, unpack, write_bundle
from accelmark.run.record.directory import measure_run
from accelmark.run.record.registry import register, register_end
from accelmark.spec.log.records import ClockReading
from tests.audit.adversary.attack import edit_events
from tests.audit.test_rules import LOG, judged
from tests.made_run import BOOT_MS, WALL_MS, Made, make_run
from tests.run.fakes import make_plan

runner = CliRunner()


def rules(case: CaseResult) -> set[str]:
    return {found.rule for found in case.findings if found.severity == "error"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", Made(rounds=2))


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    return make_run(tmp_path / "wide", Made(nnodes=2, rounds=1))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    loaded = json.loads(path.read_text())
    change(loaded)
    path.write_text(json.dumps(loaded))


def test_an_honest_run_of_two_hosts_has_no_contradictions(wide: Path) -> None:
    contradictions = {"records-disagree", "rounds-not-planned", "clocks-disagree", "plan-not-registered"}
    assert not rules(judged(wide)) & contradictions


def test_swapped_host_directories_are_found(wide: Path) -> None:
    first, second = sorted(wide.glob("*/round1/*_noderank*"))
    first.rename(wide / "kept")
    second.rename(first)
    (wide / "kept").rename(second)
    assert "records-disagree" in rules(judged(wide))


def test_a_round_that_was_dropped_and_the_rest_renumbered_is_found(run: Path) -> None:
    slug = next(run.glob("*/round2")).parent
    shutil.rmtree(slug / "round1")
    (slug / "round2").rename(slug / "round1")
    edit(run / "plan.json", lambda plan: plan["jobs"].pop())
    case = judged(run)
    assert {"records-disagree", "rounds-not-planned"} <= rules(case)
    assert case.verdict == "INVALID"


def test_an_edited_metric_in_finished_is_found(run: Path) -> None:
    edit_events(run / LOG, "FINISHED", lambda value: value.update(final_metrics={"accuracy": 0.99}))
    assert "records-disagree" in rules(judged(run))


def test_telemetry_of_another_run_is_found(run: Path) -> None:
    path = next(run.glob("*/round1/*/telemetry.jsonl"))
    lines = path.read_text().splitlines()
    header = json.loads(lines[0])
    header["header"] |= {"t": BOOT_MS / 1e3, "wall": WALL_MS / 1e3 + 86_400}
    path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert "records-disagree" in rules(judged(run))


@pytest.mark.parametrize("clock", ["wall", "uptime", "rank"])
def test_clocks_that_run_apart_are_found_with_their_figures(run: Path, clock: str) -> None:
    log = run / LOG
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
        edit(log.parent / "exit.json", lambda end: end.update(clocks=clocks))

    state(1.0)
    assert "clocks-disagree" not in rules(judged(run))
    state(3.0)
    (found,) = {str(one) for one in judged(run).findings if one.rule == "clocks-disagree"}
    assert " s by " in found
    if clock == "rank":  # by more than a busy machine explains, and by less than its wall clock may differ
        trained_s = (times["TRAIN_END"]["mono_ms"] - times["TRAIN_START"]["mono_ms"]) / 1e3
        state(1 + 0.5 / trained_s)
        assert {one.severity for one in judged(run).findings if one.rule == "clocks-disagree"} == {"open"}


def test_a_recomputation_of_an_edited_run_is_refused(run: Path) -> None:
    measure_run(run)
    log = next(run.glob("*/round1/*/rank0.out.log"))
    log.write_text(log.read_text().replace('"wall_ms": 1', '"wall_ms": 0'))
    done = runner.invoke(app, ["report", str(run), "--recompute"])
    assert "is not recomputed" in str(done.exception)
    assert log.name in str(done.exception)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
    monkeypatch.setenv("ACCELMARK_SIGNING_KEY", str(key))
    return key


def test_a_signature_is_checked_against_the_keys_that_the_reader_trusts(
    run: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_run(run)
    assert verify_run(run).signature.status == "signed"
    assert verify_run(run, Trust(key=Path(f"{key}.pub"))).signature.status == "trusted"
    signers = tmp_path / "signers"
    signers.write_text(f"lab@example.com {Path(f'{key}.pub').read_text()}")
    assert verify_run(run, Trust(allowed_signers=signers)).signature.text == "signed by lab@example.com"
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    found = verify_run(run, Trust(key=Path(f"{other}.pub")))
    assert (found.signature.status, found.is_intact) == ("untrusted", True)
    done = runner.invoke(app, ["verify", str(run), "--key", f"{other}.pub"])
    assert done.exit_code == 1
    assert "is not a key that you named" in " ".join(done.stdout.split())
    assert "no file was changed" in " ".join(done.stdout.split())
    bundle = tmp_path / "run.accelmark.tar"
    monkeypatch.delenv("ACCELMARK_SIGNING_KEY")
    write_bundle(run, bundle)
    unpacked, problems = unpack(bundle, tmp_path / "unpacked")
    found = verify_run(unpacked, Trust(key=Path(f"{key}.pub")))
    assert (problems, found.signature.status, found.signature.changed, found.changed) == ([], "trusted", (), ())


def test_a_bundle_of_an_edited_signed_run_is_found(
    run: Path, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_run(run)
    signature = (run / "MANIFEST.sha256.sig").read_bytes()
    monkeypatch.delenv("ACCELMARK_SIGNING_KEY")
    assert "is signed" in str(runner.invoke(app, ["report", str(run), "--recompute"]).exception)
    log = next(run.glob("*/round1/*/rank0.out.log"))
    log.write_text(log.read_text().replace("0", "1"))
    measure_run(run, recompute=True)  # a new manifest over the edited files
    assert verify_run(run).signature.status == "unsigned"
    (run / "MANIFEST.sha256.sig").write_bytes(signature)
    assert verify_run(run).signature.status == "broken"
    bundle = tmp_path / "run.accelmark.tar"
    write_bundle(run, bundle)
    done = runner.invoke(app, ["verify", str(bundle)])
    assert done.exit_code == 1
    assert "The signature is not of these files" in done.stdout


def test_an_unsigned_run_says_so_and_is_refused_where_a_key_is_required(run: Path, key: Path) -> None:
    os.environ.pop("ACCELMARK_SIGNING_KEY")
    measure_run(run)
    assert "Unsigned." in runner.invoke(app, ["verify", str(run)]).stdout
    refused = runner.invoke(app, ["verify", str(run), "--key", f"{key}.pub"])
    assert refused.exit_code == 1
    assert f"error: the run is not signed as --key {key}.pub requires" in refused.stderr


def test_each_run_is_registered_with_its_number_and_the_earlier_ones_of_the_same_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELMARK_STATE", str(tmp_path / "state"))
    plan = make_plan(())
    for number in (1, 2, 3):
        run = make_run(tmp_path / f"run{number}", Made(rounds=1))
        register(plan, run)
        summary = measure_run(run)
        if number != 2:  # the second run was ended before it had results
            register_end(run, summary)
    case = judged(run)
    (found,) = [one for one in case.findings if one.rule == "run-registered"]
    earlier = f"number 1 ({case.verdict}), number 2 (no end)"
    assert found.actual == f"number 3 in the registry; 2 earlier of the same work, the last: {earlier}"
    for before, line in itertools.pairwise((tmp_path / "state" / "runs.jsonl").read_bytes().splitlines()):
        assert json.loads(line)["previous"] == hashlib.sha256(before).hexdigest()
    edit(run / "plan.json", lambda plan: plan.update(name="another"))
    assert "plan-not-registered" in rules(judged(run))
