"""A ledger: bundles are verified before they are added, records are only added, and a page shows them."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accelmark.audit.verify import verify_run
from accelmark.cli.main import app
from accelmark.ledger.ledger import SIGNERS, add_bundle, add_result, check_ledger, parties, read_ledger, withdraw
from accelmark.report.ledger_page import render_ledger
from accelmark.results.store.bundle import KEY_VARIABLE, SUFFIX, write_bundle
from accelmark.run.record.directory import measure_run
from accelmark.spec.errors import AccelmarkError, RequestError, RunError
from tests.made_run import Made, make_run

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "tests/results/recorded/h100_resnet50.result.json"


def made_bundle(root: Path, name: str, *, registered: bool = True, **changes: Any) -> Path:
    """Make a run (GENERATED: nothing was measured) and its bundle."""
    run = make_run(root / name, Made(**({"rounds": 2, "jitter": 1.0, "synthetic": True} | changes)))
    if registered:
        entry = {
            "at": "2026-11-28T00:00:00Z", "nonce": name, "work_sha256": "0" * 64, "number": 1,
            "plan_sha256": hashlib.sha256((run / "plan.json").read_bytes()).hexdigest(),
        }  # fmt: skip
        (run / "registration.json").write_text(json.dumps(entry))
    measure_run(run)
    bundle = root / f"{name}{SUFFIX}"
    write_bundle(run, bundle)
    return bundle


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bundles")
    with pytest.MonkeyPatch.context() as patch:
        for who in ("alice", "bob"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", root / who], check=True)
            patch.setenv(KEY_VARIABLE, str(root / who))
            made_bundle(root, f"by-{who}")
        patch.delenv(KEY_VARIABLE)
        made_bundle(root, "unsigned")
        made_bundle(root, "unregistered", registered=False)
        made_bundle(root, "invalid", synthetic=False, metrics=(0.1, 0.2))
    return root


@pytest.fixture
def ledger(bundles: Path, tmp_path: Path) -> Path:
    """A ledger in which alice and bob may sign."""
    root = tmp_path / "ledger"
    root.mkdir()
    keys = ((who, (bundles / f"{who}.pub").read_text()) for who in ("alice", "bob"))
    (root / SIGNERS).write_text("".join(f"{who} {key}" for who, key in keys))
    return root


def bundle(bundles: Path, name: str) -> Path:
    return bundles / f"{name}{SUFFIX}"


def files(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}


def git(place: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", place, *who, *arguments], check=True, capture_output=True)


def test_a_bundle_is_added_and_verified_again(bundles: Path, ledger: Path) -> None:
    path = add_bundle(ledger, bundle(bundles, "by-alice"), by="Alice")
    (entry,) = read_ledger(ledger).entries
    assert entry.id == path.stem
    record = entry.record
    assert (record.signed_by, record.registered, record.evidence.kind) == ("alice", "number 1", "bundle")
    case = record.cases[0]
    assert (case.verdict, case.work["data"], case.num_rounds) == ("INVALID", "synthetic", 2)
    assert case.headline is not None
    assert case.headline.low is not None
    assert path.stat().st_size < 8_000
    checked = check_ledger(ledger)
    assert (checked.num_records, checked.num_verified, checked.problems) == (1, 1, [])


def test_another_signer_reproduces_a_result(bundles: Path, ledger: Path) -> None:
    first = add_bundle(ledger, bundle(bundles, "by-alice"), by="Alice")
    add_bundle(ledger, bundle(bundles, "by-bob"), by="Bob")
    add_bundle(ledger, bundle(bundles, "unsigned"), by="Carol")
    entries = read_ledger(ledger).valid
    by_signer = {entry.record.signed_by: entry.record.reproduces for entry in entries}
    assert by_signer == {"alice": (), "bob": (first.stem,), None: ()}
    assert set(parties(entries).values()) == {2}


@pytest.mark.parametrize("name", ["unregistered", "invalid"])
def test_a_run_that_does_not_pass_is_refused(bundles: Path, ledger: Path, name: str) -> None:
    before = files(ledger)
    with pytest.raises(RunError, match="regist" if name == "unregistered" else "INVALID"):
        add_bundle(ledger, bundle(bundles, name), by="Alice")
    assert files(ledger) == before


def test_a_changed_byte_is_refused(bundles: Path, ledger: Path, tmp_path: Path) -> None:
    raw = bundle(bundles, "by-alice").read_bytes()
    before, figures, after = raw.partition(b'"figures"')
    edited = tmp_path / f"edited{SUFFIX}"
    edited.write_bytes(before + figures + after.replace(b"1", b"2", 1))
    with pytest.raises(AccelmarkError, match="changed"):
        add_bundle(ledger, edited, by="Alice")


def test_a_signature_of_an_unknown_key_is_refused(bundles: Path, ledger: Path) -> None:
    (ledger / SIGNERS).write_text(f"bob {(bundles / 'bob.pub').read_text()}")
    with pytest.raises(RunError, match="allowed_signers"):
        add_bundle(ledger, bundle(bundles, "by-alice"), by="Alice")


def test_a_second_record_of_a_run_is_refused(bundles: Path, ledger: Path) -> None:
    first = add_bundle(ledger, bundle(bundles, "unsigned"), by="Alice", at="https://example.org/run.tar")
    with pytest.raises(RequestError, match=first.stem):
        add_bundle(ledger, bundle(bundles, "unsigned"), by="Bob")
    copy = json.loads(first.read_text()) | {"by": "Bob"}
    text = json.dumps(copy)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    first.with_name(f"{first.stem[:-16]}{digest}.json").write_text(text)
    assert any("second record" in problem for problem in check_ledger(ledger).problems)


def test_check_names_changed_records_and_bundles(bundles: Path, ledger: Path) -> None:
    path = add_bundle(ledger, bundle(bundles, "unsigned"), by="Alice")
    (packed,) = (ledger / "bundles").iterdir()
    original = path.read_text()
    path.write_text(original.replace('"by": "Alice"', '"by": "Bob"'))
    assert any("was changed" in problem for problem in check_ledger(ledger).problems)
    path.write_text(original)
    packed.write_bytes(packed.read_bytes() + b"\0")
    (problem,) = check_ledger(ledger).problems
    assert path.stem in problem
    packed.unlink()
    assert "missing" in check_ledger(ledger).problems[0]


def test_a_better_figure_with_a_right_name_is_found_by_the_bundle(bundles: Path, ledger: Path) -> None:
    path = add_bundle(ledger, bundle(bundles, "unsigned"), by="Alice")
    record = json.loads(path.read_text())
    record["cases"][0]["figures"]["throughput_train"]["value"] *= 2
    path.unlink()
    text = json.dumps(record)
    path.with_name(f"{path.stem[:-16]}{hashlib.sha256(text.encode()).hexdigest()[:16]}.json").write_text(text)
    (problem,) = check_ledger(ledger).problems
    assert "another record: cases" in problem


def test_a_verdict_of_another_version_is_kept_but_no_new_record_may_rely_on_it(
    bundles: Path, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(bundles / "unsigned", run)
    summary = run / "summary.json"
    summary.write_text(summary.read_text().replace('"INVALID"', '"VALID"', 1))
    (run / "MANIFEST.sha256").unlink()
    packed = tmp_path / f"other{SUFFIX}"
    write_bundle(run, packed)
    with pytest.raises(RunError, match="with the AccelMark that ran"):
        add_bundle(ledger, packed, by="Alice")
    with monkeypatch.context() as patch:  # the version that ran gives this verdict
        patch.setattr(
            "accelmark.ledger.ledger.verify_run", lambda *given: verify_run(*given)._replace(verdict_differences=())
        )
        add_bundle(ledger, packed, by="Alice")
    checked = check_ledger(ledger)
    assert (checked.problems, checked.num_verified, checked.num_other_version) == ([], 1, 1)
    for command in (["init"], ["commit", "--allow-empty", "-m", "first"], ["add", "."]):
        git(ledger, *command)
    (problem,) = check_ledger(ledger, since="HEAD").problems
    assert "recomputed INVALID" in problem


def test_records_are_only_added(bundles: Path, ledger: Path) -> None:
    first = add_bundle(ledger, bundle(bundles, "by-alice"), by="Alice")
    for command in (["init"], ["add", "."], ["commit", "-m", "first"]):
        git(ledger, *command)
    back = withdraw(ledger, first.stem, by="Alice", why="a fan was broken")
    add_bundle(ledger, bundle(bundles, "by-bob"), by="Bob")
    git(ledger, "add", ".")
    checked = check_ledger(ledger, since="HEAD")
    assert (checked.problems, checked.num_withdrawn) == ([], 1)
    assert read_ledger(ledger).withdrawn[first.stem].why == "a fan was broken"
    with pytest.raises(RequestError, match="already"):
        withdraw(ledger, first.stem, by="Alice", why="again")
    first.unlink()
    assert any("removed since HEAD" in problem for problem in check_ledger(ledger, since="HEAD").problems)
    assert back.is_file()


def test_a_result_file_is_marked_as_not_verified(ledger: Path) -> None:
    path = add_result(ledger, RESULT, by="Alice", note="a laptop")
    (entry,) = read_ledger(ledger).entries
    assert (entry.record.by, entry.record.note) == ("Alice", "a laptop")
    assert entry.record.evidence.kind == "result file"
    assert "nothing could be verified" in entry.record.cases[0].reasons[0]
    checked = check_ledger(ledger)
    assert (checked.num_result_files, checked.num_verified, checked.problems) == (1, 0, [])
    assert "result file" in render_ledger(read_ledger(ledger))
    assert path.is_file()


def test_the_ledger_of_this_repository_passes() -> None:
    checked = check_ledger(ROOT / "ledger")
    assert checked.problems == []
    assert checked.num_made_up == 0
    assert checked.num_verified >= 1
    assert checked.num_result_files >= 5


def test_the_command_line(bundles: Path, ledger: Path, tmp_path: Path) -> None:
    runner, where = CliRunner(), ["--ledger", str(ledger)]
    packed = str(bundle(bundles, "by-alice"))
    added = runner.invoke(app, ["ledger", "add", packed, "--by", "Alice", *where, "--json"])
    assert json.loads(added.stdout)["record"]
    assert "1 recomputed" in runner.invoke(app, ["ledger", "check", *where]).stdout
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\ndevices: {X1: {per_hour: 2.5}}\n")
    site = ["ledger", "site", str(tmp_path / "site"), *where, "--prices", str(prices)]
    assert runner.invoke(app, site).exit_code == 0
    page = (tmp_path / "site/index.html").read_text()
    assert "Cost per million tokens" in page
    (next((ledger / "records").glob("*/*.json"))).write_text("{}")
    assert runner.invoke(app, ["ledger", "check", *where]).exit_code == 1
