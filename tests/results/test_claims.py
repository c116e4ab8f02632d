"""Claims: shipped files, verdicts on recorded runs, parsers of published results, and bad claims."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.compat.published import read_published
from accelmark.results.claims import CLAIMS, Claim, Reproduction, claim_files, load_claim, load_result, reproduce
from accelmark.spec.errors import RequestError, SpecError

RECORDED = Path(__file__).with_name("recorded")
LLAMA, RESNET = RECORDED / "h100_llama_1.3b.result.json", RECORDED / "h100_resnet50.result.json"
URL = "https://github.com/mlcommons/training_results_v4.0"


def checked(claim: str, result: Path) -> Reproduction:
    return reproduce(*load_claim(claim), load_result(result))


@pytest.mark.parametrize("name", claim_files())
def test_a_shipped_claim_has_a_source_and_a_unit_that_fits(name: str) -> None:
    _, claim = load_claim(name)
    assert claim.source.document
    assert claim.tolerance.why


def test_a_run_that_was_easier_than_the_claim_does_not_beat_it() -> None:
    found = checked("llm-foundry-1.3b-h100", LLAMA)
    assert found.verdict == "NOT COMPARABLE"
    assert found.advantage == pytest.approx(0.096, abs=0.001)
    assert [one.kind for one in found.differences if one.favours == "run"] == ["data", "scale", "model"]
    assert {one.kind for one in found.differences if one.favours == "claim"} == {"batch"}
    assert len(found.reasons) == 2


def test_a_run_that_was_easier_and_is_slower_is_short() -> None:
    found = checked("mlperf-resnet50-h100", RESNET)
    assert found.text == "SHORT BY 20.7 %"
    assert found.differences[0].kind == "batch"
    assert {one.kind for one in found.differences} == {"batch", "software", "data", "scale"}
    assert found.interval is None
    assert found.interval_reason is not None


@pytest.mark.parametrize(
    ("claim", "result"), [("accelmark-llama-1.3b-h100", LLAMA), ("accelmark-resnet50-h100", RESNET)]
)
def test_a_run_reproduces_its_own_claim(claim: str, result: Path) -> None:
    found = checked(claim, result)
    assert found.verdict == "REPRODUCED"
    assert not found.differences


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"value": 40000}, "BETTER"),
        ({"value": 60000}, "SHORT"),
        ({"hardware": "A100"}, "NOT COMPARABLE"),
        ({"settings": {"model.seq_length": 4096}}, "NOT COMPARABLE"),
        ({"figure": "throughput_train", "nproc": 8}, "NOT COMPARABLE"),
        ({"figure": "final_metric", "better": "lower", "steady": False}, "NOT COMPARABLE"),
    ],
)
def test_verdicts(changes: dict[str, Any], verdict: str) -> None:
    _, claim = load_claim("accelmark-llama-1.3b-h100")
    found = reproduce("changed", claim.model_copy(update=Claim.model_validate(
        claim.model_dump() | changes).model_dump(include=set(changes))), load_result(LLAMA))  # fmt: skip
    assert found.verdict == verdict


def test_a_run_of_another_case_is_refused() -> None:
    with pytest.raises(RequestError, match="resnet50"):
        checked("mlperf-resnet50-h100", LLAMA)


def test_claims_of_mlperf_and_flagperf_are_read() -> None:
    ((name, mlperf),) = read_published(RECORDED / "mlperf_resnet_result.txt", URL)
    assert name == "mlperf-resnet-h100x8"
    assert mlperf.value == pytest.approx(57209.488 / 8, abs=0.1)
    assert (mlperf.nproc, mlperf.settings["batch_size"]) == (8, 400)
    training = [claim for _, claim in read_published(RECORDED / "llama3_8B-megatron/README.md", URL)]
    assert [(one.hardware, one.num_devices, one.precision, one.value) for one in training] == [
        ("A100", 8, "bf16", 3698.7), ("H100", 8, "fp8", 10486), ("H100", 16, "bf16", 7914),
    ]  # fmt: skip
    ((_, inference),) = read_published(RECORDED / "resnet50/README.md", URL)
    assert (inference.hardware, inference.figure, inference.value) == ("A100", "inference_core", 12406)


def test_a_summary_of_mlperf_inference_is_named_by_its_directories(tmp_path: Path) -> None:
    file = tmp_path / "DGX-H100_H100-SXM-80GBx1_TRT/resnet50/Offline/performance/run_1/mlperf_log_summary.txt"
    file.parent.mkdir(parents=True)
    file.write_text("MLPerf Results Summary\nScenario : Offline\nSamples per second: 88526\nResult is : VALID\n")
    ((_, claim),) = read_published(file, URL)
    assert (claim.case, claim.hardware, claim.nproc, claim.value) == ("resnet50", "H100", 1, 88526)


def test_the_command_line_checks_a_result_and_writes_page_and_json(tmp_path: Path) -> None:
    runner, page = CliRunner(), tmp_path / "page.html"
    done = runner.invoke(app, ["reproduce", "mlperf-resnet50-h100", "--check", str(RESNET), "-o", str(page), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout) == json.loads(page.with_suffix(".json").read_text())
    assert "SHORT BY 20.7" in page.read_text()
    made = runner.invoke(app, ["import", "claims", str(RECORDED / "mlperf_resnet_result.txt"), "--url", URL,
                               "--out", str(tmp_path / "claims")])  # fmt: skip
    assert made.exit_code == 0, made.output
    again = ["reproduce", str(tmp_path / "claims/mlperf-resnet-h100x8.yaml"), "--check", str(RESNET)]
    assert "SHORT BY" in runner.invoke(app, again).stdout


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"source": None}, "source"),
        ({"unit": "images/s"}, "unit"),
        ({"value": -1}, "value"),
        ({"tolerance": {"ratio": 0.05}}, "tolerance.why"),
    ],
)
def test_a_bad_claim_is_one_error(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    values = yaml.safe_load((CLAIMS / "llm-foundry-1.3b-h100.yaml").read_text()) | changes
    file = tmp_path / "claim.yaml"
    file.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
    with pytest.raises(SpecError) as caught:
        load_claim(str(file))
    assert [problem.key for problem in caught.value.problems] == [key]
