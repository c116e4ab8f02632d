"""Each rule of the audit, on generated runs in which one thing was changed."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import accelmark
from accelmark.audit import provenance
from accelmark.audit.verdict import audit_case
from accelmark.results.figures import FigureName
from accelmark.results.rounds.summary import round_result
from accelmark.results.schema import CaseResult, Figure
from accelmark.run.record.directory import measure_run
from accelmark.spec.plugins.case import ReferenceLoss
from accelmark.spec.plugins.catalog import case_hash, tree_files, tree_hash
from tests.audit.adversary.attack import edit_events
from tests.made_run import Made, make_run

SLUG = "toy-pytorch-X1x1x1"
LOG = f"{SLUG}/round1/node00_noderank0/rank0.out.log"


def change_started(run: Path, number: int, slug: str = SLUG, /, **values: Any) -> None:
    """Have rank 0 of a round tell something else in INIT_END."""
    log = run / slug / f"round{number}" / "node00_noderank0" / "rank0.out.log"
    edit_events(log, "INIT_END", lambda value: value.update(values))


def change_job(run: Path, number: int, change: Callable[[dict[str, Any]], None], slug: str = SLUG) -> None:
    path = run / slug / f"round{number}" / "job.json"
    job = json.loads(path.read_text())
    change(job)
    path.write_text(json.dumps(job))
    plan = json.loads((run / "plan.json").read_text())
    change(plan["jobs"][number - 1]["job"])
    (run / "plan.json").write_text(json.dumps(plan))


def judged(run: Path) -> CaseResult:
    return measure_run(run, recompute=True).cases[0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", Made(rounds=2))


def test_a_run_by_the_rules_is_valid(run: Path) -> None:
    case = judged(run)
    assert (case.verdict, case.reasons) == ("VALID", ())


@pytest.mark.parametrize(
    ("told", "rule"),
    [
        ({"compute_type": "float16"}, "precision"),
        ({"device_name": "Acme X2"}, "chip-mismatch"),
        ({"seed": 2000}, "seeds"),
    ],
)
def test_changes_by_hooks_make_a_run_invalid(run: Path, told: dict[str, Any], rule: str) -> None:
    change_started(run, 1, **told)
    case = judged(run)
    assert case.verdict == "INVALID"
    found = [finding for finding in case.findings if finding.severity == "error"]
    assert {finding.rule for finding in found} == {rule}
    assert all(finding.expected and finding.actual for finding in found)


@pytest.mark.parametrize(
    ("hardware", "vendor", "reason"),
    [
        ("H100", "cpu", "(expected: H100, as in the key) [chip-mismatch]"),
        ("H100-SXM", "cpu", "(expected: H100-SXM, as in the key) [chip-mismatch]"),
        ("X99", "cpu", "(expected: X99, as in the key) [chip-mismatch]"),
        ("CPU", "cpu", None),
        ("EPYC_9554", "cpu", None),
        ("H100", "acme", None),
    ],
)
def test_a_key_that_names_another_chip_than_the_hosts_cpus_is_found(
    tmp_path: Path, hardware: str, vendor: str, reason: str | None
) -> None:
    run = make_run(tmp_path / "run", Made(device_type="cpu", chip=None, hardware=hardware))
    slug = f"toy-pytorch-{hardware}x1x1"
    info = run / slug / "round1" / "node00_noderank0" / "sys_info.json"
    info.write_text(json.dumps({"cpu": {"model": "AMD EPYC 9554 64-Core Processor"}}))
    change_job(run, 1, lambda job: job.update(vendor=vendor), slug)
    case = judged(run)
    found = [text for text in case.reasons if "chip-mismatch" in text]
    assert found == ([f"round 1: the devices are AMD EPYC 9554 64-Core Processor (CPU) {reason}"] if reason else [])
    assert (case.verdict == "INVALID") is hardware.startswith("H100") or not reason


def test_a_chip_that_only_an_outside_vendor_describes_is_open(run: Path) -> None:
    change_job(run, 1, lambda job: job.update(vendor="acme"))
    case = judged(run)
    assert case.verdict == "OPEN"
    assert {finding.rule for finding in case.findings if finding.severity == "open"} == {"chip-mismatch"}


@pytest.mark.parametrize(
    ("device", "severity"),
    [("NVIDIA H100 80GB HBM3", None), ("NVIDIA A100-SXM4-80GB", "error"), ("NVIDIA Z9", "warning")],
)
def test_a_device_of_another_name_than_a_key_that_names_no_variant_is_found(
    tmp_path: Path, device: str, severity: str | None
) -> None:
    run = make_run(tmp_path / "run", Made(device_type="cuda", chip=None, hardware="H100"))
    slug = "toy-pytorch-H100x1x1"
    change_job(run, 1, lambda job: job.update(vendor="nvidia"), slug)
    change_started(run, 1, slug, device_name=device)
    found = [finding.severity for finding in judged(run).findings if finding.rule == "chip-mismatch"]
    assert found == ([severity] if severity else [])


def test_the_same_change_is_open_in_a_run_started_with_open(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", Made(is_open=True))
    change_started(run, 1, compute_type="float16")
    case = judged(run)
    assert case.verdict == "OPEN"
    assert any("[precision]" in reason for reason in case.reasons)


def test_a_copied_round_is_found_even_with_another_seed(run: Path) -> None:
    change_started(run, 2, checkpoint_hash="01" * 32)
    assert any("initial weights and all losses equal those of round 1" in reason for reason in judged(run).reasons)


def test_data_that_differs_from_its_declaration_or_between_rounds_is_found(run: Path) -> None:
    for number in (1, 2):
        change_job(run, number, lambda job: job.update(data_dirs={"words": "/data/words"}))
    assert any("data.json is missing" in reason for reason in judged(run).reasons)
    record = {"words": {"path": "/data/words", "fingerprint": "aa", "declared": "aa"}}
    for number in (1, 2):
        (run / SLUG / f"round{number}" / "data.json").write_text(json.dumps(record))
    assert judged(run).verdict == "VALID"
    record["words"] |= {"fingerprint": "bb"}
    (run / SLUG / "round2" / "data.json").write_text(json.dumps(record))
    reasons = judged(run).reasons
    assert any("words has fingerprint bb" in reason for reason in reasons)
    assert any("differs from an earlier round" in reason for reason in reasons)


def test_a_target_or_fixed_setting_other_than_the_cases_is_found(run: Path, plugins: Path) -> None:
    reasons = " ".join(judged(run).reasons)
    assert "settings-changed" in reasons
    assert "seed is" in reasons
    for number in (1, 2):
        change_job(run, number, lambda job: job["work"]["target"].update(value=0.5))
    assert any("[target]" in reason for reason in judged(run).reasons)


def test_settings_and_target_are_compared_with_the_rules_of_a_run(run: Path, plugins: Path) -> None:
    target = {"metric": "accuracy", "direction": "at_least", "value": 0.95, "why": "own"}
    rules = {"name": "own", "target": target, "mutable": ["seed"]}

    def by_rules(job: dict[str, Any]) -> None:
        job["rules"], job["work"]["target"] = rules, target

    for number in (1, 2):
        change_job(run, number, by_rules)
    reasons = " ".join(judged(run).reasons)
    assert "[target]" not in reasons
    assert "seed is" not in reasons
    assert "user's rules own" in reasons
    for number in (1, 2):
        change_job(run, number, lambda job: job["work"]["target"].update(value=0.9))
    assert "[target]" in " ".join(judged(run).reasons)


@pytest.mark.parametrize(
    ("steps", "factor", "words"),
    [((10, 50, 90), 1.0, None), ((10, 50, 90), 1.01, None), ((10, 50, 90), 1.05, ""), ((10, 500), 1.0, "at step 500")],
    ids=["on it", "within", "beyond", "the run ended before"],
)
def test_a_loss_outside_its_reference_band_has_a_rule_of_its_own(
    tmp_path: Path, steps: tuple[int, ...], factor: float, words: str | None
) -> None:
    losses = tuple(4 * math.exp(-step / 100 * 3) * factor for step in steps)
    reference = ReferenceLoss(steps=steps, loss=losses, max_mean_relative_error=0.02, source="made up for tests")
    case = judged(make_run(tmp_path / "run", Made(target=None, reference_loss=reference)))
    found = [finding for finding in case.findings if finding.severity == "error"]
    assert [finding.rule for finding in found] == ([] if words is None else ["reference-loss"])
    assert all((words or "") in finding.actual for finding in found)


@pytest.mark.parametrize("name", [FigureName.MFU, FigureName.PREFILL_MFU, FigureName.DECODE_MFU, FigureName.DECODE_MBU])
def test_a_round_that_exceeds_the_peak_of_its_chip_is_invalid(tmp_path: Path, name: FigureName) -> None:
    run, place = make_run(tmp_path / "run", Made()), f"{SLUG}/round1"
    result = round_result(run / place)
    result = result.model_copy(update={"figures": {**result.figures, name: Figure(value=1.2)}})
    case = audit_case(run, {place: result}, 1)
    assert [finding.rule for finding in case.findings if finding.severity == "error"] == ["implausible-utilisation"]


def test_a_run_without_a_record_of_its_source_is_invalid(run: Path) -> None:
    (run / "source.json").unlink()
    case = judged(run)
    assert case.verdict == "INVALID"
    assert any("[source-tree]" in reason for reason in case.reasons)


@pytest.mark.parametrize(("kind", "commit", "verdict"), [("wheel", None, "OPEN"), ("checkout", "c" * 40, "VALID")])
def test_edited_files_are_listed_and_take_a_release_out_of_comparison(
    run: Path, kind: str, commit: str | None, verdict: str
) -> None:
    file = "accelmark/train/loop/driver.py"
    found, texts = source_findings(run, kind=kind, version="1", commit=commit, modified=[file])
    assert (found, [file in text for text in texts]) == (verdict, [True])


def source_findings(run: Path, **source: Any) -> tuple[str, list[str]]:
    (run / "source.json").write_text(json.dumps({"version": accelmark.__version__, "sha256": "00" * 32} | source))
    case = judged(run)
    return case.verdict, [str(finding) for finding in case.findings if finding.rule == "source-tree"]


def test_another_build_than_the_verifying_one_of_the_same_version_is_named_with_files_that_differ(
    run: Path,
) -> None:
    for kind in ("wheel", "checkout", "folder"):
        assert source_findings(run, kind=kind, sha256=provenance.own_hash()) == ("VALID", [])
    own = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in tree_files(provenance.package())}
    verdict, (found,) = source_findings(run, kind="folder", files=own | {"api.py": "00" * 8, "gone.py": "00" * 8})
    assert verdict == "OPEN"
    assert "differ in api.py, gone.py" in found
    assert f"two builds have the version {accelmark.__version__}, verify with the one that ran" in found


def test_a_checkout_is_compared_with_the_commit_it_names(run: Path) -> None:
    command = ["git", "-C", str(provenance.package()), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not commit:
        pytest.skip("not a git checkout")
    known = provenance.hash_at(commit)
    assert known is not None
    assert source_findings(run, kind="checkout", commit=commit, sha256=known) == ("VALID", [])
    verdict, (found,) = source_findings(run, kind="checkout", commit=commit)
    assert (verdict, "as in that commit" in found) == ("OPEN", True)
    verdict, (found,) = source_findings(run, kind="checkout", commit="ab" * 20)
    assert (verdict, "the commit is not in this checkout" in found) == ("OPEN", True)


def test_a_commit_is_hashed_as_the_files_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pkg" / "accelmark"
    (package / "a" / "__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "a/b.py", "a.py", "a/README.md", "a/__pycache__/x.py"):
        (package / name).write_text(name)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(provenance, "package", lambda: package)
    assert provenance.hash_at.__wrapped__(commit) == tree_hash(package)


@pytest.mark.parametrize(("sha256", "severities"), [(None, []), ("ab" * 32, ["open"])])
def test_a_case_with_unknown_files_is_open(run: Path, plugins: Path, sha256: str | None, severities: list[str]) -> None:
    hashed = sha256 or case_hash(plugins / "cases" / "toy", "train")
    for number in (1, 2):
        change_job(run, number, lambda job: job["case"].update(sha256=hashed))
    found = [finding for finding in judged(run).findings if "files on this machine" in finding.expected]
    assert [finding.severity for finding in found] == severities


def test_the_cost_of_an_adaptation_and_of_a_vendors_variables_and_module_is_counted(run: Path) -> None:
    change_started(run, 1, hooks={"train_step": "/v/acme/extern/__init__.py:12"}, hook_lines={"train_step": 9})

    def adapted(job: dict[str, Any]) -> None:
        job |= {"framework_module": "evil_fm", "vendor_environment": {"FAST": "1"}}
        job["adaptation"] = {
            "path": "/v/acme/cases/toy-pytorch", "sha256": "00",
            "extern": {"__init__.py": 31}, "kernels": {"gelu.cpp": 80},
            "requirements": ["torch_acme==2.1"],
        }  # fmt: skip
        job["provenance"]["precision"] |= {
            "layer": "vendors/nvidia/cases/toy-pytorch/config_X1x1x1.yaml",
            "replaced": [["case.yaml", "fp32"], ["vendors/nvidia/cases/toy-pytorch/config.yaml", "bf16"]],
        }  # fmt: skip
        repeated = job["provenance"]["seed"]  # the case's own value, which is no change
        repeated |= {"layer": "vendors/nvidia/vendor.yaml", "replaced": [["case.yaml", repeated["value"]]]}

    change_job(run, 1, adapted)
    cost = judged(run).adaptation
    assert cost is not None
    assert [(key.key, key.standard, key.value) for key in cost.keys] == [("precision", "fp32", "bf16")]
    (hook,) = cost.hooks
    assert (hook.name, hook.place, hook.num_lines) == ("train_step", "acme/extern/__init__.py:12", 9)
    assert (cost.extern, cost.kernels) == ({"__init__.py": 31}, {"gelu.cpp": 80})
    assert cost.requirements == ("torch_acme==2.1",)
    assert (cost.framework_module, cost.vendor_environment) == ("evil_fm", ("FAST",))


@pytest.mark.parametrize("name", ["PYTHONPATH", "LD_PRELOAD", "PYTHONSTARTUP"])
@pytest.mark.parametrize("origin", ["vendor.yaml", "environment_variables.sh"])
def test_a_variable_that_loads_code_before_accelmarks_takes_a_run_out_of_comparison(
    run: Path, name: str, origin: str
) -> None:
    if origin == "vendor.yaml":
        change_job(run, 1, lambda job: job.update(vendor_environment={name: "/evil", "ACME_MODE": "1"}))
    else:
        record = run / SLUG / "round1" / "node00_noderank0" / "adaptation.json"
        record.write_text(json.dumps({"environment": {name: "/evil", "ACME_MODE": "1"}}))
    case = judged(run)
    assert case.verdict == "OPEN"
    (reason,) = case.reasons
    assert f"{origin} sets {name}: " in reason


@pytest.mark.parametrize(
    ("seconds", "severity"), [(0.5, "open"), (1.5, "warning"), (30.0, None)], ids=["no time", "short", "long"]
)
def test_a_training_too_short_to_be_timed_is_out_of_comparison(
    tmp_path: Path, seconds: float, severity: str | None
) -> None:
    made = Made(windows=1, eval_windows=(1,), metrics=(0.95,), eval_ms=0.0, step_ms=seconds * 100 - 1)
    case = judged(make_run(tmp_path / "run", made))
    found = [finding for finding in case.findings if finding.rule == "too-short"]
    assert [finding.severity for finding in found] == ([severity] if severity else [])
    assert case.verdict == ("OPEN" if severity == "open" else "VALID")


@pytest.mark.parametrize(
    ("devices", "reason"),
    [([], "the vendor declares no way"), ([{"index": 0, "name": "Acme X1 Pod"}], "telemetry has no devices")],
)
def test_telemetry_that_read_no_device_of_the_ranks_takes_a_run_out_of_comparison(
    run: Path, devices: list[dict[str, Any]], reason: str
) -> None:
    path = run / SLUG / "round1" / "node00_noderank0" / "telemetry.jsonl"
    header, *samples = map(json.loads, path.read_text().splitlines())
    header["header"]["devices"] = devices
    if not devices:
        header["header"]["reasons"]["devices"] = "the vendor declares no way to read its devices"
    samples = [sample | {"devices": []} if "t" in sample else sample for sample in samples]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *samples)))
    case = judged(run)
    assert case.verdict == "OPEN"
    (found,) = [finding for finding in case.findings if finding.rule == "telemetry-missing"]
    assert (found.severity, reason in found.actual) == ("open", True)
